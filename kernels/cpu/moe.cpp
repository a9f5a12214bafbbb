#include "kernels/cpu/vector/moe.hpp"

#include <algorithm>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/scratch.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Rows worth a thread's while.
std::int64_t grain_of(std::int64_t cols) {
  return std::max<std::int64_t>(1, 4096 / std::max<std::int64_t>(1, cols));
}

}  // namespace

void route_forward(const RouteForward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(route_forward_rows);
  parallel_for(launch.threads, params.tokens, grain_of(params.experts),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void route_backward(const RouteBackward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(route_backward_rows);
  parallel_for(launch.threads, params.tokens, grain_of(params.experts),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void route_sums(const RouteSums& params, const Launch& launch) {
  auto* columns = TESSERA_PICK(route_sums_columns);
  // Threads share out samples and experts, never positions: each sum has one thread.
  const std::int64_t strips = (params.experts + kRouteColumns - 1) / kRouteColumns;
  parallel_for(launch.threads, params.batch * strips, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % strips * kRouteColumns;
      columns(params, i / strips, first, std::min(first + kRouteColumns, params.experts));
    }
  });
}

void balance_forward(const BalanceForward& p, const Launch&) {
  for (std::int64_t sample = 0; sample < p.batch; ++sample) {
    const std::int64_t first = sample * p.experts;
    double choices = 0.0, value = 0.0;
    for (std::int64_t e = 0; e < p.experts; ++e) choices += static_cast<double>(p.chosen[first + e]);
    const double scale = static_cast<double>(p.experts * p.topk) / (choices * choices);
    for (std::int64_t e = 0; e < p.experts; ++e) {
      const float factor =
          choices == 0.0 ? 0.0f : static_cast<float>(scale * static_cast<double>(p.chosen[first + e]));
      p.factor[first + e] = factor;
      value += static_cast<double>(factor) * static_cast<double>(p.probability[first + e]);
    }
    p.value[sample] = choices == 0.0 ? 0.0f : static_cast<float>(value);
  }
}

void sort_slots(const SortSlots& p, const Launch&) {
  const Scratch scratch(static_cast<std::size_t>(p.experts) * sizeof(std::int32_t));
  auto* const next = scratch.as<std::int32_t>();  // the place of an expert's next slot
  std::fill_n(p.count, p.experts, 0);
  for (std::int64_t i = 0; i < p.slots; ++i) ++p.count[p.expert[i]];
  std::int32_t begin = 0;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    next[e] = begin;
    begin += p.count[e];
  }
  for (std::int64_t i = 0; i < p.slots; ++i) {
    const std::int32_t place = next[p.expert[i]]++;
    p.row[i] = place;
    p.slot[place] = static_cast<std::int32_t>(i);
    p.token[place] = static_cast<std::int32_t>(i / p.topk);
  }
}

void combine_slots(const CombineSlots& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(combine_slots_rows);
  parallel_for(launch.threads, params.tokens, grain_of(params.cols),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void weigh_rows(const WeighRows& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(weigh_rows_rows);
  parallel_for(launch.threads, params.rows, grain_of(params.cols),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
