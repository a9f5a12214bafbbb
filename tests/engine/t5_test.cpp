/// What T5 reads and refuses, and where it is cut. That it is Transformers' model: tests/parity; that any
/// layout trains the same: layout_matrix_test.cpp.

#include "engine/dry_terms.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/engine/plan.hpp"
#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

using test::expect_error;
using test::tiny_t5;

Batch t5_batch(unsigned seed = 3) {
  Batch batch = test::random_batch(4, 7, seed, 31);
  batch.encoder_seq_length = 13;
  batch.encoder_tokens = test::random_batch(4, 13, seed + 1, 31).tokens;
  return batch;
}

TEST(T5, ReadsTwoSequences) {
  const auto engine = build_engine(tiny_t5());
  const double loss = engine->evaluate(t5_batch());
  Batch other = t5_batch();
  other.encoder_tokens[0] = (other.encoder_tokens[0] + 1) % 31;
  EXPECT_NE(engine->evaluate(other), loss);
  other.encoder_key_begin.assign(4, 1);  // then nobody reads it
  Batch same = t5_batch();
  same.encoder_key_begin.assign(4, 1);
  EXPECT_EQ(engine->evaluate(other), engine->evaluate(same));
  Batch shorter = t5_batch();
  shorter.encoder_seq_length = 1;
  shorter.encoder_tokens.resize(4);
  EXPECT_NO_THROW(engine->evaluate(shorter));
  Batch longer = test::random_batch(2, 40, 1, 31);  // beyond max_positions: only distances count
  longer.encoder_seq_length = 50;
  longer.encoder_tokens = test::random_batch(2, 50, 2, 31).tokens;
  EXPECT_NO_THROW(engine->evaluate(longer));
}

TEST(T5, RefusesWhatItDoesNotRead) {
  const auto engine = build_engine(tiny_t5());
  Batch batch = test::random_batch(4, 7, 3, 31);
  expect_error<InvalidArgument>([&] { engine->step(batch); }, "no encoder_tokens");
  batch = t5_batch();
  batch.position_ids.assign(batch.tokens.size(), 0);
  expect_error<InvalidArgument>([&] { engine->step(batch); }, "position_ids");
  batch = t5_batch();
  batch.encoder_tokens[14] = 31;
  expect_error<DataError>([&] { engine->step(batch); }, "sample 1", "position 1", "token of the encoder 31");
  Config gpt = test::tiny_config();
  gpt.model.vocab_size = 31;
  expect_error<InvalidArgument>([&] { build_engine(gpt)->step(t5_batch()); }, "encoder_tokens",
                                "no encoder beside a decoder");
}

TEST(T5, RefusesSettingsOfOtherModels) {
  const auto refuse = [](auto change, const char* a, const char* b = "") {
    Config config = tiny_t5();
    change(config.model);
    expect_error<ConfigError>([&] { build_engine(config); }, a, b);
  };
  refuse([](ModelConfig& m) { m.position_embedding = PositionKind::rotary; }, "relative positions");
  refuse([](ModelConfig& m) { m.qkv_bias = true; }, "no biases");
  refuse([](ModelConfig& m) { m.tied_head = false; }, "scaled", "tied");
  refuse([](ModelConfig& m) { m.encoder_layers = 4; }, "model.encoder_layers (4)");
  refuse([](ModelConfig& m) { m.padding_id = 0; }, "padding row");
  Config gpt = test::tiny_config();
  gpt.model.encoder_layers = 1;
  expect_error<ConfigError>([&] { build_engine(gpt); }, "model.encoder_layers", "not");
}

