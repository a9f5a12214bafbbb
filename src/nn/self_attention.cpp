#include <cmath>
#include <utility>

#include "nn/cached_attention.hpp"
#include "tessera/nn/layers.hpp"

namespace tessera::nn {

SelfAttention::SelfAttention(std::string name, const ModelConfig& config, std::int64_t layer,
                             const TensorParallel& tensor, bool causal)
    : Module(std::move(name)),
      config_(config),
      tensor_(tensor),
      layer_(layer),
      causal_(causal),
      heads_(head_share(config, tensor)),
      qkv_(submodule<Linear>(
          "linear_qkv",
          Linear::Options{config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
                          config.qkv_bias, config.init_std, tensor, Linear::Split::column,
                          qkv_rows(config, heads_)})),
      proj_(submodule<Linear>(
          "linear_proj",
          Linear::Options{config.num_heads * config.head_dim,
                          config.hidden_size,
                          has_proj_bias(config),
                          config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers)),
                          tensor,
                          Linear::Split::row,
                          {}})) {
  if (config.qk_norm == QkNorm::none) return;
  const Init init = config.norm_zero_centered ? Init::zeros() : Init::ones();
  if (config.qk_norm == QkNorm::full) {
    declare_full_norms(init);
    return;
  }
  // A rank sees its own heads, and so a part of the gradients.
  const ParameterTraits traits{.reads_main = true, .partial_over_tensor = tensor.active()};
  query_norm_ = &parameter("q_layernorm.weight", Shape{config.head_dim}, init, traits);
  key_norm_ = &parameter("k_layernorm.weight", Shape{config.head_dim}, init, traits);
}

void SelfAttention::declare_full_norms(const Init& init) {
  const std::int64_t d = config_.head_dim;
  const auto declare = [&](const char* name, std::int64_t heads, Segment own) {
    own.count *= d;
    own.global *= d;
    return &parameter(name, Placement::segmented({heads * d}, 0, {own}), init,
                      ParameterTraits{.reads_main = true});
  };
  query_norm_ = declare("q_layernorm.weight", config_.num_heads,
                        {.local = 0, .global = heads_.first, .count = heads_.heads});
  key_norm_ = declare("k_layernorm.weight", config_.num_kv_heads,
                      {.local = 0,
                       .global = heads_.first_kv,
                       .count = heads_.kv_heads,
                       .copies = heads_.copies,
                       .copy = heads_.copy});
}

Var SelfAttention::norm_heads(const Forward& forward, Var qkv) {
  const HeadNormOptions options{.heads = heads_.heads,
                                .kv_heads = heads_.kv_heads,
                                .head_dim = config_.head_dim,
                                .query_weight = *query_norm_,
                                .key_weight = *key_norm_,
                                .eps = static_cast<float>(config_.norm_eps),
                                .zero_centered = config_.norm_zero_centered};
  if (config_.qk_norm == QkNorm::full) return full_head_norm(forward.exec, tensor_, std::move(qkv), options);
  return head_norm(forward.exec, std::move(qkv), options);
}

Var SelfAttention::forward(const Forward& forward, const Var& x, const ops::RopeTable* rope,
                           const Tensor& alibi_slopes) {
  const MicroBatch& input = forward.input;
  SelfAttentionOptions options{heads_.heads, heads_.kv_heads, config_.head_dim, {}, rope, input.positions};
  if (alibi_slopes) options.attention.alibi_slopes = alibi_slopes.narrow(0, heads_.first, heads_.heads);
  options.attention.causal = causal_;
  options.attention.window = window_of(config_, layer_);
  options.attention.softcap = static_cast<float>(config_.attention_softcap);
  options.attention.scale = static_cast<float>(config_.attention_scale.value_or(0.0));
  options.attention.key_begin = input.key_begin;
  options.attention.key_end = input.key_end;
  options.attention.document = input.document;
  if (forward.training && config_.attention_dropout > 0.0) {
    options.attention.dropout = static_cast<float>(config_.attention_dropout);
    options.attention.dropout_key = forward.random(name() + ".probabilities");
    options.attention.sample0 = input.sample0;
    options.attention.head0 = heads_.first;
    options.attention.total_heads = config_.num_heads;
    options.attention.seq_length = input.whole_length();
  }
  Var qkv = qkv_.forward(forward, x);
  if (query_norm_ != nullptr) qkv = norm_heads(forward, std::move(qkv));
  Var o = forward.cache != nullptr
              ? Var(cached_self_attention(forward, layer_, qkv.take(), options))
              : context_attention(forward.exec, forward.context, input.part, std::move(qkv), options);
  return proj_.forward(forward, o);
}

}  // namespace tessera::nn
