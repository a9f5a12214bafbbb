#pragma once
#include <string>
#include <utility>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// How a parameter gets its first values. `normal` is keyed by (seed, name, global element index): any layout
/// draws the same weights.
struct Init {
  enum class Kind { zeros, ones, normal };
  Kind kind = Kind::zeros;
  float std = 0.0f;

  static Init zeros() { return {Kind::zeros, 0.0f}; }
  static Init ones() { return {Kind::ones, 0.0f}; }
  static Init normal(float std) { return {Kind::normal, std}; }
};

/// A named weight. Modules declare it (name, shape, init); a ParamStore gives it memory.
class Parameter {
 public:
  Parameter(std::string name, Shape shape, Init init) : name_(std::move(name)), shape_(shape), init_(init) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const std::string& name() const { return name_; }
  const Shape& shape() const { return shape_; }
  const Init& init() const { return init_; }

  /// The weight as kernels read it. Errors: InvalidArgument before memory is bound.
  const Tensor& value() const {
    TESSERA_CHECK(value_, "parameter ", name_, " has no memory yet: put its module into a ParamStore first");
    return value_;
  }
  /// fp32 gradient, or undefined if the parameter is not trained.
  const Tensor& grad() const { return grad_; }
  bool trained() const { return static_cast<bool>(grad_); }

  /// The weight in fp32: the same memory as value() unless that is a bf16 copy. Norms and embeddings read it:
  /// rounding one of their few values would round a whole column or row of activations.
  const Tensor& main() const {
    TESSERA_CHECK(main_, "parameter ", name_, " has no fp32 weight in this process");
    return main_;
  }

  /// `main` may be left out where `value` is fp32 itself.
  void bind(Tensor value, Tensor grad, Tensor main = {}) {
    main_ = main || value.dtype() != DType::f32 ? std::move(main) : value;
    value_ = std::move(value);
    grad_ = std::move(grad);
  }

  /// The beta with which the next contribution must be written into grad(): 0 for the first since
  /// clear_grad(), then 1. So nothing is ever set to zero first.
  float next_beta() { return std::exchange(written_, true) ? 1.0f : 0.0f; }
  /// Whether grad() holds a gradient since clear_grad().
  bool has_grad() const { return written_; }
  void clear_grad() { written_ = false; }

 private:
  std::string name_;
  Shape shape_;
  Init init_;
  Tensor value_, grad_, main_;
  bool written_ = false;
};

}  // namespace tessera
