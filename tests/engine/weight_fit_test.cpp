#include <gtest/gtest.h>

#include "tessera/engine/pretrained.hpp"

namespace tessera::test {
namespace {

Architecture decoder(const std::string& type) {
  ModelSettings config;
  config.family = type == "gpt2" ? Family::gpt2 : Family::llama;
  config.num_layers = 2;
  config.hidden_size = 8;
  config.num_heads = 4;
  config.vocab_size = 11;
  config.max_positions = 6;
  return architecture_of(config);
}

TEST(WeightFit, TheSameModelKeepsEverything) {
  const WeightFit fit = weight_fit(decoder("gpt2"), decoder("gpt2"));
  EXPECT_TRUE(fit.drawn.empty() && fit.dropped.empty());
  EXPECT_EQ(fit.kept_tensors, 28);
  EXPECT_EQ(fit.kept.at("decoder.layers.1.self_attention.linear_qkv.weight")[0].count, 24);
}

TEST(WeightFit, OneKeyAndValueHeadAndRotaryPositions) {
  Architecture to = decoder("gpt2");
  to.model.num_kv_heads = 1;
  to.model.position_embedding = PositionKind::rotary;
  to.type = "starcoder2";  // whatever it is saved as: tensors are compared under the names of the first
  const WeightFit fit = weight_fit(decoder("gpt2"), to);
  EXPECT_EQ(fit.text(),
            "drawn anew from the seed: transformer.h.*.attn.c_attn.weight, transformer.h.*.attn.c_attn.bias; "
            "left out: transformer.wpe.weight; 23 tensors keep their weights");
  EXPECT_EQ(fit.drawn.size(), 4u);
  EXPECT_FALSE(fit.kept.contains("decoder.layers.0.self_attention.linear_qkv.weight"));
}

TEST(WeightFit, OfAParameterOutOfSeveralTensorsThoseThatFitAreKept) {
  Architecture to = decoder("llama");
  to.model.num_kv_heads = 2;
  const WeightFit grouped = weight_fit(decoder("llama"), to);
  const auto& rows = grouped.kept.at("decoder.layers.1.self_attention.linear_qkv.weight");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].tensor, "model.layers.1.self_attn.q_proj.weight");
  EXPECT_EQ(rows[0].here, 0);
  EXPECT_EQ(rows[0].count, 8);

  Architecture plain = decoder("llama");
  plain.model.activation = MlpActivation::gelu;  // without a gate: up_proj is all there is
  const WeightFit fit = weight_fit(decoder("llama"), plain);
  const auto& up = fit.kept.at("decoder.layers.0.mlp.linear_fc1.weight");
  ASSERT_EQ(up.size(), 1u);
  EXPECT_EQ(up[0].here, 0);
  EXPECT_EQ(up[0].there, decoder("llama").model.ffn_hidden_size);
  EXPECT_EQ(fit.dropped, (std::vector<std::string>{"model.layers.0.mlp.gate_proj.weight",
                                                   "model.layers.1.mlp.gate_proj.weight"}));
}

TEST(WeightFit, AHeadOfItsOwnIsDrawn) {
  Architecture to = decoder("gpt2");
  to.model.tied_head = false;
  EXPECT_EQ(weight_fit(decoder("gpt2"), to).drawn, std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(weight_fit(to, decoder("gpt2")).dropped, std::vector<std::string>{"lm_head.weight"});
}

}  // namespace
}  // namespace tessera::test
