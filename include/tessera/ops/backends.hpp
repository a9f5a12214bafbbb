#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tessera::ops {

/// Names and values describing what computes here: instruction sets, libraries, devices.
std::vector<std::pair<std::string, std::string>> describe_backends();

/// How CUDA matrix products of this process choose among cuBLASLt's algorithms, before the first of them.
/// `tune`: time the candidates of each new shape at its first use and keep the fastest. `cache_path`: the
/// file that keeps winners between runs, by GPU and library version; empty = memory only. Errors: ConfigError
/// in a build without CUDA; IoError.
void set_gemm_tuning(bool tune, const std::string& cache_path);

}  // namespace tessera::ops
