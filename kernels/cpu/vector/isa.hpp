#pragma once
/// Instruction sets. Every file in kernels/cpu/vector/ is compiled once per set (CMake defines TESSERA_ISA to
/// the namespace and TESSERA_VECTOR_BYTES to the register width); launchers pick one of the copies at run
/// time. On x86-64 the sets are baseline (SSE2), avx2 and avx512; elsewhere there is baseline alone.
///
/// A vector file declares its functions for all sets with TESSERA_EACH_ISA in a header of its own, defines
/// them in `namespace tessera::kernels::cpu::TESSERA_ISA`, and keeps every helper in that namespace: a shared
/// inline function compiled for AVX-512 must never be linked into code that runs on a machine without it. So
/// vector files call nothing from std::, nor visit_float or size_of (vec.hpp has visit_dtype); what is
/// TESSERA_INLINE or VEC_INLINE is safe.

#include <vector>

#if defined(__x86_64__)
#define TESSERA_EACH_ISA(...)                 \
  namespace tessera::kernels::cpu::baseline { \
  __VA_ARGS__                                 \
  }                                           \
  namespace tessera::kernels::cpu::avx2 {     \
  __VA_ARGS__                                 \
  }                                           \
  namespace tessera::kernels::cpu::avx512 {   \
  __VA_ARGS__                                 \
  }
#else
#define TESSERA_EACH_ISA(...)                 \
  namespace tessera::kernels::cpu::baseline { \
  __VA_ARGS__                                 \
  }
#endif

namespace tessera::kernels::cpu {

enum class Isa { baseline, avx2, avx512 };

/// The widest set this CPU runs, of those that TESSERA_MAX_CPU_ISA (baseline, avx2, avx512) allows.
Isa best_isa();
/// "avx512", "avx2" or "baseline".
const char* isa_name(Isa isa);
/// Whether the CPU multiplies bfloat16 natively (AVX512-BF16).
bool has_bf16_instructions();

template <typename F>
F* pick(F* baseline, F* avx2, F* avx512) {
  switch (best_isa()) {
    case Isa::avx512:
      return avx512;
    case Isa::avx2:
      return avx2;
    case Isa::baseline:
      break;
  }
  return baseline;
}

/// One compiled copy of a vector function.
template <typename F>
struct IsaCopy {
  Isa isa;
  F* function;
};

template <typename F>
std::vector<IsaCopy<F>> runnable_copies(F* baseline, F* avx2, F* avx512) {
  std::vector<IsaCopy<F>> copies{{Isa::baseline, baseline}};
  if (best_isa() >= Isa::avx2) copies.push_back({Isa::avx2, avx2});
  if (best_isa() >= Isa::avx512) copies.push_back({Isa::avx512, avx512});
  return copies;
}

}  // namespace tessera::kernels::cpu

/// TESSERA_PICK(name): the copy of vector function `name` for this CPU.
/// TESSERA_COPIES(name): every copy this CPU can run, for tests: for (auto [isa, function] :
/// TESSERA_COPIES(name)).
#if defined(__x86_64__)
#define TESSERA_ISA_COPIES_(chooser, name)                                   \
  ::tessera::kernels::cpu::chooser(&::tessera::kernels::cpu::baseline::name, \
                                   &::tessera::kernels::cpu::avx2::name,     \
                                   &::tessera::kernels::cpu::avx512::name)
#else
#define TESSERA_ISA_COPIES_(chooser, name)                                   \
  ::tessera::kernels::cpu::chooser(&::tessera::kernels::cpu::baseline::name, \
                                   &::tessera::kernels::cpu::baseline::name, \
                                   &::tessera::kernels::cpu::baseline::name)
#endif
#define TESSERA_PICK(name) TESSERA_ISA_COPIES_(pick, name)
#define TESSERA_COPIES(name) TESSERA_ISA_COPIES_(runnable_copies, name)
