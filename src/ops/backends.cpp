#include "tessera/ops/backends.hpp"

#include "kernels/api/backends.hpp"
#include "kernels/api/shared_cores.hpp"
#include "kernels/cuda/gemm_tuner.hpp"

namespace tessera::ops {

std::vector<std::pair<std::string, std::string>> describe_backends() {
  auto list = kernels::cpu::describe();
  const auto cuda = kernels::cuda::describe();
  list.insert(list.end(), cuda.begin(), cuda.end());
  return list;
}

std::shared_ptr<GemmTuner> make_gemm_tuner(bool tune, const std::string& cache_path,
                                           const std::vector<std::string>& tables) {
  return std::make_shared<GemmTuner>(
      kernels::GemmTuning{.tune = tune, .cache_path = cache_path, .tables = tables});
}

void prepare_stream(const ExecCtx& ctx) {
  if (!ctx.device().is_cuda()) return;
  ctx.stream->make_current();
  kernels::cuda::prepare_stream(ctx.stream->native());
}

void write_time(const ExecCtx& ctx, const Tensor& to) {
  TESSERA_CHECK_EQ(to.numel(), 1, "elements that a time is written to");
  ctx.stream->make_current();
  kernels::cuda::write_time(to.data<std::int64_t>(), ctx.stream->native());
}

void forget_stream(const ExecCtx& ctx) noexcept {
  if (!ctx.device().is_cuda()) return;
  try {
    ctx.stream->make_current();
  } catch (const std::exception&) {
    return;  // the device has failed: there is nothing to give back
  }
  kernels::cuda::forget_stream(ctx.stream->native());
}

std::shared_ptr<SharedCores> watch_cores() { return std::make_shared<SharedCores>(); }

std::string take_backend_notes(const ExecCtx& ctx) {
  const std::string gemm = ctx.gemm_tuner ? ctx.gemm_tuner->notes().take() : kernels::cuda::take_gemm_note();
  const std::string attention = kernels::cuda::take_attention_note();
  return gemm + (gemm.empty() || attention.empty() ? "" : "\n") + attention;
}

}  // namespace tessera::ops
