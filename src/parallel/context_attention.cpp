#include "autograd/packed_heads.hpp"
#include "parallel/context_exchange.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// How a run of this rank's queries looks at the keys of whole samples.
struct Stretch {
  SequencePart::Run queries;
  std::int64_t keys = 0;  ///< the first so many
  ops::AttentionOptions options;
};

std::vector<Stretch> stretches_of(const SequencePart& part, const ops::AttentionOptions& options) {
  // Keys that no query sees are left out where nothing else counts them.
  const bool cut = options.causal && !options.document && !options.key_begin && !options.key_end;
  std::vector<Stretch> list;
  for (const SequencePart::Run& run : part.runs()) {
    list.push_back({run, cut ? run.whole + run.count : part.length, options});
    list.back().options.query_offset = run.whole;
    list.back().options.seq_length = part.length;
  }
  return list;
}

/// Keys and values of a packed qkv, as one kv.
Tensor own_kv(const ExecCtx& ctx, const Tensor& qkv, const SelfAttentionOptions& o) {
  const std::int64_t width = 2 * o.kv_heads * o.head_dim;
  return ops::contiguous(ctx, qkv.narrow(2, o.heads * o.head_dim, width));
}

/// Of queries, keys and values in a packed qkv.
std::vector<std::int64_t> widths_of(const SelfAttentionOptions& o) {
  return {o.heads * o.head_dim, o.kv_heads * o.head_dim, o.kv_heads * o.head_dim};
}

class ContextAttention final : public Function {
 public:
  ContextAttention(const ContextParallel& context, const SequencePart& part, Tensor qkv,
                   std::vector<ops::AttentionResult> results, SelfAttentionOptions options)
      : context_(context),
        part_(part),
        qkv_(std::move(qkv)),
        results_(std::move(results)),
        options_(std::move(options)) {}
  const char* name() const override { return "context_attention"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor d_o = detail::by_head(grads[0], options_.heads, options_.head_dim);
    Tensor dqkv = Tensor::empty(ctx, qkv_.shape(), qkv_.dtype());
    const detail::Heads value = detail::split_qkv(qkv_, options_), grad = detail::split_qkv(dqkv, options_);
    const Tensor kv = gather_context(ctx, context_, part_, own_kv(ctx, qkv_, options_));
    const Tensor dkv = Tensor::empty(ctx, kv.shape(), kv.dtype());
    const auto stretches = stretches_of(part_, options_.attention);
    // The last stretch sees the most keys: what the others find is added.
    for (std::size_t i = stretches.size(); i-- > 0;) {
      const auto& [queries, keys, options] = stretches[i];
      const bool first = i + 1 == stretches.size();
      const Tensor own =
          first ? dkv.narrow(0, 0, keys) : Tensor::empty(ctx, {keys, kv.size(1), kv.size(2)}, kv.dtype());
      const auto [k, v] = detail::split_kv(kv.narrow(0, 0, keys), options_);
      const auto [dk, dv] = detail::split_kv(own, options_);
      ops::attention_backward(ctx, value.q.narrow(0, queries.held, queries.count), k, v, results_[i],
                              d_o.narrow(0, queries.held, queries.count), options,
                              {grad.q.narrow(0, queries.held, queries.count), dk, dv});
      if (!first) ops::axpby(ctx, 1.0f, own, 1.0f, dkv.narrow(0, 0, keys));
      if (first && keys < part_.length) ops::fill_zero(ctx, dkv.narrow(0, keys, part_.length - keys));
    }
    const Tensor sum = reduce_scatter_context(ctx, context_, part_, dkv);
    ops::copy(ctx, sum, dqkv.narrow(2, options_.heads * options_.head_dim, sum.size(2)));
    detail::rotate(ctx, dqkv, options_, true);
    return {std::move(dqkv)};
  }

 private:
  ContextParallel context_;
  SequencePart part_;
  Tensor qkv_;  // after rotation
  std::vector<ops::AttentionResult> results_;
  SelfAttentionOptions options_;
};

/// Queries and keys turned, positions exchanged for heads.
class ForHeads final : public Function {
 public:
  ForHeads(const ContextParallel& context, const SequencePart& part, const SelfAttentionOptions& options)
      : context_(context), part_(part), options_(options) {}
  const char* name() const override { return "context_heads"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dqkv = detail::exchange_for_positions(ctx, context_, part_, grads[0], widths_of(options_));
    detail::rotate(ctx, dqkv, options_, true);
    return {std::move(dqkv)};
  }

