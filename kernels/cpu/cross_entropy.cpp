#include "kernels/cpu/vector/cross_entropy.hpp"

#include <algorithm>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, 4096 / std::max<std::int64_t>(1, cols));
}

}  // namespace

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
