/// Decoders of every kind: names, shapes, sizes, and equal results by different ways.

#include "tests/nn/decoder_support.hpp"

#include "tessera/base/model_math.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::BoundDecoder;
using test::expect_rows_equal;
using test::Samples;
using test::some_tokens;

std::vector<std::pair<std::string, Shape>> listed(Model& model) {
  std::vector<std::pair<std::string, Shape>> list;
  for (const Parameter* p : model.parameters()) list.emplace_back(p->name(), p->shape());
  return list;
}

TEST(DecoderNames, Gpt2) {
  Decoder model(ModelSettings{.num_layers = 1,
                              .hidden_size = 6,
                              .num_heads = 3,
                              .ffn_hidden_size = 10,
                              .vocab_size = 7,
                              .max_positions = 5},
                {});
  const std::vector<std::pair<std::string, Shape>> expected = {
      {"embedding.word_embeddings.weight", {7, 6}},
      {"embedding.position_embeddings.weight", {5, 6}},
      {"decoder.layers.0.input_layernorm.weight", {6}},
      {"decoder.layers.0.input_layernorm.bias", {6}},
      {"decoder.layers.0.self_attention.linear_qkv.weight", {18, 6}},
      {"decoder.layers.0.self_attention.linear_qkv.bias", {18}},
      {"decoder.layers.0.self_attention.linear_proj.weight", {6, 6}},
      {"decoder.layers.0.self_attention.linear_proj.bias", {6}},
      {"decoder.layers.0.pre_mlp_layernorm.weight", {6}},
      {"decoder.layers.0.pre_mlp_layernorm.bias", {6}},
      {"decoder.layers.0.mlp.linear_fc1.weight", {10, 6}},
      {"decoder.layers.0.mlp.linear_fc1.bias", {10}},
      {"decoder.layers.0.mlp.linear_fc2.weight", {6, 10}},
      {"decoder.layers.0.mlp.linear_fc2.bias", {6}},
      {"decoder.final_layernorm.weight", {6}},
      {"decoder.final_layernorm.bias", {6}},
  };
  EXPECT_EQ(listed(model), expected);
}

TEST(DecoderNames, Llama) {
  Decoder model(ModelSettings{.family = Family::llama,
                              .num_layers = 1,
                              .hidden_size = 8,
                              .num_heads = 4,
                              .num_kv_heads = 2,
                              .ffn_hidden_size = 5,
                              .vocab_size = 7,
                              .max_positions = 5},
                {});
  const std::vector<std::pair<std::string, Shape>> expected = {
      {"embedding.word_embeddings.weight", {7, 8}},
      {"decoder.layers.0.input_layernorm.weight", {8}},
      {"decoder.layers.0.self_attention.linear_qkv.weight", {16, 8}},
      {"decoder.layers.0.self_attention.linear_proj.weight", {8, 8}},
      {"decoder.layers.0.pre_mlp_layernorm.weight", {8}},
      {"decoder.layers.0.mlp.linear_fc1.weight", {10, 8}},
      {"decoder.layers.0.mlp.linear_fc2.weight", {8, 5}},
      {"decoder.final_layernorm.weight", {8}},
      {"output_layer.weight", {7, 8}},
  };
  EXPECT_EQ(listed(model), expected);
}

TEST(DecoderNames, ResidualOutputsStartSmallerWithDepth) {
  // Megatron's rule: what is added to the residual stream has std / sqrt(2 layers); norms are 1, biases 0.
  Decoder model(ModelSettings{.num_layers = 8,
                              .hidden_size = 6,
                              .num_heads = 3,
                              .vocab_size = 7,
                              .max_positions = 5,
                              .init_std = 0.04},
                {});
  for (const Parameter* p : model.parameters()) {
    SCOPED_TRACE(p->name());
    const std::string& name = p->name();
    if (name.ends_with("bias")) {
      EXPECT_EQ(p->init().kind, Init::Kind::zeros);
    } else if (name.find("layernorm") != std::string::npos) {
      EXPECT_EQ(p->init().kind, Init::Kind::ones);
    } else {
      const bool output =
          name.find("linear_proj") != std::string::npos || name.find("linear_fc2") != std::string::npos;
      EXPECT_EQ(p->init().kind, Init::Kind::normal);
      EXPECT_FLOAT_EQ(p->init().std, output ? 0.01f : 0.04f);
    }
  }
}

