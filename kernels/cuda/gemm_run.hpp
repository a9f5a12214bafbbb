#pragma once
/// A product by a library that may refuse: what it would fuse becomes passes of their own. Header only and
/// free of CUDA, so that the emulator's stand-in for the library takes the same way.

#include <string>
#include <vector>

#include "kernels/cuda/gemm_finish.hpp"
#include "kernels/cuda/gemm_plan.hpp"
#include "kernels/cuda/gemm_sums.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {

/// `run(product)`: whether it was computed; false leaves everything as it was. Errors: DeviceError if not
/// even the plain product is.
template <typename Run>
void run_gemm(const Gemm& g, const Launch& launch, const Run& run) {
  Fused fused = choose_fused(g);
  if (!fused.any() || !run(product_of(g, fused))) {
    fused = {};
    const Product plain = product_of(g, fused);
    TESSERA_ENSURE(DeviceError, run(plain), "cuBLASLt offers no algorithm for a ", describe_product(plain));
  }
  if (needs_finish(g, fused)) gemm_finish(finish_of(g, fused), launch);
  finish_sums(g, fused, launch);
}

/// What is said, once for such products, of a refusal.
inline std::string refusal_note(const Product& p, const std::string& why) {
  return tessera::detail::concat("cuBLASLt offered an algorithm for a ", describe_product(p),
                                 " and refused it when it was to run: ", why,
                                 p.fused.any() ? ". Passes of their own do what it would have fused"
                                               : ". Another of its algorithms is taken");
}

}  // namespace tessera::kernels::cuda
