#pragma once
#include "kernels/api/optimizer.hpp"
#include "kernels/cpu/isa.hpp"

namespace tessera::kernels::cpu {

/// The constants of an Adam step, folded in double and rounded once.
struct AdamFactors {
  float decay;          ///< main *= decay
  float l2;             ///< g += l2 main
  float blend1;         ///< 1 - beta1
  float beta2, blend2;  ///< beta2, 1 - beta2
  float step;           ///< lr / correction1
  float root;           ///< 1 / sqrt(correction2)
};

}  // namespace tessera::kernels::cpu

/// Elements [begin, end) of an update.
TESSERA_EACH_ISA(void adam_range(const Adam& params, const AdamFactors& factors, std::int64_t begin,
                                 std::int64_t end);
                 void sgd_range(const Sgd& params, std::int64_t begin, std::int64_t end);)
