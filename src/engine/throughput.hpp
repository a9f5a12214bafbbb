#pragma once
#include "tessera/base/dtype.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {

/// FLOPs per second of a large square matrix product on this machine now, the best of a few: what MFU is
/// relative to.
double measure_gemm_rate(const ExecCtx& ctx, DType dtype);

}  // namespace tessera
