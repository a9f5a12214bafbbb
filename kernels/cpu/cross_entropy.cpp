#include "kernels/cpu/vector/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, 4096 / std::max<std::int64_t>(1, cols));
}

constexpr float kElsewhere = std::numeric_limits<float>::infinity();

void combine_row(const CrossEntropyCombine& p, std::int64_t r) {
  const auto loss = [&](std::int64_t part) { return p.partial[2 * part * p.rows + r]; };
  const auto lse = [&](std::int64_t part) {
    return static_cast<double>(p.partial[(2 * part + 1) * p.rows + r]);
  };
  double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
  std::int64_t owner = -1;
  for (std::int64_t part = 0; part < p.parts; ++part) {
    top = std::max(top, lse(part));
    if (loss(part) != kElsewhere) owner = part;  // so a NaN is handed on
  }
  for (std::int64_t part = 0; part < p.parts; ++part) sum += std::exp(lse(part) - top);
  const double log_sum = std::log(sum);
  p.lse[r] = static_cast<float>(top + log_sum);
  if (p.labels[r] == kIgnoredLabel) {
    p.loss[r] = 0.0f;
  } else if (owner < 0) {
    p.loss[r] = kElsewhere;
  } else {
    // Small terms are added to the owner's loss, however large the logits are: nothing cancels.
    p.loss[r] = static_cast<float>(static_cast<double>(loss(owner)) + ((top - lse(owner)) + log_sum));
  }
}

}  // namespace

void cross_entropy_combine(const CrossEntropyCombine& params, const Launch& launch) {
  parallel_for(launch.threads, params.rows, 256, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) combine_row(params, r);
  });
}

void cross_entropy_forward(const CrossEntropyForward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(cross_entropy_forward_rows);
  parallel_for(launch.threads, params.rows, row_grain(params.cols),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void cross_entropy_backward(const CrossEntropyBackward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(cross_entropy_backward_rows);
  parallel_for(launch.threads, params.rows, row_grain(params.cols),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
