#include "comm/reduce.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "tests/comm/conformance.hpp"

namespace tessera::test {
namespace {

float half_to_float(std::uint16_t bits) {
  float16 value;
  value.bits = bits;
  return static_cast<float>(value);
}
std::uint16_t float_to_half(float value) { return float16(value).bits; }

TEST(Half, EveryValueIsReadByTheDefinition) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const double expected = half_value(half);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(half_to_float(half)));
      EXPECT_TRUE(std::isnan(half_value(float_to_half(half_to_float(half)))));
      continue;
    }
    ASSERT_EQ(half_to_float(half), expected) << bits;
    ASSERT_EQ(std::signbit(half_to_float(half)), std::signbit(expected)) << bits;
    ASSERT_EQ(float_to_half(half_to_float(half)), half);
  }
}

TEST(Half, RoundsToNearestEven) {
  std::mt19937 generator(3);
  const auto check = [](float value) {
    const double nearest = rounded(value, DType::f16);
    const double expected = std::abs(nearest) > 65504.0 ? std::copysign(INFINITY, value) : nearest;
    ASSERT_EQ(half_value(float_to_half(value)), expected) << value;
  };
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
    if (!std::isnan(value) && !std::isinf(value)) check(value);
    check(std::ldexp(1.0f + static_cast<float>(generator() >> 8) * 0x1p-24f, static_cast<int>(i % 44) - 27));
  }
  for (int bits = 0; bits < 0x7bff; ++bits) {  // exactly between two neighbours, and a hair beside
    const float low = half_to_float(static_cast<std::uint16_t>(bits));
    const float high = half_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    check(middle);
    check(std::nextafter(middle, 0.0f));
    check(std::nextafter(middle, 1e9f));
  }
  for (const float value : {65504.0f, 65519.0f, 65520.0f, 1e30f, -65520.0f, 0.0f, 0x1p-25f, 0x1.8p-25f})
    check(value);
}

TEST(Reduce, WholeNumbersWrapRound) {
  const std::array<std::int32_t, 2> a{std::numeric_limits<std::int32_t>::max(), 5}, b{1, -7};
  std::array<std::int32_t, 2> sum{};
  const std::array<const void*, 2> sources{a.data(), b.data()};
  void* target = sum.data();
  reduce_in_order(DType::i32, ReduceOp::sum, sources, {&target, 1}, 2);
  EXPECT_EQ(sum, (std::array<std::int32_t, 2>{std::numeric_limits<std::int32_t>::min(), -2}));
}

TEST(Reduce, OtherTypesAreRefused) {
  for (const DType dtype : all_dtypes()) {
    const auto& known = reducible_dtypes();
    EXPECT_EQ(is_reducible(dtype), std::find(known.begin(), known.end(), dtype) != known.end());
  }
  EXPECT_THROW(reduce_in_order(DType::u8, ReduceOp::sum, {}, {}, 0), InternalError);
}

}  // namespace
}  // namespace tessera::test
