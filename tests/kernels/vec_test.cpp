/// Each instruction set's copy of the register functions against the C library and the scalar bfloat16.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/vec_functions.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Vec, ExpIsAccurateToTwoUnitsInTheLastPlace) {
  std::vector<float> x;
  for (double v = -87.3; v < 88.7; v += 0.00317) x.push_back(static_cast<float>(v));
  std::vector<float> y(x.size());
  for (auto [isa, exp] : TESSERA_COPIES(vec_exp)) {
    SCOPED_TRACE(isa_name(isa));
    exp(x.data(), y.data(), static_cast<int>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      ASSERT_LE(std::fabs(y[i] - want), 2.4e-7 * want) << "exp(" << x[i] << ")";
    }
  }
}

TEST(Vec, ExpAtTheEnds) {
  const float x[] = {-kInf, -1000.0f, -88.0f, 0.0f, -0.0f, 89.0f, 1000.0f, kInf, kNan};
  const float want[] = {0, 0, 0, 1, 1, kInf, kInf, kInf, kNan};
  float y[9];
  for (auto [isa, exp] : TESSERA_COPIES(vec_exp)) {
    SCOPED_TRACE(isa_name(isa));
    exp(x, y, 9);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(y[i], want[i]) << "exp(" << x[i] << ")";
    EXPECT_TRUE(std::isnan(y[8]));
  }
}

TEST(Vec, SqrtIsExact) {
  const float x[] = {0, 1, 2, 3, 1e-38f, 1e38f, 0.1f, 7, 1234.5f};
  float y[9];
  for (auto [isa, sqrt] : TESSERA_COPIES(vec_sqrt)) {
    sqrt(x, y, 9);
    for (int i = 0; i < 9; ++i) EXPECT_EQ(y[i], std::sqrt(x[i])) << isa_name(isa);
  }
}

TEST(Vec, MaxAndMinPassOnANanInTheSecondArgument) {
  const float a[] = {1, 2, -3, kInf, 5}, b[] = {2, 1, -4, 1, kNan};
  float high[5], low[5];
  for (auto [isa, max_min] : TESSERA_COPIES(vec_max_min)) {
    SCOPED_TRACE(isa_name(isa));
    max_min(a, b, high, low, 5);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(high[i], std::max(a[i], b[i]));
      EXPECT_EQ(low[i], std::min(a[i], b[i]));
    }
    EXPECT_TRUE(std::isnan(high[4]) && std::isnan(low[4]));
  }
}

TEST(Vec, SumAndMaxOverLanes) {
  const auto lanes = TESSERA_COPIES(vec_lanes);
  const auto sums = TESSERA_COPIES(vec_sum);
  const auto maxima = TESSERA_COPIES(vec_max_lane);
  for (std::size_t c = 0; c < lanes.size(); ++c) {
    const int n = lanes[c].function();
    EXPECT_EQ(n, 4 << c);
    for (int top = 0; top < n; ++top) {
      std::vector<float> x(static_cast<std::size_t>(n));
      float total = 0;
      for (int i = 0; i < n; ++i)
        total += x[static_cast<std::size_t>(i)] = static_cast<float>(i == top ? 100 : -1 - i);
      EXPECT_EQ(sums[c].function(x.data()), total);
      EXPECT_EQ(maxima[c].function(x.data()), 100.0f);
    }
  }
}

TEST(Vec, Bfloat16RoundsAsTheScalarTypeDoes) {
  // Every upper half with the lower halves around a tie, NaN and infinity included.
  std::vector<float> x;
  for (std::uint32_t upper = 0; upper < 65536; upper += 7) {
    for (std::uint32_t lower : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const std::uint32_t word = upper << 16 | lower;
      float v;
      std::memcpy(&v, &word, sizeof v);
      x.push_back(v);
    }
  }
  x.push_back(kNan);
  x.push_back(kInf);
  x.push_back(-kInf);
  std::vector<bfloat16> y(x.size());
  for (auto [isa, narrow] : TESSERA_COPIES(vec_narrow)) {
    SCOPED_TRACE(isa_name(isa));
    narrow(x.data(), y.data(), static_cast<int>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i].bits, bfloat16(x[i]).bits) << x[i];
  }
  std::vector<float> back(x.size());
  for (auto [isa, widen] : TESSERA_COPIES(vec_widen)) {
    SCOPED_TRACE(isa_name(isa));
    widen(y.data(), back.data(), static_cast<int>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto want = static_cast<float>(y[i]);
      ASSERT_TRUE(back[i] == want || (std::isnan(back[i]) && std::isnan(want)));
    }
  }
}

