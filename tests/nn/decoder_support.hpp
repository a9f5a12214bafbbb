#pragma once
/// Small decoders of every kind, with memory for their parameters, and micro-batches made by hand.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/nn/models/decoder.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera::test {

/// A decoder whose weights are wide enough for every path to matter.
class BoundDecoder {
 public:
  BoundDecoder(const ExecCtx& context, const ModelConfig& config) : ctx(context), model(config, {}) {
    for (Parameter* p : model.parameters()) {
      const Tensor value = Tensor::empty(ctx, p->shape(), DType::f32);
      ops::fill_normal(ctx, value, 0.15f, {11, site_of(p->name()), 0}, {});
      if (p->init().kind == Init::Kind::ones) {
        const Tensor one = Tensor::empty(ctx, p->shape(), DType::f32);
        ops::fill_constant(ctx, one, 1.0f);
        ops::axpby(ctx, 1.0f, one, 1.0f, value);
      }
      p->bind(value, Tensor::empty(ctx, p->shape(), DType::f32));
    }
  }

  /// Logits [position][sample] as rows of the vocabulary.
  std::vector<std::vector<float>> logits(const MicroBatch& input, bool training = false,
                                         std::uint32_t step = 0, const CachePass* cache = nullptr) {
    const Var out =
        model.forward({.exec = ctx, .input = input, .training = training, .step = step, .cache = cache});
    const std::vector<float> flat = ops::contiguous(ctx, out.value()).to_floats();
    const auto width = static_cast<std::size_t>(model.vocab_size());
    std::vector<std::vector<float>> rows;
    for (std::size_t i = 0; i < flat.size(); i += width) {
      rows.emplace_back(flat.begin() + static_cast<std::ptrdiff_t>(i),
                        flat.begin() + static_cast<std::ptrdiff_t>(i + width));
    }
    return rows;
  }

  ExecCtx ctx;
  Decoder model;
};

/// Samples of equal length; rows are laid out position-major here, by plain loops.
struct Samples {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<std::vector<std::int32_t>> positions = {};  ///< empty = 0, 1, 2, ...
  std::vector<std::int32_t> key_begin = {}, key_end = {};
  std::vector<std::vector<std::int32_t>> documents = {};
  std::int64_t sample0 = 0;

  MicroBatch on(const ExecCtx& ctx) const {
    const auto batch = static_cast<std::int64_t>(tokens.size());
    const auto length = static_cast<std::int64_t>(tokens[0].size());
    MicroBatch m;
    m.batch = batch;
    m.seq_length = length;
    m.sample0 = sample0;
    std::vector<std::int32_t> t, p, d;
    for (std::size_t s = 0; s < tokens[0].size(); ++s) {
      for (std::size_t b = 0; b < tokens.size(); ++b) {
        t.push_back(tokens[b][s]);
        p.push_back(positions.empty() ? static_cast<std::int32_t>(s) : positions[b][s]);
      }
    }
    m.tokens = Tensor::from(ctx, t, {length, batch});
    m.positions = Tensor::from(ctx, p, {length * batch});
    if (!key_begin.empty()) m.key_begin = Tensor::from(ctx, key_begin, {batch});
    if (!key_end.empty()) m.key_end = Tensor::from(ctx, key_end, {batch});
    for (const auto& sample : documents) d.insert(d.end(), sample.begin(), sample.end());
    if (!d.empty()) m.document = Tensor::from(ctx, d, {batch, length});
    return m;
  }
};

inline std::vector<std::int32_t> some_tokens(std::size_t count, unsigned seed, std::int32_t vocab = 31) {
  std::mt19937 generator(seed);
  std::vector<std::int32_t> tokens(count);
  for (auto& t : tokens) t = static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab));
  return tokens;
}

/// One configuration per kind of decoder, at odd sizes.
inline std::map<std::string, ModelSettings> decoder_variants() {
  ModelSettings gpt2{.family = Family::gpt2,
                     .num_layers = 2,
                     .hidden_size = 30,
                     .num_heads = 5,
                     .ffn_hidden_size = 37,
                     .vocab_size = 31,
                     .max_positions = 23};
  ModelSettings llama{.family = Family::llama,
                      .num_layers = 2,
                      .hidden_size = 24,
                      .num_heads = 6,
                      .num_kv_heads = 2,
                      .ffn_hidden_size = 29,
                      .vocab_size = 31,
                      .max_positions = 23};
  std::map<std::string, ModelSettings> all{{"gpt2", gpt2}, {"llama_gqa", llama}};
  ModelSettings c = gpt2;
  c.tied_head = false;
  c.num_kv_heads = 1;
  c.activation = MlpActivation::relu;
  all["gpt2_untied_mqa_relu"] = c;
  c = gpt2;
  c.position_embedding = PositionKind::alibi;
  c.activation = MlpActivation::gelu;
  all["gpt2_alibi_gelu"] = c;
  c = gpt2;
  c.position_embedding = PositionKind::none;
  c.head_dim = 7;
  all["gpt2_none_wide_heads"] = c;
  c = llama;
  c.num_kv_heads = 6;
  c.tied_head = true;
  c.rope_interleaved = true;
  all["llama_mha_tied_interleaved"] = c;
  c = llama;
  c.num_kv_heads = 1;
  c.rope_fraction = 0.5;
  c.rope_scaling = {8.0, 1.0, 4.0, 16};
  c.qkv_bias = true;
  all["llama_mqa_scaled_half"] = c;
  c = llama;
  c.position_embedding = PositionKind::learned;
  c.norm = NormStyle::layernorm;
  all["llama_learned_layernorm"] = c;
  c = llama;
  c.sliding_window = 4;
  all["llama_window"] = c;
  c = llama;
  c.rope_scaling.type = RopeType::yarn;
  c.rope_scaling.factor = 3.0;
  c.rope_scaling.original_max_positions = 8;
  c.norm_placement = NormPlacement::post;
  all["llama_yarn_norms_behind"] = c;
  c = llama;
  c.parallel_residual = true;
  c.shared_norm = true;
  c.norm = NormStyle::layernorm;
  c.norm_bias = false;
  all["llama_one_norm_for_both"] = c;
  c = llama;
  c.family = {"qwen3"};
  c.head_dim = 10;
  c.sliding_window = 5;
  c.window_pattern = "FS";
  all["qwen3"] = c;
  c.family = {"gemma2"};
  c.window_pattern.reset();
  c.attention_softcap = 0.5;
  c.logit_softcap = 0.4;
  c.attention_scale = 0.4;
  all["gemma2"] = c;
  c.family = {"gemma3_text"};
  c.attention_softcap.reset();
  c.logit_softcap.reset();
  c.window_pattern = "SF";
  c.rope_local_theta = 300.0;
  c.rope_scaling = {};
  c.rope_scaling.type = RopeType::linear;
  c.rope_scaling.factor = 2.0;
  all["gemma3"] = c;
  c = gpt2;
  c.family = {"bloom"};
  all["bloom"] = c;
  c.family = {"mpt"};
  all["mpt"] = c;
  c.family = {"falcon"};
  c.num_kv_heads = 1;
  all["falcon"] = c;
  c = llama;
  c.family = {"olmo2"};
  all["olmo2"] = c;
  c.family = {"glm4"};
  c.head_dim = 12;
  c.rope_fraction = 0.5;
  c.rope_interleaved = true;
  all["glm4"] = c;
  return all;
}

inline void expect_rows_equal(const std::vector<float>& a, const std::vector<float>& b, double tolerance,
                              const std::string& what) {
  EXPECT_LE(distance(a, b), tolerance) << what;
}

}  // namespace tessera::test
