#include <cmath>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/optimizer.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread

}  // namespace

void adam(const Adam& params, const Launch& launch) {
  const double decay = params.lr * params.weight_decay;
  AdamFactors factors{};
  factors.decay = params.decoupled ? static_cast<float>(1.0 - decay) : 1.0f;
  factors.l2 = params.decoupled ? 0.0f : static_cast<float>(params.weight_decay);
  factors.blend1 = static_cast<float>(1.0 - params.beta1);
  factors.beta2 = static_cast<float>(params.beta2);
  factors.blend2 = static_cast<float>(1.0 - params.beta2);
  factors.step = static_cast<float>(params.lr / params.correction1);
  factors.root = static_cast<float>(1.0 / std::sqrt(params.correction2));
  auto* range = TESSERA_PICK(adam_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, factors, begin, end); });
}

void sgd(const Sgd& params, const Launch& launch) {
  auto* range = TESSERA_PICK(sgd_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