/// Angles that go by the length of a sequence: neither sequences that begin anew nor caches of keys can have
/// them.
TEST(DecoderStretched, RefusesWhatItsLengthDoesNotSay) {
  const ExecCtx ctx = ExecCtx::cpu(1, 3);
  ModelSettings config = test::decoder_variants().at("llama_gqa");  // 23 positions
  config.rope_scaling.type = RopeType::dynamic;
  config.rope_scaling.factor = 2.0;
  BoundDecoder decoder(ctx, config);
  Samples samples{.tokens = {some_tokens(30, 1)}};
  EXPECT_EQ(decoder.logits(samples.on(ctx)).size(), 30u);
  samples.key_begin = {2};
  samples.key_end = {30};
  test::expect_error<InvalidArgument>([&] { decoder.logits(samples.on(ctx)); },
                                      "packed or padded: beyond 23");
  samples.tokens = {some_tokens(23, 1)};
  samples.key_end = {23};
  EXPECT_EQ(decoder.logits(samples.on(ctx)).size(), 23u);
  EXPECT_NO_THROW(decoder.model.check_generates(23));
  test::expect_error<InvalidArgument>([&] { decoder.model.check_generates(24); },
                                      "text is generated up to 23 tokens, prompt included, with dynamic");
}

TEST(AlibiSlopes, AreTheOnesOfThePaper) {
  const std::vector<float> eight = {0.5f,     0.25f,     0.125f,     0.0625f,
                                    0.03125f, 0.015625f, 0.0078125f, 0.00390625f};
  EXPECT_EQ(nn::alibi_slopes(8), eight);
  EXPECT_EQ(nn::alibi_slopes(1), std::vector<float>{0.00390625f});
  std::vector<float> twelve = eight;  // then every other one of sixteen: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5
  for (const float slope : {0.70710678f, 0.35355339f, 0.17677670f, 0.08838835f}) twelve.push_back(slope);
  const auto slopes = nn::alibi_slopes(12);
  ASSERT_EQ(slopes.size(), twelve.size());
  for (std::size_t i = 0; i < slopes.size(); ++i) EXPECT_FLOAT_EQ(slopes[i], twelve[i]);
}

class DecoderVariant : public ::testing::TestWithParam<std::string> {
 protected:
  ModelSettings config = test::decoder_variants().at(GetParam());
  ExecCtx ctx = test::context(2, 5);
};

TEST_P(DecoderVariant, ParameterCountAgreesWithTheFormula) {
  Decoder model(config, {});
  std::int64_t count = 0;
  for (const Parameter* p : model.parameters()) count += p->shape().numel();
  EXPECT_EQ(count, parameter_count(config));
  EXPECT_EQ(model.flops_per_token({.tokens = 17}), flops_per_token(config, 17, FlopConvention::causal));
}

