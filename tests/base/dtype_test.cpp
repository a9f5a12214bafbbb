#include "tessera/base/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace tessera {
namespace {

constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64,
                          DType::u32, DType::u16,  DType::i16, DType::i8,  DType::u8};

TEST(DType, NamesAndSizes) {
  const char* names[] = {"float32", "bfloat16", "float16", "float64", "int32", "int64",
                         "uint32",  "uint16",   "int16",   "int8",    "uint8"};
  const std::size_t sizes[] = {4, 2, 2, 8, 4, 8, 4, 2, 2, 1, 1};
  for (std::size_t i = 0; i < std::size(kAll); ++i) {
    EXPECT_EQ(name_of(kAll[i]), names[i]);
    EXPECT_EQ(size_of(kAll[i]), sizes[i]);
  }
  EXPECT_EQ(dtype_of<bfloat16>::value, DType::bf16);
  EXPECT_EQ(dtype_of<double>::value, DType::f64);
}

TEST(DType, VisitFloat) {
  EXPECT_EQ(visit_float(DType::f32, "x", [](auto v) { return sizeof v; }), 4u);
  EXPECT_EQ(visit_float(DType::bf16, "x", [](auto v) { return sizeof v; }), 2u);
  for (const DType dtype : kAll) {
    if (dtype == DType::f32 || dtype == DType::bf16) continue;
    EXPECT_THROW(visit_float(dtype, "weights", [](auto v) { return sizeof v; }), InvalidArgument);
  }
}

/// Rounding by arithmetic instead of by bits: the nearer of the two neighbours, at a tie the one with an even
/// bit.
float round_to_bf16(float x) {
  if (x == 0.0f || std::isnan(x) || std::isinf(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  // 8 significant bits; below 2^-126 the spacing stays that of the smallest normal numbers.
  const int step_exponent = std::max(exponent - 8, -133);
  const double step = std::ldexp(1.0, step_exponent);
  const double rounded = std::nearbyint(static_cast<double>(x) / step) * step;
  if (std::abs(rounded) >= std::ldexp(1.0, 128))
    return std::copysign(std::numeric_limits<float>::infinity(), x);
  return static_cast<float>(rounded);
}

void expect_rounds(float x) {
  const float got = static_cast<float>(bfloat16(x));
  const float expected = round_to_bf16(x);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected)) << std::hexfloat << x;
}

TEST(BFloat16, EveryValueSurvives) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    bfloat16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const float wide = static_cast<float>(value);
    const bfloat16 again(wide);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(again))) << bits;
    } else {
      EXPECT_EQ(again.bits, value.bits);
    }
  }
}

TEST(BFloat16, TiesGoToEven) {
  for (std::uint32_t bits = 0; bits < 0x7f80; bits += 7) {
    for (const std::uint32_t low : {0x7fffu, 0x8000u, 0x8001u, 0xffffu, 1u}) {
      expect_rounds(std::bit_cast<float>((bits << 16) | low));
      expect_rounds(std::bit_cast<float>(0x80000000u | (bits << 16) | low));
    }
  }
  EXPECT_EQ(bfloat16(1.00390625f).bits, 0x3f80);  // 1 + 2^-8, between 1 and 1 + 2^-7: down to even
  EXPECT_EQ(bfloat16(1.01171875f).bits, 0x3f82);  // 1 + 3 * 2^-8: up to even
}

TEST(BFloat16, RandomBitPatterns) {
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(x)) expect_rounds(x);
  }
}

TEST(BFloat16, Extremes) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bfloat16(infinity).bits, 0x7f80);
  EXPECT_EQ(bfloat16(-infinity).bits, 0xff80);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bfloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::denorm_min()).bits, 0);
  // NaNs whose payload lies in the lower half only would otherwise turn into infinities.
  for (const std::uint32_t bits :
       {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u, 0x7f80ffffu}) {
    const bfloat16 value(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(static_cast<float>(value))) << std::hex << bits;
    EXPECT_EQ(value.bits >> 15, bits >> 31);
  }
}

}  // namespace
}  // namespace tessera
