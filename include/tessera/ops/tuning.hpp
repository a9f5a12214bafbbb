#pragma once
/// Which matrix products a step makes, and the search for the fastest way of each (CUDA).

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/device/exec_ctx.hpp"
#include "tessera/device/trace.hpp"

namespace tessera::ops {

/// A matrix product as a step asked for it, without its data.
struct RecordedProduct {
  std::string key;     ///< sizes, dtypes, alignments, what is fused: equal keys are solved alike
  std::string shape;   ///< "8192 x 12288 x 4096, B transposed"
  std::string dtypes;  ///< "bfloat16" or "bfloat16 into float32"
  std::string fused;   ///< "bias, gelu, its input"; begins with "+=" where it adds; may be empty
  double flops = 0;    ///< of one
  std::int64_t count = 0;
  std::shared_ptr<const kernels::Gemm> gemm = {};  ///< Work::product
};

/// The products that a trace recorded, each key once, in the order of first use.
std::vector<RecordedProduct> recorded_products(std::span<const TraceLane> lanes);

/// What the search found; see kernels/api/backends.hpp.
struct ProductTrial {
  bool known = false;
  int candidates = 0;
  double first_s = 0, best_s = 0;
  bool separate = false;
};
/// Searches on random operands in memory of its own, and keeps what is fastest in ctx.gemm_tuner and its
/// file. Errors: ConfigError in a build without CUDA, DeviceError.
ProductTrial tune_product(const ExecCtx& ctx, const RecordedProduct& product);

}  // namespace tessera::ops
