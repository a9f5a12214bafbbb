#include "tessera/ops/backends.hpp"

#include "kernels/api/backends.hpp"

namespace tessera::ops {

std::vector<std::pair<std::string, std::string>> describe_backends() {
  auto list = kernels::cpu::describe();
  const auto cuda = kernels::cuda::describe();
  list.insert(list.end(), cuda.begin(), cuda.end());
  return list;
}

void set_gemm_tuning(bool tune, const std::string& cache_path) {
  kernels::cuda::set_gemm_tuning({.tune = tune, .cache_path = cache_path});
}

void set_gemm_tables(const std::vector<std::string>& paths) { kernels::cuda::set_gemm_tables(paths); }

std::string take_gemm_note() { return kernels::cuda::take_gemm_note(); }

}  // namespace tessera::ops
