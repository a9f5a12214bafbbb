#include <algorithm>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/activation.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread

std::int64_t row_grain(std::int64_t width) { return std::max<std::int64_t>(1, kGrain / width); }

}  // namespace

void activation_forward(const ActivationForward& params, const Launch& launch) {
  auto* range = TESSERA_PICK(activation_forward_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void activation_backward(const ActivationBackward& params, const Launch& launch) {
  auto* range = TESSERA_PICK(activation_backward_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void swiglu_forward(const SwigluForward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(swiglu_forward_rows);
  parallel_for(launch.threads, params.rows, row_grain(params.width),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void swiglu_backward(const SwigluBackward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(swiglu_backward_rows);
  parallel_for(launch.threads, params.rows, row_grain(params.width),
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
