#pragma once
#include <functional>
#include <string>
#include <utility>

#include "tessera/comm/placement.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// How a parameter gets its first values. `normal` is keyed by (seed, name, global element index): any layout
/// draws the same weights.
struct Init {
  enum class Kind { zeros, ones, normal };
  Kind kind = Kind::zeros;
  float std = 0.0f;
  /// The first so many rows of the whole weight have a standard deviation of their own.
  std::int64_t first_rows = 0;
  float first_std = 0.0f;

  static Init zeros() { return {Kind::zeros}; }
  static Init ones() { return {Kind::ones}; }
  static Init normal(float std) { return {Kind::normal, std}; }
  static Init normal(float std, std::int64_t first_rows, float first_std) {
    return {Kind::normal, std, first_rows, first_std};
  }
};

/// What else a ParamStore must know of a parameter.
struct ParameterTraits {
  /// Kernels read the fp32 weight (Parameter::main): norms and embeddings.
  bool reads_main = false;
  /// Whole on every tensor rank, but each computes a part of its gradient: the parts are summed (what lies in
  /// the sequence-parallel region).
  bool partial_over_tensor = false;
  /// Another pipeline stage holds a copy: their gradients are summed.
  bool tied = false;
  /// False for the copy of a tied weight that another stage counts in norms, sizes and checkpoints.
  bool counted = true;
  /// One of the experts that expert ranks share out: only some of the replicas hold it.
  bool expert = false;
};

/// A named weight. Modules declare it (name, placement, init); a ParamStore gives it memory. Its tensors are
/// this rank's part of it.
class Parameter {
 public:
  Parameter(std::string name, Placement placement, Init init, ParameterTraits traits = {})
      : name_(std::move(name)), placement_(std::move(placement)), init_(init), traits_(traits) {}
  Parameter(std::string name, Shape shape, Init init, ParameterTraits traits = {})
      : Parameter(std::move(name), Placement::replicated(shape), init, traits) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const std::string& name() const { return name_; }
  /// Of this rank's part.
  const Shape& shape() const { return placement_.local(); }
  const Placement& placement() const { return placement_; }
  const ParameterTraits& traits() const { return traits_; }
  const Init& init() const { return init_; }

  /// The weight as kernels read it; waits for its gate. Errors: InvalidArgument before memory is bound.
  const Tensor& value() const {
    pass_gate();
    TESSERA_CHECK(value_, "parameter ", name_, " has no memory yet: put its module into a ParamStore first");
    return value_;
  }
  /// fp32 gradient, or undefined if the parameter is not trained. Where there is memory for it only from its
  /// first contribution to its reduction, asking for it makes some.
  const Tensor& grad() const {
    if (!grad_ && make_grad_) make_grad_();
    return grad_;
  }
  bool trained() const { return grad_ || make_grad_; }

  /// The weight in fp32: the same memory as value() unless that is a bf16 copy. Norms and embeddings read it:
  /// rounding one of their few values would round a whole column or row of activations.
  const Tensor& main() const {
    pass_gate();
    TESSERA_CHECK(main_, "parameter ", name_, " has no fp32 weight in this process");
    return main_;
  }

  /// `main` may be left out where `value` is fp32 itself.
  void bind(Tensor value, Tensor grad, Tensor main = {}) {
    bind_weight(std::move(value), std::move(main));
    grad_ = std::move(grad);
    make_grad_ = nullptr;
  }
  /// The weight alone; undefined while it is not here, which its gate must then change.
  void bind_weight(Tensor value, Tensor main = {}) {
    main_ = main || !value || value.dtype() != DType::f32 ? std::move(main) : value;
    value_ = std::move(value);
  }
  /// A gradient that has memory for a while only: `make` binds some by bind_grad().
  void bind_grad_maker(std::function<void()> make) {
    grad_ = {};
    make_grad_ = std::move(make);
  }
  void bind_grad(Tensor grad) { grad_ = std::move(grad); }

  /// Something to wait for before the weight is read next: the all-gather that brings its new values. Called
  /// once; again at the next read if it throws, so that old values are never read for new ones. A weight with
  /// a gate is read by one thread at a time.
  void set_gate(std::function<void()> gate) { gate_ = std::move(gate); }

  /// The beta with which the next contribution must be written into grad(): 0 for the first since
  /// clear_grad(), then 1. So nothing is ever set to zero first.
  float next_beta() { return std::exchange(written_, true) ? 1.0f : 0.0f; }
  /// Whether grad() holds a gradient since clear_grad().
  bool has_grad() const { return written_; }
  void clear_grad() { written_ = false; }

 private:
  void pass_gate() const {
    if (!gate_) return;
    std::function<void()> gate = std::exchange(gate_, nullptr);
    try {
      gate();
    } catch (...) {
      gate_ = std::move(gate);
      throw;
    }
  }

  std::string name_;
  Placement placement_;
  Init init_;
  ParameterTraits traits_;
  Tensor value_, grad_, main_;
  mutable std::function<void()> gate_;
  std::function<void()> make_grad_;
  bool written_ = false;
};

}  // namespace tessera
