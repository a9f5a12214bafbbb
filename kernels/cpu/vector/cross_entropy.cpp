#include "kernels/cpu/vector/cross_entropy.hpp"

#include <type_traits>

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

/// Columns that are read for their maximum and then, out of the first-level cache, for their sum.
static constexpr std::int64_t kBlock = 2048;

/// log sum exp = top + log_sum. Apart, because their difference to a large logit would lose log_sum.
struct LogSumExp {
  double top, log_sum;
};

/// One row, read from memory once: the sum so far is rescaled when a block raises the maximum.
template <typename T>
static LogSumExp log_sum_exp(const T* x, std::int64_t n) {
  const F lowest = splat(-__builtin_inff());
  float top = -__builtin_inff();
  double total = 0.0;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = begin + kBlock < n ? begin + kBlock : n;
    F tops[4] = {lowest, lowest, lowest, lowest};
    for_lanes_in_fours(begin, end, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      if constexpr (std::is_same_v<decltype(lanes), Whole>) {
        tops[slot] = max(tops[slot], load(x + i));
      } else {
        tops[slot] = max(tops[slot], load_n(x + i, lanes.n, -__builtin_inff()));
      }
    });
    const float block_top = max_lane(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    if (block_top > top) {
      if (total != 0.0) total *= __builtin_exp(static_cast<double>(top) - static_cast<double>(block_top));
      top = block_top;
    }
    // While every logit is -inf, exp(x - 0) gives the zeros that exp(x - top) would not.
    const F shift = splat(top == -__builtin_inff() ? 0.0f : top);
    F sums[4] = {};
    for_lanes_in_fours(begin, end, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      sums[slot] += keep(exp(load(x + i, lanes) - shift), lanes);
    });
    total += static_cast<double>(sum(sums));
  }
  return {static_cast<double>(top), __builtin_log(total)};
}

template <typename T>
static void forward_rows(const CrossEntropyForward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(p.logits) + r * p.ld;
    const auto [top, log_sum] = log_sum_exp(x, p.cols);
    const std::int32_t label = p.labels[r];
    p.lse[r] = static_cast<float>(top + log_sum);
    const std::int64_t column = label - p.vocab_begin;
    if (label == kIgnoredLabel) {
      p.loss[r] = 0.0f;
    } else if (column < 0 || column >= p.cols) {
      p.loss[r] = __builtin_inff();
    } else {
      p.loss[r] = static_cast<float>(top - static_cast<double>(static_cast<float>(x[column])) + log_sum);
    }
  }
}

template <typename T>
static void backward_rows(const CrossEntropyBackward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    T* x = static_cast<T*>(p.logits) + r * p.ld;
    const std::int32_t label = p.labels[r];
    if (label == kIgnoredLabel) {
      for_lanes(0, p.ld, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(x + i, F{}, lanes); });
      continue;
    }
    const float lse = p.lse[r], upstream = p.upstream[r];
    const std::int64_t column = label - p.vocab_begin;
    const bool here = column >= 0 && column < p.cols;
    // expm1, because e^(x - lse) - 1 cancels where the model is right.
    const float at_label = here ? upstream * __builtin_expm1f(static_cast<float>(x[column]) - lse) : 0.0f;
    const F shift = splat(lse), factor = splat(upstream);
    for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(x + i, factor * exp(load(x + i, lanes) - shift), lanes);
    });
    if (here) x[column] = static_cast<T>(at_label);
    for_lanes(p.cols, p.ld, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(x + i, F{}, lanes); });
  }
}

void cross_entropy_forward_rows(const CrossEntropyForward& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { forward_rows<decltype(t)>(params, begin, end); });
}

void cross_entropy_backward_rows(const CrossEntropyBackward& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { backward_rows<decltype(t)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