/// A layer of the decoder attends twice: with as many of either and equal lengths the encoder's half is the
/// longer.
TEST(T5, IsCutByWhatItsTwoKindsOfLayersCost) {
  Config config = tiny_t5();
  config.model.num_layers = 24;
  config.model.encoder_layers = 12;
  config.training.seq_length = config.training.decoder_seq_length.emplace(64);
  const PartCosts costs = detail::part_costs(config);
  ASSERT_EQ(costs.layers.size(), 24u);
  EXPECT_GT(costs.layers.back(), 1.2 * costs.layers.front());
  config.parallel.pipeline = 4;
  const auto pieces = all_pieces_of(config);
  std::int64_t layers = 0;
  for (const auto& stage : pieces) {
    EXPECT_EQ(stage.at(0).first_layer, layers);
    layers += stage.at(0).num_layers;
  }
  EXPECT_EQ(layers, 24);
  EXPECT_GT(pieces[1][0].num_layers, pieces[2][0].num_layers);
  config.parallel.pipeline_layout = "1,11,11,1";
  EXPECT_EQ(all_pieces_of(config)[2][0].first_layer, 12);
}

TEST(T5, IsCutBetweenItsStacksWhereASplitRankSaysSo) {
  Config config = tiny_t5();
  config.model.num_layers = 12;
  config.model.encoder_layers = 7;
  config.parallel.pipeline = 4;
  for (const int split : {1, 2, 3}) {
    config.parallel.pipeline_split_rank = split;
    const auto pieces = all_pieces_of(config);
    ASSERT_EQ(pieces.size(), 4u);
    std::int64_t layers = 0;
    for (const auto& stage : pieces) {
      EXPECT_EQ(stage.at(0).first_layer, layers);
      EXPECT_GE(stage.at(0).num_layers, 1);
      layers += stage.at(0).num_layers;
    }
    EXPECT_EQ(layers, 12);
    EXPECT_EQ(pieces[static_cast<std::size_t>(split)][0].first_layer, 7);
    EXPECT_TRUE(pieces.front()[0].embedding && pieces.back()[0].head);
    EXPECT_FALSE(pieces[1][0].embedding || pieces[2][0].head);
  }
}

TEST(T5, SaysWhatItCosts) {
  const auto engine = build_engine(tiny_t5());
  EXPECT_GT(engine->model().flops_per_token(sample_lengths(tiny_t5())), 0);
  EXPECT_EQ(lengths_text(tiny_t5()), "13 tokens and 7 in the decoder");
}

Config megatron_config() {
  Config config = tiny_t5();
  config.model = ModelSettings{.family = {"megatron_t5"},
                               .num_layers = 4,
                               .hidden_size = 16,
                               .num_heads = 2,
                               .ffn_hidden_size = 24,
                               .vocab_size = 31,
                               .max_positions = 13};
  return config;
}

TEST(MegatronT5, KnowsPositionsUpToItsTable) {
  const auto engine = build_engine(megatron_config());
  EXPECT_NO_THROW(engine->evaluate(t5_batch()));
  Batch longer = t5_batch();
  longer.encoder_seq_length = 14;
  longer.encoder_tokens = test::random_batch(4, 14, 5, 31).tokens;
  expect_error<InvalidArgument>([&] { engine->evaluate(longer); }, "14", "13 positions");
  Batch moved = t5_batch();
  std::swap(moved.encoder_tokens[0], moved.encoder_tokens[1]);
  EXPECT_NE(engine->evaluate(moved), engine->evaluate(t5_batch()));
}

TEST(MegatronT5, CountsItsParameters) {
  const Config config = megatron_config();
  const auto engine = build_engine(config);
  std::int64_t counted = 0;
  for (const Parameter* parameter : engine->params().parameters()) counted += parameter->shape().numel();
  EXPECT_EQ(parameter_count(config.model), counted);
}

TEST(MegatronT5, RefusesSettingsOfOtherModels) {
  const auto refuse = [](auto change, const char* a, const char* b = "") {
    Config config = megatron_config();
    change(config.model);
    expect_error<ConfigError>([&] { build_engine(config); }, a, b);
  };
  refuse([](ModelConfig& m) { m.position_embedding = PositionKind::rotary; }, "learned positions");
  refuse([](ModelConfig& m) { m.relative_buckets = 8; }, "relative_buckets",
         "not of model.family megatron_t5");
  refuse([](ModelConfig& m) { m.tied_head = false; }, "tied");
  refuse([](ModelConfig& m) { m.encoder_layers = 4; }, "model.encoder_layers (4)");
}

}  // namespace
}  // namespace tessera
