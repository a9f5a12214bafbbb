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
/// How CUDA matrix products of this process choose among cuBLASLt's algorithms. Set before the first product.
struct GemmTuning {
  /// Time the candidates of each new shape once, at its first use outside stream capture, and keep the
  /// fastest. Off: cuBLASLt's first choice, or the file's. Timing waits for the stream once per new shape and
  /// needs memory for a second C for that long. Runs that choose by time may choose, and so round,
  /// differently from each other; runs with one file and `tune` off do not.
  bool tune = false;
  /// File that keeps choices between runs, per GPU name and cuBLASLt version: the fastest, and where nothing
  /// was timed the library's first choice, which the fastest replaces. Empty: memory only. A damaged or
  /// foreign file counts as empty and is replaced.
  std::string cache_path;
};
namespace cuda {
Description describe();
/// Errors: IoError if choices are to be timed and the file cannot be written; without timing it is only read
/// then.
void set_gemm_tuning(const GemmTuning& tuning);
/// What is to be told of the file; empty the next time, or if all is well.
std::string take_gemm_note();
}  // namespace cuda

}  // namespace tessera::kernels
