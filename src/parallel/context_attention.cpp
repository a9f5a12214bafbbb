#include "autograd/packed_heads.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/context.hpp"

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

/// Where chunks of whole samples stand among those of all ranks, rank by rank, as collectives have them.
template <typename Visit>
void for_each_chunk(const SequencePart& part, const Tensor& by_rank, const Tensor& whole, Visit&& visit) {
  for (int rank = 0; rank < part.ranks; ++rank) {
    for (const auto& run : part.runs(rank))
      visit(by_rank.narrow(0, rank * part.held() + run.held, run.count),
            whole.narrow(0, run.whole, run.count));
  }
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

}  // namespace

Tensor gather_context(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                      const Tensor& x) {
  if (!context.active()) return x;
  TESSERA_CHECK(x.is_contiguous() && x.size(0) == part.held(), "a context rank's positions of shape ",
                x.shape(), ", ", part.held(), " are held");
  Shape shape = x.shape();
  shape[0] = part.length;
  const Tensor by_rank = Tensor::empty(ctx, shape, x.dtype());
  context.comm->all_gather(ctx, x, by_rank).wait(ctx);
  Tensor whole = Tensor::empty(ctx, shape, x.dtype());
  for_each_chunk(part, by_rank, whole,
                 [&](const Tensor& from, const Tensor& to) { ops::copy(ctx, from, to); });
  return whole;
}

Tensor reduce_scatter_context(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                              const Tensor& x) {
  if (!context.active()) return x;
  const Tensor by_rank = Tensor::empty(ctx, x.shape(), x.dtype());
  for_each_chunk(part, by_rank, x, [&](const Tensor& to, const Tensor& from) { ops::copy(ctx, from, to); });
  Shape shape = x.shape();
  shape[0] = part.held();
  Tensor own = Tensor::empty(ctx, shape, x.dtype());
  context.comm->reduce_scatter(ctx, by_rank, own).wait(ctx);
  return own;
}

Var context_attention(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part, Var qkv,
                      const SelfAttentionOptions& options) {
  if (!context.active()) return self_attention(ctx, std::move(qkv), options);
  TESSERA_CHECK(!options.attention.bias, "context ranks take no bias by distance");
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
