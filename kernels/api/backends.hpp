#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tessera::kernels {

/// One line per library or device of a backend, for `tessera env`.
using Description = std::vector<std::pair<std::string, std::string>>;
namespace cpu {
/// Name and version of what multiplies matrices.
std::string gemm_library();
Description describe();
}  // namespace cpu
namespace cuda {
Description describe();
}  // namespace cuda

}  // namespace tessera::kernels
