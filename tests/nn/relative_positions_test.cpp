#include "nn/relative_positions.hpp"

#include <gtest/gtest.h>

#include "tessera/base/model_math.hpp"

namespace tessera::nn {
namespace {

/// First distance of each bucket that is shared, 32 buckets up to 128, as trained models have them.
TEST(RelativePositions, LongDistancesShareBucketsByTheirLogarithm) {
  const std::pair<std::int64_t, std::int64_t> both[] = {{8, 8},   {9, 12},  {10, 16}, {11, 23},
                                                        {12, 32}, {13, 46}, {14, 64}, {15, 91}};
  for (const auto& [bucket, first] : both) {
    EXPECT_EQ(relative_bucket(-first, true, 32, 128), bucket);
    EXPECT_EQ(relative_bucket(1 - first, true, 32, 128), bucket - 1);
    EXPECT_EQ(relative_bucket(first, true, 32, 128), bucket + 16);
  }
  const std::pair<std::int64_t, std::int64_t> before[] = {
      {16, 16}, {17, 19}, {18, 21}, {19, 24}, {20, 27}, {21, 31}, {22, 35}, {23, 40},
      {24, 46}, {25, 52}, {26, 59}, {27, 67}, {28, 77}, {29, 87}, {30, 99}, {31, 113}};
  for (const auto& [bucket, first] : before) {
    EXPECT_EQ(relative_bucket(-first, false, 32, 128), bucket);
    EXPECT_EQ(relative_bucket(1 - first, false, 32, 128), bucket - 1);
  }
  EXPECT_EQ(relative_bucket(5, false, 32, 128), 0);
  EXPECT_EQ(relative_bucket(0, true, 32, 128), 0);
  EXPECT_EQ(relative_bucket(1, true, 32, 128), 17);
  EXPECT_EQ(relative_bucket(-100'000, true, 32, 128), 15);
}

TEST(RelativePositions, ShorterSequencesReadAPartOfTheTable) {
  const ModelConfig config(ModelSettings{.family = {"t5"}, .max_positions = 9});
  const ExecCtx ctx = ExecCtx::cpu(1);
  RelativePositions positions(config);
  EXPECT_EQ(positions.reserve(ctx, 9), 0);
  positions.make(ctx);
  const auto check = [&](std::int64_t length) {
    for (const bool both : {true, false}) {
      const std::vector<std::int32_t> list = positions.buckets(length, both).to_vector<std::int32_t>();
      ASSERT_EQ(list.size(), static_cast<std::size_t>(2 * length - 1));
      for (std::int64_t i = 0; i < length; ++i) {
        for (std::int64_t j = 0; j < length; ++j)
          ASSERT_EQ(list[static_cast<std::size_t>(i - j + length - 1)],
                    relative_bucket(j - i, both, 32, 128));
      }
    }
  };
  check(1);
  check(9);
  EXPECT_EQ(positions.reserve(ctx, 9), 9);
  EXPECT_EQ(positions.reserve(ctx, 40), 80);
  check(40);
  check(3);
}

ModelConfig t5(std::int64_t width, std::int64_t ffn, std::int64_t layers, std::int64_t heads,
               std::int64_t vocabulary, bool gated) {
  ModelSettings config;
  config.family = {"t5"};
  config.num_layers = 2 * layers;
  config.hidden_size = width;
  config.num_heads = heads;
  config.head_dim = 64;
  config.ffn_hidden_size = ffn;
  config.vocab_size = vocabulary;
  if (gated) config.activation = MlpActivation::geglu;
  config.tied_head = !gated;
  return config;
}

TEST(T5, HasTheParametersOfThePublishedModels) {
  EXPECT_EQ(parameter_count(t5(512, 2048, 6, 8, 32128, false)), 60'506'624);
  EXPECT_EQ(parameter_count(t5(768, 3072, 12, 12, 32128, false)), 222'903'552);
  EXPECT_EQ(parameter_count(t5(512, 1024, 8, 6, 32128, true)), 76'961'152);
  EXPECT_EQ(parameter_count(t5(768, 2048, 12, 12, 32128, true)), 247'577'856);
  EXPECT_EQ(parameter_count(t5(512, 1024, 8, 6, 250112, true)), 300'176'768);
}

}  // namespace
}  // namespace tessera::nn
