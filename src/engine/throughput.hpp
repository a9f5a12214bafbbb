#pragma once
#include "tessera/base/dtype.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {

/// FLOPs per second of a large square matrix product on this machine now, the best of a few.
double measure_gemm_rate(const ExecCtx& ctx, DType dtype);

/// Bytes read and written per second by a copy that is larger than caches, the best of a few.
double measure_copy_rate(const ExecCtx& ctx);

}  // namespace tessera
