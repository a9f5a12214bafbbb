#include <fstream>

#include "kernels/api/backends.hpp"
#include "kernels/cpu/vector/isa.hpp"

namespace tessera::kernels::cpu {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

Description describe() {
  return {{"cpu", cpu_model()},
          {"vectors",
           std::string(isa_name(best_isa())) + (has_bf16_instructions() ? " with bfloat16 products" : "")},
          {"gemm", gemm_library()}};
}

}  // namespace tessera::kernels::cpu
