#include <gtest/gtest.h>

#include "tessera/base/error.hpp"
#include "tessera/data/blend.hpp"
#include "tessera/data/split.hpp"

namespace tessera {
namespace {

std::vector<std::pair<std::int64_t, std::int64_t>> ranges(const std::string& split, std::int64_t n) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (const auto& range : split_ranges(parse_split(split), n)) {
    out.emplace_back(range ? range->begin : -1, range ? range->end : -1);
  }
  return out;
}

using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

TEST(Split, Bounds) {
  const auto bounds = parse_split("99,1,0");
  EXPECT_EQ(*bounds[0], (std::pair{0.0, 0.99}));
  EXPECT_EQ(*bounds[1], (std::pair{0.99, 1.0}));
  EXPECT_FALSE(bounds[2]);
  EXPECT_EQ(*parse_split(".99,.01,0")[0], (std::pair{0.0, 0.99}));
  EXPECT_FALSE(parse_split("0, 1, 1")[0]);
  EXPECT_EQ(*parse_split("100")[0], (std::pair{0.0, 1.0}));
}

/// Computed with Python: int(round(bound * n)).
TEST(Split, ElementRangesRoundHalvesToEven) {
  EXPECT_EQ(ranges("969,30,1", 1000), (Ranges{{0, 969}, {969, 999}, {999, 1000}}));
  EXPECT_EQ(ranges("969,30,1", 10), (Ranges{{0, 10}, {10, 10}, {10, 10}}));
  EXPECT_EQ(ranges("98,1,1", 50), (Ranges{{0, 49}, {49, 50}, {50, 50}}));
  EXPECT_EQ(ranges("1,1", 1), (Ranges{{0, 0}, {0, 1}, {-1, -1}}));
  EXPECT_EQ(ranges("1,1", 3), (Ranges{{0, 2}, {2, 3}, {-1, -1}}));
  EXPECT_EQ(ranges("1,1", 5), (Ranges{{0, 2}, {2, 5}, {-1, -1}}));
  EXPECT_EQ(ranges("1/1/1", 7), (Ranges{{0, 2}, {2, 5}, {5, 7}}));
}

TEST(Split, Nonsense) {
  for (const char* text : {"", "a", "1,,1", "1,1,1,1", "-1,2", "0,0,0", "1e999,1", "nan", "98,1,1x", "1 1"}) {
    EXPECT_THROW(parse_split(text), ConfigError) << text;
  }
}

/// numpy.array([1 / i for i in 3..22]) / its sum: the pairwise sum shows in the last bits.
TEST(Blend, WeightsAreNormalisedLikeNumpys) {
  std::vector<double> weights;
  for (int i = 3; i < 23; ++i) weights.push_back(1.0 / i);
  const auto w = normalized(weights);
  EXPECT_EQ(w[0], 0.15215050087006496);
  EXPECT_EQ(w[7], 0.04564515026101949);
  EXPECT_EQ(w[19], 0.02074779557319068);
  EXPECT_THROW(normalized(std::vector<double>{1, -1}), InvalidArgument);
  EXPECT_THROW(normalized(std::vector<double>{0, 0}), InvalidArgument);
}

TEST(Blend, GoldenTables) {
  const auto mixed = blend_indices(std::vector<double>{.5, .3, .2}, 12);
  EXPECT_EQ(mixed.dataset, (std::vector<std::int16_t>{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1}));
  EXPECT_EQ(mixed.sample, (std::vector<std::int64_t>{0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3}));
  EXPECT_EQ(blend_indices(std::vector<double>{.5, .5}, 6).dataset,
            (std::vector<std::int16_t>{0, 1, 0, 1, 0, 1}));
  const auto all = exhaustive_blend_indices(std::vector<std::int64_t>{4, 2, 1});
  EXPECT_EQ(all.dataset, (std::vector<std::int16_t>{0, 1, 2, 0, 0, 1, 0}));
  EXPECT_EQ(all.sample, (std::vector<std::int64_t>{0, 0, 0, 1, 2, 1, 3}));
  EXPECT_TRUE(exhaustive_blend_indices(std::vector<std::int64_t>{0, 0}).dataset.empty());
  EXPECT_THROW(blend_indices({}, 1), InvalidArgument);
}

TEST(Blend, RequestsHaveAMargin) {
  EXPECT_EQ(blend_target(1000, 0.3), 300);
  EXPECT_EQ(blend_request(1000, 0.3), 302);  // ceil(300 * 1.005) = ceil(301.5)
  EXPECT_EQ(blend_target(7, 0.5), 4);
  EXPECT_EQ(blend_request(7, 0.5), 5);
  EXPECT_EQ(blend_request(0, 0.5), 0);
}

TEST(Blend, Words) {
  const auto parse = [](std::vector<std::string> words) { return parse_blend(words); };
  EXPECT_EQ(parse({"a"}).size(), 1u);
  EXPECT_FALSE(parse({"a", "b"})[1].weight);
  const auto weighted = parse({"30", "a", "70", "b"});
  EXPECT_EQ(weighted.size(), 2u);
  EXPECT_EQ(*weighted[1].weight, 70.0);
  EXPECT_EQ(weighted[1].prefix, "b");
  EXPECT_THROW(parse({"30", "a", "x", "b"}), ConfigError);
  EXPECT_THROW(parse({"-1", "a", "2", "b"}), ConfigError);
  EXPECT_THROW(parse({}), ConfigError);
}

}  // namespace
}  // namespace tessera
