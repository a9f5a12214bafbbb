#pragma once
/// Comparisons, beyond those of row_values.hpp, for tests that run a CUDA launcher beside the CPU launcher of
/// the same name.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"
#include "tests/kernels/cuda/row_values.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include "emulator.hpp"
#endif

namespace tessera::test {

/// |got - want| <= tolerance * (1 + |want|), to which 16-bit types add one unit in the last place.
template <typename T>
void expect_close(const std::vector<T>& got, const std::vector<T>& want, double tolerance) {
  constexpr double kUnit = std::is_same_v<T, bfloat16>  ? 1.0 / 128
                           : std::is_same_v<T, float16> ? 1.0 / 1024
                                                        : 0.0;
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto g = static_cast<float>(got[i]), w = static_cast<float>(want[i]);
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    ASSERT_LE(std::fabs(g - w), tolerance * (1.0 + std::fabs(w)) + kUnit * std::fabs(w))
        << "element " << i << ": " << g << " instead of " << w;
  }
}

template <typename T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0) << "element " << i;
  }
}

/// Calls `body(T{})` for every type activations are stored in.
template <typename Body>
void for_each_float(Body body) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    visit_float(dtype, "test", body);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

/// Runs `body` once; on the emulator, under several orders of the threads between two barriers.
inline void in_every_order(const std::function<void()>& body) {
#if __has_include("emulator.hpp")
  tessera_emulator::for_each_order(body);
#else
  body();
#endif
}

}  // namespace tessera::test