 private:
  ContextParallel context_;
  SequencePart part_;
  SelfAttentionOptions options_;
};

/// And back.
class ForPositions final : public Function {
 public:
  ForPositions(const ContextParallel& context, const SequencePart& part, std::int64_t width)
      : context_(context), part_(part), width_(width) {}
  const char* name() const override { return "context_positions"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {detail::exchange_for_heads(ctx, context_, part_, grads[0], {width_})};
  }

 private:
  ContextParallel context_;
  SequencePart part_;
  std::int64_t width_;
};

/// Of the heads that a rank gets: they were turned before they were sent.
SelfAttentionOptions own_heads(const SequencePart& part, SelfAttentionOptions options) {
  ops::AttentionOptions& attention = options.attention;
  if (attention.total_heads == 0) attention.total_heads = options.heads;
  options.heads /= part.ranks;
  options.kv_heads /= part.ranks;
  options.rope = nullptr;
  options.positions = {};
  const std::int64_t first = part.rank * options.heads;
  attention.head0 += first;
  if (attention.alibi_slopes) attention.alibi_slopes = attention.alibi_slopes.narrow(0, first, options.heads);
  return options;
}

Var attention_by_heads(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part, Var qkv,
                       const SelfAttentionOptions& options) {
  Tensor value = detail::take_rotated(ctx, qkv, options);
  Tensor heads = detail::exchange_for_heads(ctx, context, part, value, widths_of(options));
  value = {};
  Var exchanged =
      record({qkv}, std::move(heads), [&] { return std::make_unique<ForHeads>(context, part, options); });
  const Var o = self_attention(ctx, std::move(exchanged), own_heads(part, options));
  const std::int64_t width = options.heads * options.head_dim;
  return record({o}, detail::exchange_for_positions(ctx, context, part, o.value(), {width}),
                [&] { return std::make_unique<ForPositions>(context, part, width); });
}

/// Whether heads are exchanged. A step sends, for each position and rank, (n - 1) x 3 x 2 kv_heads where keys
/// and values are gathered, and (n - 1) / n x 2 x (2 heads + 2 kv_heads) where heads are exchanged.
bool by_heads(const ContextParallel& context, const SelfAttentionOptions& o) {
  const int n = context.size();
  const bool shared = o.kv_heads % n == 0;
  TESSERA_CHECK(shared || context.method != ContextMethod::ulysses, n, " context ranks do not divide the ",
                o.kv_heads, " key-value heads, which parallel.context_method ulysses needs");
  if (context.method != ContextMethod::automatic) return context.method == ContextMethod::ulysses;
  return shared && 2 * (o.heads + o.kv_heads) < 3 * n * o.kv_heads;
}

}  // namespace

Var context_attention(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part, Var qkv,
                      const SelfAttentionOptions& options) {
  if (!context.active()) return self_attention(ctx, std::move(qkv), options);
  TESSERA_CHECK(!options.attention.bias, "context ranks take no bias by distance");
  if (by_heads(context, options)) return attention_by_heads(ctx, context, part, std::move(qkv), options);
  Tensor value = detail::take_rotated(ctx, qkv, options);
  const detail::Heads heads = detail::split_qkv(value, options);
  const Tensor kv = gather_context(ctx, context, part, own_kv(ctx, value, options));
  Tensor o =
      Tensor::empty(ctx, {value.size(0), value.size(1), options.heads * options.head_dim}, value.dtype());
  const Tensor o_heads = detail::by_head(o, options.heads, options.head_dim);
  std::vector<ops::AttentionResult> results;
  for (const auto& [queries, keys, attention] : stretches_of(part, options.attention)) {
    const auto [k, v] = detail::split_kv(kv.narrow(0, 0, keys), options);
    results.push_back(ops::attention(ctx, heads.q.narrow(0, queries.held, queries.count), k, v, attention,
                                     o_heads.narrow(0, queries.held, queries.count)));
  }
  return record({qkv}, std::move(o), [&] {
    return std::make_unique<ContextAttention>(context, part, std::move(value), std::move(results), options);
  });
}

}  // namespace tessera
