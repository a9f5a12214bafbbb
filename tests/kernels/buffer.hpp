#pragma once
/// Memory of any compute dtype, seen as doubles: what kernel tests fill, pass and compare.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::testing {

/// n values on the heap, no slack behind the last, so that AddressSanitizer sees an access beyond it.
class Buffer {
 public:
  Buffer(DType dtype, std::int64_t n, double value = 0.0)
      : dtype_(dtype), n_(n), bytes_(new unsigned char[static_cast<std::size_t>(n) * size_of(dtype)]) {
    for (std::int64_t i = 0; i < n; ++i) set(i, value);
  }
  Buffer(const Buffer& other) : Buffer(other.dtype_, other.n_) {
    for (std::int64_t i = 0; i < n_; ++i) set(i, other[i]);
  }

  /// Uniform in [middle - spread, middle + spread], rounded to the dtype.
  static Buffer random(DType dtype, std::int64_t n, std::uint32_t site, double spread = 1.0,
                       double middle = 0.0) {
    Buffer buffer(dtype, n);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto word = random_block({.seed = 99, .site = site}, static_cast<std::uint64_t>(i)).word[0];
      buffer.set(i, middle + spread * (static_cast<double>(word) / 2147483648.0 - 1.0));
    }
    return buffer;
  }

  Buffer& operator=(Buffer other) {
    std::swap(dtype_, other.dtype_);
    std::swap(n_, other.n_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() { return bytes_.get(); }
  const void* data() const { return bytes_.get(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.get()); }
  DType dtype() const { return dtype_; }
  std::int64_t size() const { return n_; }

  double operator[](std::int64_t i) const {
    return dtype_ == DType::f32 ? get<float>(i) : dtype_ == DType::bf16 ? get<bfloat16>(i) : get<float16>(i);
  }
  // Not inlined: GCC 12 would warn of the branch that the dtype never takes.
  [[gnu::noinline]] void set(std::int64_t i, double value) {
    const auto v = static_cast<float>(value);
    if (dtype_ == DType::f32) {
      put(i, v);
    } else if (dtype_ == DType::bf16) {
      put(i, bfloat16(v));
    } else {
      put(i, float16(v));
    }
  }
  std::vector<double> values() const {
    std::vector<double> all(static_cast<std::size_t>(n_));
    for (std::int64_t i = 0; i < n_; ++i) all[static_cast<std::size_t>(i)] = (*this)[i];
    return all;
  }

 private:
  template <typename T>
  float get(std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.get() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    return static_cast<float>(value);
  }
  template <typename T>
  void put(std::int64_t i, T value) {
    std::memcpy(bytes_.get() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
  }

  DType dtype_;
  std::int64_t n_;
  std::unique_ptr<unsigned char[]> bytes_;
};

/// The largest relative error of rounding to a dtype beyond fp32's own: half a unit in the last of 8 bits of
/// bfloat16, of 11 bits of float16.
inline double rounding_of(DType dtype) {
  return dtype == DType::bf16 ? 1.0 / 256 : dtype == DType::f16 ? 1.0 / 2048 : 0.0;
}

/// |got - want| <= f32_tolerance * (1 + |want|), to which 16-bit dtypes add their rounding of the result
/// (float16's absolute one of numbers below its smallest normal is within the f32_tolerance of all tests).
inline void expect_close(const Buffer& got, const std::vector<double>& want, double f32_tolerance) {
  ASSERT_EQ(static_cast<std::size_t>(got.size()), want.size());
  const double rounding = rounding_of(got.dtype());
  for (std::int64_t i = 0; i < got.size(); ++i) {
    const double w = want[static_cast<std::size_t>(i)];
    const double allowed = f32_tolerance * (1.0 + std::fabs(w)) + rounding * std::fabs(w);
    ASSERT_LE(std::fabs(got[i] - w), allowed) << "element " << i << ": " << got[i] << " instead of " << w;
  }
}

inline void expect_same(const Buffer& a, const Buffer& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::int64_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i], b[i]) << "element " << i;
}

}  // namespace tessera::testing
