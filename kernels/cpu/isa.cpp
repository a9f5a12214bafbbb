#include "kernels/cpu/vector/isa.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "tessera/base/env.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cpu {

#if defined(__x86_64__)
namespace {

/// What TESSERA_MAX_CPU_ISA allows: results of a CPU with less can be had on one with more.
Isa most_isa() {
  const std::optional<std::string> most = max_cpu_isa();
  if (!most) return Isa::avx512;
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (*most == isa_name(isa)) return isa;
  }
  TESSERA_CHECK(false, "TESSERA_MAX_CPU_ISA is \"", *most, "\"; it can be baseline, avx2 or avx512");
  return Isa::baseline;
}

}  // namespace

Isa best_isa() {
  // What CMake passes the compiler for each set: a CPU must have all of it.
  static const Isa isa = [] {
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return std::min(most_isa(), avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::baseline);
  }();
  return isa;
}

bool has_bf16_instructions() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}
#else
Isa best_isa() { return Isa::baseline; }
bool has_bf16_instructions() { return false; }
#endif

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::baseline:
      break;
  }
  return "baseline";
}

}  // namespace tessera::kernels::cpu
