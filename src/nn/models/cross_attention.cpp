#include "nn/models/cross_attention.hpp"

#include <algorithm>

#include "nn/cached_attention.hpp"

namespace tessera::nn {

void set_attention_dropout(const Forward& f, const ModelConfig& config, const HeadShare& heads,
                           const std::string& module, std::int64_t length, ops::AttentionOptions& options) {
  if (!f.training || config.attention_dropout <= 0.0) return;
  options.dropout = static_cast<float>(config.attention_dropout);
  options.dropout_key = f.random(module + ".probabilities");
  options.sample0 = f.input.sample0;
  options.head0 = heads.first;
  options.total_heads = config.num_heads;
  options.seq_length = length;
}

Block::CacheShape two_stack_cache(const ModelConfig& config, const TensorParallel& tensor) {
  return {
      .kv_heads = head_share(config, tensor).kv_heads, .head_dim = config.head_dim, .reads_encoder = true};
}

CrossAttention::CrossAttention(std::string name, const ModelConfig& config, const TensorParallel& tensor,
                               const Options& options)
    : Module(std::move(name)),
      config_(config),
      heads_(head_share(config, tensor)),
      layer_(options.layer),
      scale_(options.scale),
      q_(submodule<Linear>("linear_q", Linear::Options{.in = config.hidden_size,
                                                       .out = config.num_heads * config.head_dim,
                                                       .bias = options.bias,
                                                       .std = options.query_std,
                                                       .tensor = tensor,
                                                       .split = Linear::Split::column})),
      kv_(submodule<Linear>("linear_kv", Linear::Options{.in = config.hidden_size,
                                                         .out = 2 * config.num_kv_heads * config.head_dim,
                                                         .bias = options.bias,
                                                         .std = options.kv_std,
                                                         .tensor = tensor,
                                                         .split = Linear::Split::column,
                                                         .rows = kv_rows()})),
      proj_(submodule<Linear>("linear_proj", Linear::Options{.in = config.num_heads * config.head_dim,
                                                             .out = config.hidden_size,
                                                             .bias = options.proj_bias,
                                                             .std = options.proj_std,
                                                             .tensor = tensor,
                                                             .split = Linear::Split::row})) {}

Var CrossAttention::forward(const Forward& f, const Var& x, const Var& memory) {
  SelfAttentionOptions options{heads_.heads, heads_.kv_heads, config_.head_dim, {}, nullptr, {}};
  options.attention.scale = scale_;
  options.attention.causal = false;
  if (f.cache != nullptr) {
    const Tensor q = q_.forward(f, x).value();
    const Tensor kv = memory ? kv_.forward(f, memory).value() : Tensor();
    return proj_.forward(f, cached_cross_attention(f, layer_, q, kv, options));
  }
  const MicroBatch& read = *f.input.encoder;
  options.attention.key_begin = read.key_begin;
  options.attention.key_end = read.key_end;
  set_attention_dropout(f, config_, heads_, name(), std::max(read.seq_length, f.input.seq_length),
                        options.attention);
  const Var q = q_.forward(f, x);
  return proj_.forward(f, cross_attention(f.exec, q, kv_.forward(f, memory), options));
}

std::vector<Segment> CrossAttention::kv_rows() const {
  std::vector<Segment> rows = qkv_rows(config_, heads_);
  rows.erase(rows.begin());
  const std::int64_t local = rows[0].local, global = config_.num_heads * config_.head_dim;
  for (Segment& each : rows) each.local -= local, each.global -= global;
  return rows;
}

}  // namespace tessera::nn