TEST(Vec, Float16RoundsAsTheScalarTypeDoes) {
  // Every float16 that is a number, what lies around the middle to its neighbour, and what no float16 holds.
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    float16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    const auto value = static_cast<float>(half);
    half.bits = static_cast<std::uint16_t>(bits + 1);
    const float middle = value + (static_cast<float>(half) - value) / 2;
    for (const float v : {value, std::nextafter(middle, -kInf), middle, std::nextafter(middle, kInf)}) {
      x.push_back(v);
    }
  }
  for (const float v : {65504.0f, 65519.996f, 65520.0f, 65536.0f, 3e38f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f,
                        1e-30f, std::numeric_limits<float>::denorm_min(), 0.0f, kNan, kInf}) {
    x.push_back(v);
    x.push_back(-v);
  }
  for (const std::uint32_t word : {0x7f800001u, 0x7f802000u, 0x7fffffffu, 0xffc12345u}) {  // other NaNs
    float v;
    std::memcpy(&v, &word, sizeof v);
    x.push_back(v);
  }
  std::vector<float16> y(x.size());
  for (auto [isa, narrow] : TESSERA_COPIES(vec_narrow_half)) {
    SCOPED_TRACE(isa_name(isa));
    narrow(x.data(), y.data(), static_cast<int>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i].bits, float16(x[i]).bits) << x[i];
  }
}

TEST(Vec, Float16WidensAsTheScalarTypeDoes) {
  std::vector<float16> x(65536);
  for (std::size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> y(x.size());
  for (auto [isa, widen] : TESSERA_COPIES(vec_widen_half)) {
    SCOPED_TRACE(isa_name(isa));
    widen(x.data(), y.data(), static_cast<int>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto want = static_cast<float>(x[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(y[i])) << i;
      } else {
        ASSERT_EQ(std::memcmp(&y[i], &want, sizeof want), 0) << i << ": " << y[i] << " instead of " << want;
      }
    }
  }
}

TEST(Vec, PartsTouchOnlyTheirLanes) {
  const auto lanes = TESSERA_COPIES(vec_lanes);
  const auto first_floats = TESSERA_COPIES(vec_first_floats);
  const auto first_bf16 = TESSERA_COPIES(vec_first_bf16);
  const auto first_f16 = TESSERA_COPIES(vec_first_f16);
  const auto store_first = TESSERA_COPIES(vec_store_first);
  const auto store_first_f16 = TESSERA_COPIES(vec_store_first_f16);
  for (std::size_t c = 0; c < lanes.size(); ++c) {
    const int width = lanes[c].function();
    for (int n = 0; n < width; ++n) {
      SCOPED_TRACE(::testing::Message() << isa_name(lanes[c].isa) << ", " << n << " lanes");
      // Exactly n on the heap: AddressSanitizer sees what is touched beyond.
      std::vector<float> x(static_cast<std::size_t>(n));
      std::vector<bfloat16> h(static_cast<std::size_t>(n));
      std::vector<float16> half(static_cast<std::size_t>(n));
      for (int i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i);
        h[at] = bfloat16(x[at] = i + 1.0f);
        half[at] = float16(x[at]);
      }
      float got[16], got_bf16[16], got_f16[16];
      first_floats[c].function(x.data(), got, n, -0.3f);
      first_bf16[c].function(h.data(), got_bf16, n, -0.3f);
      first_f16[c].function(half.data(), got_f16, n, -0.3f);
      for (int i = 0; i < width; ++i) {
        EXPECT_EQ(got[i], i < n ? i + 1.0f : -0.3f);
        EXPECT_EQ(got_f16[i], i < n ? i + 1.0f : -0.3f);
        EXPECT_EQ(got_bf16[i], i < n ? i + 1.0f : -0.3f);
      }
      bfloat16 stored[17];
      float16 stored_f16[17];
      for (auto& s : stored) s = bfloat16(-7.0f);
      for (auto& s : stored_f16) s = float16(-7.0f);
      float source[16];
      for (int i = 0; i < 16; ++i) source[i] = static_cast<float>(10 + i);
      store_first[c].function(source, stored, n);
      store_first_f16[c].function(source, stored_f16, n);
      for (int i = 0; i < 17; ++i) {
        EXPECT_EQ(static_cast<float>(stored[i]), i < n ? 10.0f + i : -7.0f);
        EXPECT_EQ(static_cast<float>(stored_f16[i]), i < n ? 10.0f + i : -7.0f);
      }
    }
  }
}

TEST(Vec, PickedCopyIsTheWidest) {
  EXPECT_EQ(TESSERA_PICK(vec_lanes), TESSERA_COPIES(vec_lanes).back().function);
  EXPECT_EQ(TESSERA_COPIES(vec_lanes).back().isa, best_isa());
}

}  // namespace
}  // namespace tessera::kernels::cpu
