#pragma once
/// Shape: up to six dimensions held inline, no allocation.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

#include "tessera/base/error.hpp"

namespace tessera {

class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  /// Errors: InvalidArgument if there are more than kMaxRank dimensions or one is negative.
  explicit Shape(std::span<const std::int64_t> dims) : rank_(static_cast<int>(dims.size())) {
    TESSERA_CHECK(dims.size() <= kMaxRank, "a tensor has at most ", kMaxRank, " dimensions, not ",
                  dims.size());
    for (int i = 0; i < rank_; ++i) {
      TESSERA_CHECK(dims[i] >= 0, "dimension ", i, " is negative: ", dims[i]);
      dims_[i] = dims[i];
    }
  }

  int rank() const { return rank_; }
  /// Size of dimension i; negative i counts from the end.
  std::int64_t operator[](int i) const { return dims_[index(i)]; }
  std::int64_t& operator[](int i) { return dims_[index(i)]; }
  /// Number of elements; 1 for rank 0.
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  std::span<const std::int64_t> dims() const { return {dims_.data(), static_cast<std::size_t>(rank_)}; }
  /// Row-major strides, in elements.
  Shape contiguous_strides() const {
    Shape strides = *this;
    std::int64_t step = 1;
    for (int i = rank_ - 1; i >= 0; --i) {
      strides.dims_[i] = step;
      step *= dims_[i];
    }
    return strides;
  }

  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank_ != b.rank_) return false;
    for (int i = 0; i < a.rank_; ++i) {
      if (a.dims_[i] != b.dims_[i]) return false;
    }
    return true;
  }
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << '[';
    for (int i = 0; i < shape.rank_; ++i) out << (i ? ", " : "") << shape.dims_[i];
    return out << ']';
  }

 private:
  int index(int i) const {
    const int j = i < 0 ? i + rank_ : i;
    TESSERA_CHECK(j >= 0 && j < rank_, "dimension ", i, " of a shape of rank ", rank_);
    return j;
  }

  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

}  // namespace tessera
