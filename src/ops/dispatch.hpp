#pragma once
/// The one switch between devices: an op fills a kernel's parameter struct and launches it here.

#include "kernels/api/launch.hpp"
#include "ops/work.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera::ops::detail {

template <typename Params>
using Launcher = void (*)(const Params&, const kernels::Launch&);

template <typename Params>
void dispatch(const ExecCtx& ctx, Launcher<Params> cpu, Launcher<Params> cuda, const char* name,
              const Params& params) {
  const TraceSpan span(*ctx.stream, [&] {
    Work work = work_of(params);
    if (work.name.empty()) work.name = name;
    return work;
  });
  if (ctx.device().is_cpu()) {
    ctx.stream->launch([cpu, params, threads = ctx.stream->threads()] { cpu(params, {nullptr, threads}); });
  } else {
    ctx.stream->make_current();
    cuda(params, {ctx.stream->native(), 1});
  }
}

}  // namespace tessera::ops::detail

#define TESSERA_DISPATCH(ctx, name, params)                                                              \
  ::tessera::ops::detail::dispatch(ctx, &::tessera::kernels::cpu::name, &::tessera::kernels::cuda::name, \
                                   #name, params)
