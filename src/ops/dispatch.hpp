#pragma once
/// The one switch between devices: an op fills a kernel's parameter struct and launches it here.

#include "kernels/api/launch.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera::ops::detail {

template <typename Params>
using Launcher = void (*)(const Params&, const kernels::Launch&);

template <typename Params>
void dispatch(const ExecCtx& ctx, Launcher<Params> cpu, Launcher<Params> cuda, const Params& params) {
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
                                   params)
