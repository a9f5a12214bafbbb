#include "tessera/base/model_math.hpp"

#include <gtest/gtest.h>

#include "tessera/base/config_file.hpp"

namespace tessera {
namespace {

ModelConfig shipped(const char* name) { return load_config(std::string("configs/") + name + ".yaml").model; }

TEST(ParameterCount, NamedModels) {
  EXPECT_EQ(parameter_count(shipped("gpt2_124m")), 124'439'808);
  EXPECT_EQ(parameter_count(shipped("gpt2_xl")), 1'557'611'200);
  EXPECT_EQ(parameter_count(shipped("llama_7b")), 6'738'415'616);
  EXPECT_EQ(parameter_count(shipped("llama3_8b")), 8'030'261'248);
  EXPECT_EQ(parameter_count(shipped("mistral_7b")), 7'241'732'096);
  EXPECT_EQ(parameter_count(shipped("qwen3_8b")), 8'190'735'360);
  EXPECT_EQ(parameter_count(shipped("gemma2_9b")), 9'241'705'984);
  EXPECT_EQ(parameter_count(shipped("gemma3_1b")), 999'885'952);
  EXPECT_EQ(parameter_count(shipped("gpt_neox_20b")), 20'554'567'680);
  EXPECT_EQ(parameter_count(shipped("santacoder_1b")), 1'124'886'528);
  EXPECT_EQ(parameter_count(shipped("bloom_7b1")), 7'069'016'064);
  EXPECT_EQ(parameter_count(shipped("phi3_mini")), 3'821'079'552);
  EXPECT_EQ(parameter_count(shipped("falcon_7b")), 6'921'720'704);
  EXPECT_EQ(parameter_count(shipped("mpt_7b")), 6'649'286'656);
  EXPECT_EQ(parameter_count(shipped("olmo2_7b")), 7'298'617'344);
  EXPECT_EQ(parameter_count(shipped("glm4_9b")), 9'400'279'040);
  // Without a file: the defaults are GPT-2 small.
  EXPECT_EQ(parameter_count(ModelSettings{}), 124'439'808);
}

/// Width 12, 4 heads, MLP 48, vocabulary 100, 4 positions, untied head, like the model counted by hand below.
ModelSettings small(std::int64_t layers) {
  ModelSettings c;
  c.num_layers = layers;
  c.hidden_size = 12;
  c.num_heads = 4;
  c.vocab_size = 100;
  c.max_positions = 4;
  c.tied_head = false;
  return c;
}

TEST(ParameterCount, ByHand) {
  // A layer of width h with biases and LayerNorm: 12 h^2 + 13 h.
  EXPECT_EQ(parameter_count(small(2)) - parameter_count(small(1)), 1884);
  // Two layers, token table, position table, final norm, head.
  EXPECT_EQ(parameter_count(small(2)), 2 * 1884 + 1200 + 48 + 24 + 1200);
  ModelSettings tied = small(2);
  tied.tied_head = true;
  EXPECT_EQ(parameter_count(tied), 6240 - 1200);
}

TEST(ParameterCount, EveryOption) {
  ModelSettings c = small(1);
  const std::int64_t plain = parameter_count(c);
  c.position_embedding = PositionKind::alibi;
  EXPECT_EQ(parameter_count(c), plain - 48);
  c.norm = NormStyle::rmsnorm;
  EXPECT_EQ(parameter_count(c), plain - 48 - 3 * 12);
  c.qkv_bias = false;
  EXPECT_EQ(parameter_count(c), plain - 48 - 36 - 36);
  c.linear_bias = false;
  EXPECT_EQ(parameter_count(c), plain - 48 - 36 - 36 - (12 + 48 + 12));
  const std::int64_t bare = parameter_count(c);
  c.activation = MlpActivation::swiglu;
  EXPECT_EQ(parameter_count(c), bare + 12 * 48);
  c.linear_bias = true;
  EXPECT_EQ(parameter_count(c), bare + 12 * 48 + 12 + 2 * 48 + 12);
  c.linear_bias = false;
  c.num_kv_heads = 2;
  EXPECT_EQ(parameter_count(c), bare + 12 * 48 - 2 * 2 * 3 * 12);
  c.head_dim = 5;
  EXPECT_EQ(parameter_count(c), bare + 12 * 48 - (12 * 36 + 12 * 12) + (4 + 2 * 2) * 5 * 12 + 12 * 20);
}

TEST(MatmulWeights, WithoutTablesBiasesAndNorms) {
  // GPT-2 small: 12 layers of 12 * 768^2, and the head.
  EXPECT_EQ(matmul_weight_count(ModelSettings{}), 12LL * 12 * 768 * 768 + 50257LL * 768);
  // Llama 3 8B: everything but one of the two tables and 65 norms.
  EXPECT_EQ(matmul_weight_count(shipped("llama3_8b")), 8'030'261'248 - 128256LL * 4096 - 65 * 4096);
}

TEST(Flops, BothConventions) {
  const double n = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  EXPECT_DOUBLE_EQ(flops_per_token(ModelSettings{}, 1024, FlopConvention::causal),
                   6 * n + 6.0 * 12 * 768 * 1024);
  EXPECT_DOUBLE_EQ(flops_per_token(ModelSettings{}, 1024, FlopConvention::palm),
                   6 * n + 12.0 * 12 * 768 * 1024);
  // Published rates of Llama 3 8B at 8192 positions come from these two figures.
  EXPECT_NEAR(flops_per_token(shipped("llama3_8b"), 8192, FlopConvention::causal), 51.5e9, 0.05e9);
  EXPECT_NEAR(flops_per_token(shipped("llama3_8b"), 8192, FlopConvention::palm), 57.9e9, 0.05e9);
}

// One layer on either side, by hand.
TEST(Flops, OfAnEncoderAndADecoder) {
  ModelSettings c;
  c.family = {"t5"};
  c.num_layers = 2;
  c.hidden_size = 8;
  c.num_heads = 2;
  c.head_dim = 3;
  c.ffn_hidden_size = 10;
  c.vocab_size = 21;
  const double product = 8 * 6, mlp = 2 * 8 * 10;
  const double read = 5, said = 7;
  const double weights = read * (4 * product + mlp + 2 * product) + said * (6 * product + mlp + 21 * 8);
  const double pairs = read * read + said * said / 2 + said * read;
  EXPECT_DOUBLE_EQ(two_stack_flops_per_token(c, {.tokens = 7, .encoder = 5}),
                   (6 * weights + 12 * 6 * pairs) / said);
  c.activation = MlpActivation::geglu;
  c.tied_head = false;
  EXPECT_DOUBLE_EQ(two_stack_flops_per_token(c, {.tokens = 7, .encoder = 5}),
                   (6 * (weights + (read + said) * 8 * 10) + 12 * 6 * pairs) / said);
}

// Twice the positions add exactly 6 L (heads * head_dim) S, whatever else the model has.
TEST(Flops, AttentionFollowsTheQueryWidth) {
  ModelSettings c = small(3);
  c.head_dim = 5;
  const double once = flops_per_token(c, 64, FlopConvention::causal);
  EXPECT_DOUBLE_EQ(flops_per_token(c, 128, FlopConvention::causal) - once, 6.0 * 3 * 4 * 5 * 64);
}

}  // namespace
}  // namespace tessera
