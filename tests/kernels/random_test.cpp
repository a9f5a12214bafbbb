/// Normal variates against Box-Muller in long double, and the same values however a matrix is cut up.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/api/elementwise.hpp"

namespace tessera::kernels {
namespace {

constexpr RngKey kKey{.seed = 1234, .site = 77, .step = 0};

float reference(const RngKey& key, std::uint64_t element, float mean, float std_dev) {
  const PhiloxBlock block = random_block(key, element / 4);
  const std::uint32_t w0 = block.word[element % 4 / 2 * 2], w1 = block.word[element % 4 / 2 * 2 + 1];
  const long double radius = std::sqrt(-2.0L * std::log((w0 + 0.5L) / 4294967296.0L));
  const long double angle = 2.0L * 3.14159265358979323846264338327950288L * w1 / 4294967296.0L;
  const long double z = radius * (element % 2 == 0 ? std::cos(angle) : std::sin(angle));
  return static_cast<float>(static_cast<long double>(mean) + static_cast<long double>(std_dev) * z);
}

std::vector<float> fill(FillNormal params, int threads = 1) {
  std::vector<float> out(static_cast<std::size_t>(params.rows * params.cols));
  params.out = out.data();
  cpu::fill_normal(params, {.threads = threads});
  return out;
}

TEST(FillNormal, IsBoxMullerOnThePhiloxWords) {
  for (std::int64_t first : {std::int64_t{0}, std::int64_t{3}, std::int64_t{1} << 40}) {
    const auto out = fill(
        {.rows = 1, .cols = 20011, .col0 = first, .global_cols = 1, .mean = 0.5f, .std = 2.0f, .key = kKey});
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float want = reference(kKey, static_cast<std::uint64_t>(first) + i, 0.5f, 2.0f);
      // Double against long double: the two round apart once in 10^7 or so.
      ASSERT_NEAR(out[i], want, 1e-6f * std::fabs(want) + 1e-12f) << "element " << i;
    }
  }
}

TEST(FillNormal, GoldenBits) {
  // The same on every machine: hexadecimal floats.
  const auto out = fill({.rows = 1, .cols = 8, .global_cols = 8, .key = kKey});
  const float want[] = {-0x1.8e7c22p+0f, 0x1.480d4p-1f,  0x1.67017ap+0f, 0x1.8635dcp-2f,
                        -0x1.64a876p-2f, 0x1.b061b6p+0f, 0x1.d37954p+0f, -0x1.b88a46p-3f};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], want[i]) << i;
}

TEST(FillNormal, ShardsAreSlicesOfTheWhole) {
  const std::int64_t rows = 23, cols = 37;
  const FillNormal all{
      .rows = rows, .cols = cols, .global_cols = cols, .mean = 0.1f, .std = 0.02f, .key = kKey};
  const auto whole = fill(all);
  EXPECT_EQ(fill(all, 2), whole);
  for (std::int64_t row0 : {0, 1, 11, 22}) {
    for (std::int64_t col0 : {0, 1, 2, 3, 18, 36}) {
      FillNormal shard = all;
      shard.row0 = row0;
      shard.col0 = col0;
      shard.rows = std::min<std::int64_t>(rows - row0, 9);
      shard.cols = std::min<std::int64_t>(cols - col0, 7);
      const auto part = fill(shard, 2);
      for (std::int64_t r = 0; r < shard.rows; ++r) {
        for (std::int64_t c = 0; c < shard.cols; ++c) {
          ASSERT_EQ(part[static_cast<std::size_t>(r * shard.cols + c)],
                    whole[static_cast<std::size_t>((row0 + r) * cols + col0 + c)])
              << "row " << r << " column " << c << " of the shard at " << row0 << ", " << col0;
        }
      }
    }
  }
}

TEST(FillNormal, ThreadsDoNotChangeABit) {
  const FillNormal params{.rows = 3, .cols = 5003, .global_cols = 5003, .key = kKey};
  EXPECT_EQ(fill(params, 1), fill(params, 2));
}

TEST(FillNormal, Moments) {
  const auto out =
      fill({.rows = 500, .cols = 500, .global_cols = 500, .mean = 3.0f, .std = 0.5f, .key = kKey}, 2);
  double mean = 0, square = 0, fourth = 0;
  for (float x : out) mean += x / static_cast<double>(out.size());
  for (float x : out) {
    const double d2 = (x - mean) * (x - mean);
    square += d2 / static_cast<double>(out.size());
    fourth += d2 * d2 / static_cast<double>(out.size());
  }
  EXPECT_NEAR(mean, 3.0, 5e-3);
  EXPECT_NEAR(std::sqrt(square), 0.5, 4e-3);
  EXPECT_NEAR(fourth / (square * square), 3.0, 0.06);
}

}  // namespace
}  // namespace tessera::kernels
