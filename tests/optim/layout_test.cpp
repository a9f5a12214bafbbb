#include "tessera/optim/layout.hpp"

#include <gtest/gtest.h>

#include <array>

namespace tessera {
namespace {

struct ExpectedBucket {
  std::int64_t begin, count;
  std::vector<std::string> names;
  std::vector<std::int64_t> offsets;
  bool reads_main = false, tied = false;
};

void expect_layout(const FlatLayout& layout, const std::vector<ExpectedBucket>& expected) {
  ASSERT_EQ(layout.buckets().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const Bucket& bucket = layout.buckets()[i];
    EXPECT_EQ(bucket.begin, expected[i].begin) << i;
    EXPECT_EQ(bucket.count, expected[i].count) << i;
    EXPECT_EQ(bucket.reads_main, expected[i].reads_main) << i;
    EXPECT_EQ(bucket.tied, expected[i].tied) << i;
    std::vector<std::string> names;
    std::vector<std::int64_t> offsets;
    for (const ParamSlot& slot : layout.slots_of(bucket)) {
      names.push_back(slot.parameter->name());
      offsets.push_back(slot.offset);
      EXPECT_EQ(slot.bucket, i);
      EXPECT_EQ(slot.numel, slot.parameter->shape().numel());
      EXPECT_EQ(&layout.slots()[layout.index_of(*slot.parameter)], &slot);
    }
    EXPECT_EQ(names, expected[i].names) << i;
    EXPECT_EQ(offsets, expected[i].offsets) << i;
  }
  EXPECT_EQ(layout.numel(), expected.back().begin + expected.back().count);
}

struct Small {
  Parameter word{"word", {7, 10}, Init::zeros(), {.reads_main = true}};
  Parameter norm1{"norm1", {10}, Init::ones(), {.reads_main = true}};
  Parameter weight1{"weight1", {20, 10}, Init::zeros()};
  Parameter norm2{"norm2", {10}, Init::ones(), {.reads_main = true}};
  Parameter weight2{"weight2", {65}, Init::zeros()};
  Parameter weight3{"weight3", {64}, Init::zeros()};
  std::vector<Parameter*> all = {&word, &norm1, &weight1, &norm2, &weight2, &weight3};
};

TEST(FlatLayout, OneBucketOfEachKindInTheOrderBackwardCompletesThem) {
  Small model;
  expect_layout(FlatLayout(model.all, {}), {{0, 448, {"weight3", "weight2", "weight1"}, {0, 64, 192}},
                                            {448, 256, {"norm2", "norm1", "word"}, {448, 512, 576}, true}});
}

TEST(FlatLayout, BucketsCloseAtTheirSizeAndDivideIntoAlignedShares) {
  Small model;
  const FlatLayout layout(model.all, {.data_ranks = 3, .bucket_elements = 128});
  expect_layout(layout, {{0, 192, {"weight3", "weight2"}, {0, 64}},
                         {192, 384, {"weight1"}, {192}},
                         {576, 192, {"norm2", "norm1"}, {576, 640}, true},
                         {768, 192, {"word"}, {768}, true}});
  EXPECT_EQ(layout.buckets()[1].share(0, 3), (Range{192, 128}));
  EXPECT_EQ(layout.buckets()[1].share(2, 3), (Range{448, 128}));
}

TEST(FlatLayout, ATiedParameterIsAloneAndDoesNotCloseOthers) {
  Parameter a{"a", {10}, Init::zeros()},
      tied{"tied", {129}, Init::zeros(), {.reads_main = true, .tied = true}}, b{"b", {10}, Init::zeros()};
  const std::array<Parameter*, 3> first = {&tied, &a, &b}, last = {&a, &b, &tied}, between = {&a, &tied, &b};
  const LayoutOptions two{.data_ranks = 2};
  expect_layout(FlatLayout(first, two),
                {{0, 128, {"b", "a"}, {0, 64}}, {128, 256, {"tied"}, {128}, true, true}});
  expect_layout(FlatLayout(last, two),
                {{0, 256, {"tied"}, {0}, true, true}, {256, 128, {"b", "a"}, {256, 320}}});
  expect_layout(FlatLayout(between, two),
                {{0, 256, {"tied"}, {0}, true, true}, {256, 128, {"b", "a"}, {256, 320}}});
}

TEST(FlatLayout, SetsAsideWhatItIsTold) {
  Parameter a{"a", {60}, Init::zeros()}, b{"b", {10}, Init::zeros()};
  const std::array<Parameter*, 2> both = {&a, &b};
  const std::array<std::int64_t, 2> capacities = {65, 130};
  expect_layout(FlatLayout(both, {.capacities = capacities}), {{0, 320, {"b", "a"}, {0, 192}}});
  const std::array<std::int64_t, 2> too_small = {59, 10};
  EXPECT_THROW(FlatLayout(both, {.capacities = too_small}), InvalidArgument);
}

TEST(FlatLayout, TheDefaultBucketIsMegatrons) {
  Parameter a{"a", {20'000'000}, Init::zeros()}, b{"b", {20'000'000}, Init::zeros()},
      c{"c", {2'000'000}, Init::zeros()}, d{"d", {5'000}, Init::zeros()};
  const std::array<Parameter*, 4> all = {&d, &c, &b, &a};
  EXPECT_EQ(FlatLayout(all, {.data_ranks = 40}).buckets()[0].slots, 2u);
  EXPECT_EQ(FlatLayout(all, {.data_ranks = 42}).buckets()[0].slots, 3u);
}

TEST(FlatLayout, NoParametersNoBuckets) {
  const FlatLayout layout({}, {});
  EXPECT_TRUE(layout.buckets().empty());
  EXPECT_EQ(layout.numel(), 0);
  Parameter stranger{"a", {2}, Init::zeros()};
  EXPECT_THROW(layout.index_of(stranger), InvalidArgument);
}

TEST(FlatRuns, OverlapAndAppend) {
  EXPECT_EQ(overlap({2, 5}, {4, 10}), (Range{4, 3}));
  EXPECT_EQ(overlap({2, 5}, {7, 10}), (Range{7, 0}));
  EXPECT_EQ(overlap({20, 5}, {7, 10}), (Range{7, 0}));
  std::vector<Range> runs;
  append(runs, {3, 2});
  append(runs, {5, 1});
  append(runs, {6, 0});
  append(runs, {9, 1});
  EXPECT_EQ(runs, (std::vector<Range>{{3, 3}, {9, 1}}));
}

}  // namespace
}  // namespace tessera
