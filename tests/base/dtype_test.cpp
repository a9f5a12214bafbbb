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
  EXPECT_EQ(dtype_of<float16>::value, DType::f16);
  EXPECT_EQ(dtype_of<double>::value, DType::f64);
}

TEST(DType, VisitFloat) {
  EXPECT_EQ(visit_float(DType::f32, "x", [](auto v) { return sizeof v; }), 4u);
  const auto visited = [](auto v) { return dtype_of<decltype(v)>::value; };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(visit_float(dtype, "x", visited), dtype);
  }
  for (const DType dtype : kAll) {
    if (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) continue;
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

float16 half_of(std::uint32_t bits) {
  float16 value;
  value.bits = static_cast<std::uint16_t>(bits);
  return value;
}

/// The value of 16 bits by the definition of IEEE binary16.
double half_value(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const double fraction = bits & 1023u, sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024.0 + fraction, exponent - 25);
}

/// The bits nearest to x, found by arithmetic: the multiples of 2^-24, doubling from 2^-13 on.
std::uint32_t nearest_half(float x) {
  const std::uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  const double magnitude = std::abs(static_cast<double>(x));
  if (magnitude >= 65520.0) return sign | 0x7c00u;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int step = std::max(exponent - 11, -24);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -step)), step);
  std::uint32_t low = 0, high = 0x7c00;  // the bits of halves rise with their values
  while (low < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (half_value(middle) < rounded) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return sign | low;
}

TEST(Float16, EveryValueIsReadByTheDefinitionAndSurvives) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto wide = static_cast<float>(half_of(bits));
    const double expected = half_value(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_EQ(float16(wide).bits, bits | 0x200u) << "the same NaN, quiet";
      continue;
    }
    ASSERT_EQ(wide, expected) << bits;
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000u) != 0);
    ASSERT_EQ(float16(wide).bits, bits);
  }
}

TEST(Float16, TiesGoToEven) {
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const double low = half_value(bits), high = bits == 0x7bff ? 65536.0 : half_value(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);
    ASSERT_EQ(float16(middle).bits, bits + (bits & 1u));
    ASSERT_EQ(float16(-middle).bits, 0x8000u + bits + (bits & 1u));
    ASSERT_EQ(float16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(float16(std::nextafter(middle, 1e9f)).bits, bits + 1);
  }
}

TEST(Float16, RandomBitPatterns) {
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const auto word = static_cast<std::uint32_t>(random());
    // Any float, and one whose exponent lies where halves do.
    for (const std::uint32_t bits : {word, (word & 0x87ffffffu) | 0x30000000u}) {
      const float x = std::bit_cast<float>(bits);
      if (!std::isnan(x)) {
        ASSERT_EQ(float16(x).bits, nearest_half(x)) << std::hexfloat << x;
      }
    }
  }
}

#if defined(__FLT16_MAX__)
TEST(Float16, RoundsAsTheCompilersTypeDoes) {
  std::mt19937 random(11);
  for (std::uint32_t i = 0; i < 400000; ++i) {
    const std::uint32_t word = i % 2 == 0 ? static_cast<std::uint32_t>(random()) : 0x33000000u + i * 1024u;
    const float x = std::bit_cast<float>(word);
    if (std::isnan(x)) continue;
    ASSERT_EQ(float16(x).bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))) << std::hexfloat << x;
  }
}
#endif

TEST(Float16, Extremes) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float16(infinity).bits, 0x7c00);
  EXPECT_EQ(float16(-infinity).bits, 0xfc00);
  EXPECT_EQ(float16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(float16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);  // 65519.99...
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16(-65520.0f).bits, 0xfc00);
  EXPECT_EQ(float16(-0.0f).bits, 0x8000);
  EXPECT_EQ(float16(0x1p-14f).bits, 0x0400);  // the smallest normal
  EXPECT_EQ(float16(0x1p-24f).bits, 0x0001);  // the smallest of all
  EXPECT_EQ(float16(0x1p-25f).bits, 0x0000);  // between it and 0: down to even
  EXPECT_EQ(float16(std::nextafter(0x1p-25f, 1.0f)).bits, 0x0001);
  EXPECT_EQ(float16(0x1.8p-24f).bits, 0x0002);
  EXPECT_EQ(float16(std::numeric_limits<float>::denorm_min()).bits, 0);
  // NaNs whose payload lies in the lower half only would otherwise turn into infinities.
  for (const std::uint32_t bits :
       {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u, 0x7f801fffu}) {
    const float16 value(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(static_cast<float>(value))) << std::hex << bits;
    EXPECT_EQ(value.bits >> 15, bits >> 31);
  }
}

}  // namespace
}  // namespace tessera
