#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Names and values describing what computes here: instruction sets, libraries, devices.
std::vector<std::pair<std::string, std::string>> describe_backends();

/// For ExecCtx::gemm_tuner: how CUDA matrix products of one device choose among cuBLASLt's algorithms.
/// `tune`: time the candidates of each new shape at its first use and keep the fastest. `cache_path`: the
/// file that keeps choices between runs, by GPU and library version; empty = memory only. `tables`: files of
/// `tessera tune` that are only read, for products that this file does not have; the first that has one
/// counts. Errors: IoError if `tune` and the file cannot be written.
std::shared_ptr<GemmTuner> make_gemm_tuner(bool tune, const std::string& cache_path,
                                           const std::vector<std::string>& tables = {});
/// For ExecCtx::cores, by the thread that computes. While other programs want its cores, small kernels of
/// ours run on one thread and OpenMP's threads sleep as soon as they wait; no result depends on it.
std::shared_ptr<SharedCores> watch_cores();

/// What is to be told of the context's products and of attention: files that are damaged or cannot be
/// written, fast ways that were refused. Empty the next time, or if all is well.
std::string take_backend_notes(const ExecCtx& ctx);

/// Makes what libraries keep for the context's stream, before the first work that other ranks wait for.
/// Nothing on the CPU. Errors: DeviceError.
void prepare_stream(const ExecCtx& ctx);
/// Writes the time of a CUDA device, in nanoseconds, to `to` (int64 [1], there) when the stream comes to it.
void write_time(const ExecCtx& ctx, const Tensor& to);

/// Gives back what libraries keep for the context's stream: when its work is done and nothing will be
/// launched there any more. Nothing on the CPU.
void forget_stream(const ExecCtx& ctx) noexcept;

}  // namespace tessera::ops
