#pragma once
/// The one switch between devices: an op fills a kernel's parameter struct and launches it here.

#include "kernels/api/launch.hpp"
#include "kernels/api/shared_cores.hpp"
#include "ops/work.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/device/flight.hpp"

namespace tessera::ops::detail {

template <typename Params>
using Launcher = void (*)(const Params&, const kernels::Launch&);

/// What a flight recorder keeps of a kernel: its name, and the sizes that its parameters have.
template <typename Params>
FlightOperation operation_of(const char* name, const Params& p) {
  FlightOperation what{.name = name};
  const auto add = [&](std::int64_t n) { what.shape[static_cast<std::size_t>(what.dims++)] = n; };
  if constexpr (requires { p.m, p.n, p.k; }) {
    add(p.m), add(p.n), add(p.k);
  } else if constexpr (requires { p.shape.batch, p.shape.heads, p.shape.seq_q; }) {
    add(p.shape.batch), add(p.shape.heads), add(p.shape.seq_q), add(p.shape.seq_k);
  } else if constexpr (requires { p.rows, p.cols; }) {
    add(p.rows), add(p.cols);
  } else if constexpr (requires { p.n; }) {
    add(p.n);
  }
  return what;
}

/// Work that ends sooner than a thread that others keep waiting: some 100 microseconds on one core.
inline bool is_small(const Work& work) { return work.bytes < 1e6 && work.flops < 4e6; }

/// Threads for a kernel on the CPU.
template <typename Params>
kernels::Launch cpu_launch(const ExecCtx& ctx, const Params& params) {
  const int threads = ctx.stream->threads();
  const bool alone = ctx.cores && ctx.cores->crowded() && is_small(work_of(params));
  return {.threads = alone ? 1 : threads, .gemm_threads = threads};
}

template <typename Params>
void dispatch(const ExecCtx& ctx, Launcher<Params> cpu, Launcher<Params> cuda, const char* name,
              const Params& params) {
  const FlightSpan flight(*ctx.stream, [&] { return operation_of(name, params); });
  const TraceSpan span(*ctx.stream, [&] {
    Work work = work_of(params);
    if (work.name.empty()) work.name = name;
    return work;
  });
  if (ctx.device().is_meta()) return;  // described above, and that was all
  if (ctx.device().is_cpu()) {
    ctx.stream->launch([cpu, params, launch = cpu_launch(ctx, params)] { cpu(params, launch); });
  } else {
    ctx.stream->make_current();
    cuda(params, {.stream = ctx.stream->native(), .gemm_tuner = ctx.gemm_tuner.get()});
  }
}

}  // namespace tessera::ops::detail

#define TESSERA_DISPATCH(ctx, name, params)                                                              \
  ::tessera::ops::detail::dispatch(ctx, &::tessera::kernels::cpu::name, &::tessera::kernels::cuda::name, \
                                   #name, params)
