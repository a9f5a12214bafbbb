#include "kernels/cpu/vector/optimizer.hpp"

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread

}  // namespace

void begin_update(const BeginUpdate& params, const Launch&) { params.run(); }

void adam(const Adam& params, const Launch& launch) {
  if (params.state->skip != 0) return;
  const AdamFactors factors = AdamFactors::of(params);
  auto* range = TESSERA_PICK(adam_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, factors, begin, end); });
}

void sgd(const Sgd& params, const Launch& launch) {
  if (params.state->skip != 0) return;
  auto* range = TESSERA_PICK(sgd_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
