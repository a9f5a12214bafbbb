#pragma once
/// Values for tests of CUDA kernels, in the type the kernel reads.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::test {

/// Uniform in [-1, 1), rounded to T.
template <typename T>
std::vector<T> random(std::int64_t count, std::uint32_t site) {
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word = random_block({.seed = 7, .site = site}, static_cast<std::uint64_t>(i)).word[0];
    values.push_back(T(static_cast<float>(word) / 2147483648.0f - 1.0f));
  }
  return values;
}

/// The relative rounding of one conversion to T.
template <typename T>
inline constexpr double kUnit = 0.0;
template <>
inline constexpr double kUnit<bfloat16> = 1.0 / 256;
template <>
inline constexpr double kUnit<float16> = 1.0 / 2048;

}  // namespace tessera::test
