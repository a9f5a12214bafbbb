#include "kernels/cuda/loading.hpp"

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "kernels/api/backends.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

/// Constant from main() on.
std::vector<const void*>& files() {
  static std::vector<const void*> all;
  return all;
}

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the last error until it is read
  throw DeviceError(tessera::detail::concat(call, " failed: ", cudaGetErrorString(code)));
}

void check(CUresult code, const char* call) {
  TESSERA_ENSURE(DeviceError, code == CUDA_SUCCESS, call, " failed: error ", static_cast<int>(code));
}

/// A function of the driver, which is not linked: a machine without a GPU has none.
template <typename Function>
Function driver_function(const char* name) {
  constexpr unsigned kSince = 12040;  // of the newest one asked for
  void* function = nullptr;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault), name);
#else
  static_cast<void>(kSince);
  check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault), name);
#endif
  TESSERA_ENSURE(DeviceError, function != nullptr, "the GPU's driver has no ", name,
                 ": it is older than CUDA 12.4");
  return reinterpret_cast<Function>(function);
}

}  // namespace

KernelFile::KernelFile(const void* kernel) { files().push_back(kernel); }

void load_kernels() {
  const auto module_of = driver_function<CUresult (*)(CUmodule*, CUfunction)>("cuFuncGetModule");
  const auto count_of = driver_function<CUresult (*)(unsigned*, CUmodule)>("cuModuleGetFunctionCount");
  const auto list =
      driver_function<CUresult (*)(CUfunction*, unsigned, CUmodule)>("cuModuleEnumerateFunctions");
  const auto load = driver_function<CUresult (*)(CUfunction)>("cuFuncLoad");
  for (const void* const kernel : files()) {
    cudaFunction_t known = nullptr;
    check(cudaGetFuncBySymbol(&known, kernel), "cudaGetFuncBySymbol");
    CUmodule module = nullptr;
    check(module_of(&module, static_cast<CUfunction>(known)), "cuFuncGetModule");
    unsigned count = 0;
    check(count_of(&count, module), "cuModuleGetFunctionCount");
    std::vector<CUfunction> functions(count);
    check(list(functions.data(), count, module), "cuModuleEnumerateFunctions");
    for (const CUfunction function : functions) check(load(function), "cuFuncLoad");
  }
}

}  // namespace tessera::kernels::cuda
