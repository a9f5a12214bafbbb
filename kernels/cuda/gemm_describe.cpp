#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include <string>

#include "kernels/api/backends.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

/// 90102 with base 100 is "9.1.2".
std::string version(std::size_t number, std::size_t base) {
  return tessera::detail::concat(number / base / base, ".", number / base % base, ".", number % base);
}

/// The CUDA runtime and the driver count 1000 to a major and 10 to a minor version.
std::string runtime_version(int number) {
  return tessera::detail::concat(number / 1000, ".", number % 1000 / 10);
}

std::string device_line(int device) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    cudaGetLastError();  // the runtime keeps the last error until it is read
    return "its properties cannot be read";
  }
  return tessera::detail::concat(properties.name, ", ", properties.totalGlobalMem >> 20,
                                 " MiB, compute capability ", properties.major, ".", properties.minor);
}

}  // namespace

Description describe() {
  int runtime = 0, driver = 0, devices = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();  // the runtime keeps the last error until it is read
    devices = 0;
  }
  Description lines{{"cuda", "runtime " + runtime_version(runtime) +
                                 (driver == 0 ? ", no driver" : ", driver for " + runtime_version(driver))},
                    {"cublasLt", version(cublasLtGetVersion(), 100)},
                    {"cudnn", version(cudnnGetVersion(), 100)}};
  for (int device = 0; device < devices; ++device)
    lines.emplace_back("gpu " + std::to_string(device), device_line(device));
  return lines;
}

}  // namespace tessera::kernels::cuda
