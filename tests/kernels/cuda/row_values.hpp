#pragma once
/// Random memory of a row kernel's test, on the host for the CPU's launcher and on the device, and their
/// comparison.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/philox.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"

namespace tessera::test {

template <typename T>
std::vector<T> random_values(std::int64_t n, std::uint32_t site, float spread = 1.0f, float middle = 0.0f) {
  std::vector<T> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto word = random_block({.seed = 77, .site = site}, i).word[0];
    values[i] = static_cast<T>(middle + spread * (static_cast<float>(word) / 2147483648.0f - 1.0f));
  }
  return values;
}

/// The same values twice: `host` is the CPU's, `device` the GPU's.
template <typename T>
struct Twin {
  std::vector<T> host;
  DeviceBuffer<T> device;

  Twin(const DeviceStream& stream, std::vector<T> values, std::size_t offset = 0)
      : host(std::move(values)), device(stream, host, offset) {}
};

/// The distance of neighbouring values of T around 1: what two roundings of nearly the same number differ by.
template <typename T>
constexpr float kSpacing = sizeof(T) == 4 ? 0.0f
                                          : (dtype_of<T>::value == DType::bf16 ? 1.0f / 128 : 1.0f / 1024);

/// |got - want| <= tolerance * (1 + |want|), for 16-bit types plus a spacing of theirs; infinities and NaN
/// match their like.
template <typename T>
void expect_close(const std::vector<T>& got, const std::vector<T>& want, float tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto g = static_cast<float>(got[i]), w = static_cast<float>(want[i]);
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    const float allowed = tolerance * (1.0f + std::fabs(w)) + kSpacing<T> * std::fabs(w);
    ASSERT_TRUE(std::fabs(g - w) <= allowed) << what << "[" << i << "] is " << g << ", not " << w;
  }
}
template <typename T>
void expect_close(const Twin<T>& twin, float tolerance, const char* what) {
  expect_close(twin.device.host(), twin.host, tolerance, what);
}

template <typename T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0)
        << what << "[" << i << "] is " << static_cast<float>(got[i]) << ", not "
        << static_cast<float>(want[i]);
  }
}

}  // namespace tessera::test
