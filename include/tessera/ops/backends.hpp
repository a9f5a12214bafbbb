#pragma once
#include <string>
#include <utility>
#include <vector>

#include "tessera/device/exec_ctx.hpp"

namespace tessera::ops {

/// Names and values describing what computes here: instruction sets, libraries, devices.
std::vector<std::pair<std::string, std::string>> describe_backends();

/// How CUDA matrix products of this process choose among cuBLASLt's algorithms, before the first of them.
/// `tune`: time the candidates of each new shape at its first use and keep the fastest. `cache_path`: the
/// file that keeps choices between runs, by GPU and library version; empty = memory only. Errors: ConfigError
/// in a build without CUDA; IoError if `tune` and the file cannot be written.
void set_gemm_tuning(bool tune, const std::string& cache_path);
/// Files of `tessera tune` that are only read, for products that the file above does not have; the first that
/// has one counts. Before the first product. Ignored in a build without CUDA.
void set_gemm_tables(const std::vector<std::string>& paths);
/// What is to be told of these files (damaged, read-only); empty the next time, or if all is well.
std::string take_backend_notes();

/// Gives back what libraries keep for the context's stream: when its work is done and nothing will be
/// launched there any more. Nothing on the CPU.
void forget_stream(const ExecCtx& ctx) noexcept;

}  // namespace tessera::ops
