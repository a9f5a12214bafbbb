#include "parallel/expert_exchange.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "parallel/rows_of.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {
namespace {

std::int64_t sum_of(const std::vector<std::int64_t>& counts, std::int64_t first, std::int64_t count) {
  return std::accumulate(counts.begin() + first, counts.begin() + first + count, std::int64_t{0});
}

/// Rows of each expert on each rank, [ranks, experts].
std::vector<std::int64_t> all_counts(const ExecCtx& ctx, Communicator* comm, const ops::SlotOrder& order) {
  const std::int64_t experts = order.count.numel(), ranks = comm ? comm->size() : 1;
  Tensor counts = order.count;
  if (comm != nullptr) {
    counts = Tensor::empty(ctx, {ranks * experts}, DType::i32);
    comm->all_gather(ctx, order.count, counts).wait(ctx);
  }
  std::vector<std::int64_t> list;
  if (ctx.device().is_meta()) {
    for (std::int64_t i = 0; i < ranks * experts; ++i)
      list.push_back(
          part_of(order.row.numel(), static_cast<int>(i % experts), static_cast<int>(experts)).count);
    return list;
  }
  for (const std::int32_t count : HostCopy(ctx, counts).values<std::int32_t>(counts.numel()))
    list.push_back(count);
  return list;
}

}  // namespace

ExpertExchange::ExpertExchange(const ExecCtx& ctx, const ExpertParallel& parallel,
                               const ops::SlotOrder& order, std::int64_t held)
    : comm_(parallel.active() ? parallel.comm : nullptr) {
  const std::int64_t experts = order.count.numel(), ranks = parallel.size();
  const std::vector<std::int64_t> counts = all_counts(ctx, comm_, order);
  if (comm_ == nullptr) {
    counts_ = counts;
    return;
  }
  const auto of = [&](std::int64_t rank, std::int64_t expert) { return rank * experts + expert; };
  const std::int64_t own = parallel.rank() * held;  // first expert held
  for (std::int64_t r = 0; r < ranks; ++r) {
    sent_.push_back(sum_of(counts, of(parallel.rank(), r * held), held));
    received_.push_back(sum_of(counts, of(r, own), held));
  }
  const std::int64_t rows = sum_of(received_, 0, ranks);
  TESSERA_CHECK(rows <= std::numeric_limits<std::int32_t>::max(), rows,
                " rows of tokens for the experts of one rank, more than an int32 can number");
  std::vector<std::int32_t> by_expert, by_rank(static_cast<std::size_t>(rows));
  for (std::int64_t e = own; e < own + held; ++e) {
    const auto before = static_cast<std::int64_t>(by_expert.size());
    std::int64_t first = 0;  // of the rank's rows
    for (std::int64_t r = 0; r < ranks; ++r) {
      const std::int64_t at = first + sum_of(counts, of(r, own), e - own);
      for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(of(r, e))]; ++i) {
        by_rank[static_cast<std::size_t>(at + i)] = static_cast<std::int32_t>(by_expert.size());
        by_expert.push_back(static_cast<std::int32_t>(at + i));
      }
      first += received_[static_cast<std::size_t>(r)];
    }
    counts_.push_back(static_cast<std::int64_t>(by_expert.size()) - before);
  }
  by_expert_ = Tensor::from(ctx, by_expert, {rows});
  by_rank_ = Tensor::from(ctx, by_rank, {rows});
}

Tensor ExpertExchange::exchange(const ExecCtx& ctx, const Tensor& rows, const std::vector<std::int64_t>& sent,
                                const std::vector<std::int64_t>& received) const {
  const std::int64_t width = rows.rank() == 1 ? 1 : rows.size(1);
  const std::int64_t count = sum_of(received, 0, static_cast<std::int64_t>(received.size()));
  Tensor result = Tensor::empty(ctx, rows.rank() == 1 ? Shape{count} : Shape{count, width}, rows.dtype());
  const auto elements = [width](std::vector<std::int64_t> counts) {
    for (std::int64_t& each : counts) each *= width;
    return counts;
  };
  comm_->all_to_all(ctx, rows, result, elements(sent), elements(received)).wait(ctx);
  return result;
}

Tensor ExpertExchange::to_experts(const ExecCtx& ctx, const Tensor& rows) const {
  return travels() ? detail::rows_of(ctx, exchange(ctx, rows, sent_, received_), by_expert_) : rows;
}

Tensor ExpertExchange::to_tokens(const ExecCtx& ctx, const Tensor& rows) const {
  return travels() ? exchange(ctx, detail::rows_of(ctx, rows, by_rank_), received_, sent_) : rows;
}

}  // namespace tessera
