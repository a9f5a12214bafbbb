#include "parallel/context_exchange.hpp"

#include <numeric>

#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// Where chunks of whole samples stand among those of all ranks, rank by rank, as collectives have them.
template <typename Visit>
void for_each_chunk(const SequencePart& part, const Tensor& by_rank, const Tensor& whole, Visit&& visit) {
  for (int rank = 0; rank < part.ranks; ++rank) {
    for (const auto& run : part.runs(rank))
      visit(by_rank.narrow(0, rank * part.held() + run.held, run.count),
            whole.narrow(0, run.whole, run.count));
  }
}

Tensor in_order(const ExecCtx& ctx, const SequencePart& part, const Tensor& by_rank) {
  Tensor whole = Tensor::empty(ctx, by_rank.shape(), by_rank.dtype());
  for_each_chunk(part, by_rank, whole,
                 [&](const Tensor& from, const Tensor& to) { ops::copy(ctx, from, to); });
  return whole;
}

Tensor rank_by_rank(const ExecCtx& ctx, const SequencePart& part, const Tensor& whole) {
  Tensor by_rank = Tensor::empty(ctx, whole.shape(), whole.dtype());
  for_each_chunk(part, by_rank, whole,
                 [&](const Tensor& to, const Tensor& from) { ops::copy(ctx, from, to); });
  return by_rank;
}

/// Where each rank's heads stand among all, [held, batch, heads], and in blocks of [held, batch, own heads],
/// one for each rank.
template <typename Visit>
void for_each_share(const SequencePart& part, const Tensor& all, const Tensor& blocks,
                    const std::vector<std::int64_t>& widths, Visit&& visit) {
  for (int rank = 0; rank < part.ranks; ++rank) {
    const Tensor block = blocks.narrow(0, rank * part.held(), part.held());
    std::int64_t begin = 0, own_begin = 0;
    for (const std::int64_t width : widths) {
      const std::int64_t own = width / part.ranks;
      visit(all.narrow(2, begin + rank * own, own), block.narrow(2, own_begin, own));
      begin += width;
      own_begin += own;
    }
  }
}

/// One block to each rank, one from each.
Tensor exchange(const ExecCtx& ctx, const ContextParallel& context, const Tensor& blocks) {
  Tensor received = Tensor::empty(ctx, blocks.shape(), blocks.dtype());
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(context.size()),
                                         blocks.numel() / context.size());
  context.comm->all_to_all(ctx, blocks, received, counts, counts).wait(ctx);
  return received;
}

std::int64_t sum_of(const std::vector<std::int64_t>& widths) {
  return std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
}

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
  return in_order(ctx, part, by_rank);
}

Tensor reduce_scatter_context(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                              const Tensor& x) {
  if (!context.active()) return x;
  const Tensor by_rank = rank_by_rank(ctx, part, x);
  Shape shape = x.shape();
  shape[0] = part.held();
  Tensor own = Tensor::empty(ctx, shape, x.dtype());
  context.comm->reduce_scatter(ctx, by_rank, own).wait(ctx);
  return own;
}

Tensor detail::exchange_for_heads(const ExecCtx& ctx, const ContextParallel& context,
                                  const SequencePart& part, const Tensor& x,
                                  const std::vector<std::int64_t>& widths) {
  TESSERA_CHECK(x.rank() == 3 && x.size(0) == part.held() && x.size(2) == sum_of(widths),
                "a context rank's heads of shape ", x.shape(), ", ", part.held(), " positions are held");
  const Tensor blocks = Tensor::empty(ctx, {part.length, x.size(1), x.size(2) / part.ranks}, x.dtype());
  for_each_share(part, x, blocks, widths,
                 [&](const Tensor& from, const Tensor& to) { ops::copy(ctx, from, to); });
  return in_order(ctx, part, exchange(ctx, context, blocks));
}

Tensor detail::exchange_for_positions(const ExecCtx& ctx, const ContextParallel& context,
                                      const SequencePart& part, const Tensor& x,
                                      const std::vector<std::int64_t>& widths) {
  TESSERA_CHECK(x.rank() == 3 && x.size(0) == part.length && x.size(2) * part.ranks == sum_of(widths),
                "own heads of shape ", x.shape(), " for ", part.length, " positions");
  const Tensor blocks = exchange(ctx, context, rank_by_rank(ctx, part, x));
  Tensor all = Tensor::empty(ctx, {part.held(), x.size(1), sum_of(widths)}, x.dtype());
  for_each_share(part, all, blocks, widths,
                 [&](const Tensor& to, const Tensor& from) { ops::copy(ctx, from, to); });
  return all;
}

}  // namespace tessera