TEST_P(DecoderVariant, KvCacheGivesTheFullForwardsLogits) {
  BoundDecoder decoder(ctx, config);
  const std::vector<std::vector<std::int32_t>> tokens = {some_tokens(13, 1), some_tokens(13, 2)};
  const auto full = decoder.logits(Samples{.tokens = tokens}.on(ctx));
  KvCache cache = decoder.model.make_cache(ctx, 3, 13);
  cache.pages = Tensor::from(ctx, std::vector<std::int32_t>{2, 0, 1}, {3, 1});  // a page may be any row's
  const auto piece = [&](std::size_t sample, std::size_t begin, std::size_t count) {
    const auto from = tokens[sample].begin() + static_cast<std::ptrdiff_t>(begin);
    std::vector<std::int32_t> positions;
    for (std::size_t i = 0; i < count; ++i) positions.push_back(static_cast<std::int32_t>(begin + i));
    return std::pair(std::vector<std::int32_t>(from, from + static_cast<std::ptrdiff_t>(count)), positions);
  };
  // Rows 1 and 2 of the cache: five positions of both and three more, then one by one, the second text
  // two positions behind the first.
  std::int64_t begin = 0;
  for (const std::size_t count : {5u, 3u}) {
    Samples part;
    for (std::size_t sample : {0u, 1u}) {
      const auto [text, positions] = piece(sample, static_cast<std::size_t>(begin), count);
      part.tokens.push_back(text);
      part.positions.push_back(positions);
    }
    const CachePass pass{.cache = &cache, .row0 = 1, .begin = begin};
    const auto rows = decoder.logits(part.on(ctx), false, 0, &pass);
    ASSERT_EQ(rows.size(), 2 * count);
    for (std::size_t i = 0; i < rows.size(); ++i)
      expect_rows_equal(rows[i], full[2 * static_cast<std::size_t>(begin) + i], 1e-5,
                        "row " + std::to_string(i));
    begin += static_cast<std::int64_t>(count);
  }
  for (std::size_t at = 8; at < 13; ++at) {
    const std::size_t places[] = {at, at - 2};
    Samples part;
    for (std::size_t sample : {0u, 1u}) {
      const auto [text, positions] = piece(sample, places[sample], 1);
      part.tokens.push_back(text);
      part.positions.push_back(positions);
    }
    const std::vector<std::int32_t> ends = {static_cast<std::int32_t>(at + 1),
                                            static_cast<std::int32_t>(at - 1)};
    const CachePass pass{.cache = &cache,
                         .row0 = 1,
                         .lengths = {ends[0], ends[1]},
                         .longest = ends[0],
                         .key_end = Tensor::from(ctx, ends, {2})};
    const auto rows = decoder.logits(part.on(ctx), false, 0, &pass);
    ASSERT_EQ(rows.size(), 2u);
    for (std::size_t sample : {0u, 1u})
      expect_rows_equal(rows[sample], full[2 * places[sample] + sample], 1e-5,
                        "position " + std::to_string(at));
  }
}

TEST_P(DecoderVariant, TheHeadIsAskedForSomeRowsOnly) {
  BoundDecoder decoder(ctx, config);
  const std::vector<std::vector<std::int32_t>> tokens = {some_tokens(7, 1), some_tokens(7, 2)};
  const auto full = decoder.logits(Samples{.tokens = tokens}.on(ctx));
  KvCache cache = decoder.model.make_cache(ctx, 2, 7);
  CachePass pass{.cache = &cache, .last = Tensor::from(ctx, std::vector<std::int32_t>{13, 4, 13}, {3})};
  const auto rows = decoder.logits(Samples{.tokens = tokens}.on(ctx), false, 0, &pass);
  ASSERT_EQ(rows.size(), 3u);
  expect_rows_equal(rows[0], full[13], 1e-5, "13");
  expect_rows_equal(rows[1], full[4], 1e-5, "4");
  expect_rows_equal(rows[2], full[13], 1e-5, "13");
}

TEST_P(DecoderVariant, PaddingOnEitherSideChangesNothing) {
  BoundDecoder decoder(ctx, config);
  const auto text = some_tokens(9, 3);
  const auto alone = decoder.logits(Samples{.tokens = {text}}.on(ctx));
  Samples padded{.tokens = {some_tokens(14, 4), some_tokens(14, 5)},
                 .positions = {std::vector<std::int32_t>(14, 0), std::vector<std::int32_t>(14, 0)},
                 .key_begin = {5, 0},
                 .key_end = {14, 9}};
  for (std::size_t i = 0; i < 9; ++i) {
    padded.tokens[0][5 + i] = padded.tokens[1][i] = text[i];
    padded.positions[0][5 + i] = padded.positions[1][i] = static_cast<std::int32_t>(i);
  }
  const auto rows = decoder.logits(padded.on(ctx));
  for (std::size_t i = 0; i < 9; ++i) {
    expect_rows_equal(rows[2 * (5 + i)], alone[i], 1e-5, "left padding, position " + std::to_string(i));
    expect_rows_equal(rows[2 * i + 1], alone[i], 1e-5, "right padding, position " + std::to_string(i));
  }
  for (const auto& row : rows) {
    for (const float v : row) ASSERT_TRUE(std::isfinite(v));
  }
}

