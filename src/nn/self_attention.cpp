#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/nn/layers.hpp"
#include "tessera/ops/elementwise.hpp"

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
                          *config.qkv_bias, config.init_std, tensor, Linear::Split::column,
                          qkv_rows(config, heads_)})),
      proj_(submodule<Linear>(
          "linear_proj",
          Linear::Options{config.num_heads * config.head_dim,
                          config.hidden_size,
                          config.proj_bias.value_or(*config.linear_bias),
                          config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers)),
                          tensor,
                          Linear::Split::row,
                          {}})) {
  if (*config.qk_norm == QkNorm::none) return;
  const Init init = *config.norm_zero_centered ? Init::zeros() : Init::ones();
  if (*config.qk_norm == QkNorm::full) {
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
                                .zero_centered = *config_.norm_zero_centered};
  if (*config_.qk_norm == QkNorm::full) return full_head_norm(forward.exec, tensor_, std::move(qkv), options);
  return head_norm(forward.exec, std::move(qkv), options);
}

Var SelfAttention::forward(const Forward& forward, const Var& x, const ops::RopeTable* rope,
                           const Tensor& alibi_slopes) {
  const MicroBatch& input = forward.input;
  SelfAttentionOptions options{heads_.heads, heads_.kv_heads, config_.head_dim, {}, rope, input.positions};
  if (alibi_slopes) options.attention.alibi_slopes = alibi_slopes.narrow(0, heads_.first, heads_.heads);
  options.attention.causal = causal_;
  options.attention.window = window_of(config_, layer_);
  options.attention.softcap = static_cast<float>(*config_.attention_softcap);
  options.attention.scale = static_cast<float>(config_.attention_scale.value_or(0.0));
  options.attention.key_begin = input.key_begin;
  options.attention.key_end = input.key_end;
  options.attention.document = input.document;
  if (forward.training && config_.attention_dropout > 0.0) {
    options.attention.dropout = static_cast<float>(config_.attention_dropout);
    options.attention.dropout_key = {forward.exec.seed, site_of(name() + ".probabilities"), forward.step};
    options.attention.sample0 = input.sample0;
    options.attention.head0 = heads_.first;
    options.attention.total_heads = config_.num_heads;
    options.attention.seq_length = input.seq_length;
  }
  Var qkv = qkv_.forward(forward, x);
  if (query_norm_ != nullptr) qkv = norm_heads(forward, std::move(qkv));
  Var o = forward.cache != nullptr ? attend_cached(forward, std::move(qkv), options)
                                   : self_attention(forward.exec, std::move(qkv), options);
  return proj_.forward(forward, o);
}

namespace {

/// [rows, kv_heads, capacity, head_dim] as [positions, rows, kv_heads, head_dim] of a pass's rows.
Tensor rows_of(const Tensor& kept, const CachePass& pass, std::int64_t batch) {
  return kept.narrow(0, pass.row0, batch).transpose(1, 2).transpose(0, 1);
}

/// Writes the new positions [seq, batch, kv_heads, head_dim] behind those that each row has.
void append(const ExecCtx& ctx, const CachePass& pass, const Tensor& fresh, const Tensor& kept) {
  const std::int64_t seq = fresh.size(0), batch = fresh.size(1);
  if (pass.lengths.empty()) return ops::copy(ctx, fresh, kept.narrow(0, pass.begin, seq));
  for (std::int64_t row = 0; row < batch;) {
    const std::int64_t length = pass.lengths[static_cast<std::size_t>(row)];
    std::int64_t end = row + 1;
    while (end < batch && pass.lengths[static_cast<std::size_t>(end)] == length) ++end;
    ops::copy(ctx, fresh.narrow(1, row, end - row), kept.narrow(0, length - 1, 1).narrow(1, row, end - row));
    row = end;
  }
}

/// Single queries at places of their own: what each sees is a range of keys.
void see_own_keys(const ExecCtx& ctx, const CachePass& pass, ops::AttentionOptions& attention) {
  attention.causal = false;
  attention.query_offset = pass.longest - 1;  // biases by distance change by one number for all keys of a row
  attention.key_end = pass.key_end;
  const std::int64_t window = std::exchange(attention.window, 0);
  if (window == 0 || window >= pass.longest) return;
  Tensor& begin = pass.key_begin[window];
  if (!begin) {
    std::vector<std::int32_t> first;
    for (const std::int64_t length : pass.lengths)
      first.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(0, length - window)));
    begin = Tensor::from(ctx, first, {static_cast<std::int64_t>(first.size())});
  }
  attention.key_begin = begin;
}

}  // namespace

Var SelfAttention::attend_cached(const Forward& forward, Var qkv_var, const SelfAttentionOptions& options) {
  const ExecCtx& ctx = forward.exec;
  const CachePass& pass = *forward.cache;
  const Tensor qkv = qkv_var.take();
  const std::int64_t seq = qkv.size(0), batch = qkv.size(1), heads = options.heads, kv = options.kv_heads;
  const std::int64_t total = length_of(forward);
  TESSERA_CHECK(total <= pass.cache->capacity && pass.row0 + batch <= pass.cache->rows, "the KV cache holds ",
                pass.cache->capacity, " positions of ", pass.cache->rows, " texts, ", total, " of ",
                pass.row0 + batch, " are needed");
  const Tensor keys = rows_of(pass.cache->key[static_cast<std::size_t>(layer_)], pass, batch);
  const Tensor values = rows_of(pass.cache->value[static_cast<std::size_t>(layer_)], pass, batch);
  const Tensor packed = qkv.view({seq, batch, heads + 2 * kv, options.head_dim});
  if (options.rope != nullptr) {
    ops::rope_in_place(ctx, packed.narrow(2, 0, heads + kv), options.positions, *options.rope, false);
  }
  append(ctx, pass, packed.narrow(2, heads, kv), keys);
  append(ctx, pass, packed.narrow(2, heads + kv, kv), values);
  ops::AttentionOptions attention = options.attention;
  attention.query_offset = pass.begin;
  if (!pass.lengths.empty()) see_own_keys(ctx, pass, attention);
  const auto result = ops::attention(ctx, packed.narrow(2, 0, heads), keys.narrow(0, 0, total),
                                     values.narrow(0, 0, total), attention);
  return result.o.view({seq, batch, heads * options.head_dim});
}

}  // namespace tessera::nn
