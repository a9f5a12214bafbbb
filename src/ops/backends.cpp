#include "tessera/ops/backends.hpp"

#include "kernels/api/backends.hpp"

namespace tessera::ops {

std::vector<std::pair<std::string, std::string>> describe_backends() {
  auto list = kernels::cpu::describe();
  const auto cuda = kernels::cuda::describe();
  list.insert(list.end(), cuda.begin(), cuda.end());
  return list;
}

void set_gemm_tuning(bool tune, const std::string& cache_path) {
  kernels::cuda::set_gemm_tuning({.tune = tune, .cache_path = cache_path});
}

void set_gemm_tables(const std::vector<std::string>& paths) { kernels::cuda::set_gemm_tables(paths); }

void forget_stream(const ExecCtx& ctx) noexcept {
  if (ctx.device().is_cpu()) return;
  try {
    ctx.stream->make_current();
  } catch (const std::exception&) {
    return;  // the device has failed: there is nothing to give back
  }
  kernels::cuda::forget_stream(ctx.stream->native());
}

std::string take_backend_notes() {
  const std::string gemm = kernels::cuda::take_gemm_note(), attention = kernels::cuda::take_attention_note();
  return gemm + (gemm.empty() || attention.empty() ? "" : "\n") + attention;
}

}  // namespace tessera::ops