TEST_P(DecoderVariant, PackedDocumentsAreSeparate) {
  BoundDecoder decoder(ctx, config);
  const std::vector<std::vector<std::int32_t>> documents = {some_tokens(6, 6), some_tokens(1, 7),
                                                            some_tokens(8, 8)};
  Samples packed{.tokens = {{}}, .positions = {{}}, .documents = {{}}};
  for (std::size_t d = 0; d < documents.size(); ++d) {
    for (std::size_t i = 0; i < documents[d].size(); ++i) {
      packed.tokens[0].push_back(documents[d][i]);
      packed.positions[0].push_back(static_cast<std::int32_t>(i));
      packed.documents[0].push_back(static_cast<std::int32_t>(d));
    }
  }
  const auto rows = decoder.logits(packed.on(ctx));
  std::size_t row = 0;
  for (const auto& document : documents) {
    for (const auto& expected : decoder.logits(Samples{.tokens = {document}}.on(ctx)))
      expect_rows_equal(rows[row], expected, 1e-5, "row " + std::to_string(row)), ++row;
  }
}

TEST_P(DecoderVariant, LaterTokensDoNotReachEarlierLogits) {
  BoundDecoder decoder(ctx, config);
  auto tokens = some_tokens(11, 9);
  const auto before = decoder.logits(Samples{.tokens = {tokens}}.on(ctx));
  tokens[7] = (tokens[7] + 1) % 31;
  const auto after = decoder.logits(Samples{.tokens = {tokens}}.on(ctx));
  for (std::size_t i = 0; i < 7; ++i)
    expect_rows_equal(after[i], before[i], 1e-6, "row " + std::to_string(i));
  for (std::size_t i = 7; i < 11; ++i) EXPECT_GT(test::distance(after[i], before[i]), 1e-4) << "row " << i;
}

TEST_P(DecoderVariant, DropoutIsKeyedByStepAndSample) {
  config.dropout = 0.2;
  config.attention_dropout = 0.3;
  BoundDecoder decoder(ctx, config);
  Samples samples{.tokens = {some_tokens(9, 1), some_tokens(9, 2)}};
  const auto first = decoder.logits(samples.on(ctx), true, 4);
  EXPECT_EQ(decoder.logits(samples.on(ctx), true, 4), first);
  EXPECT_NE(decoder.logits(samples.on(ctx), true, 5), first);
  EXPECT_NE(decoder.logits(samples.on(ctx), false, 4), first);
  // The second sample computed alone draws what it drew in the batch.
  const Samples second{.tokens = {samples.tokens[1]}, .sample0 = 1};
  const auto alone = decoder.logits(second.on(ctx), true, 4);
  for (std::size_t i = 0; i < alone.size(); ++i) expect_rows_equal(alone[i], first[2 * i + 1], 1e-5, "row");
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (const auto& [name, config] : test::decoder_variants()) names.push_back(name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, DecoderVariant, ::testing::ValuesIn(variant_names()),
                         [](const auto& info) { return info.param; });

TEST(Decoder, TheCacheRefusesToOverflow) {
  const ExecCtx ctx = test::context(1);
  BoundDecoder decoder(ctx, test::decoder_variants().at("gpt2"));
  KvCache cache = decoder.model.make_cache(ctx, 1, 3);
  const CachePass pass{.cache = &cache};
  try {
    decoder.logits(Samples{.tokens = {some_tokens(4, 1)}}.on(ctx), false, 0, &pass);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("holds 3 positions of 1 texts, 4 of 1 are needed"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera
