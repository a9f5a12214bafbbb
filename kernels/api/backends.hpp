#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/gemm.hpp"

namespace tessera::kernels {

/// One line per library or device of a backend, for `tessera env`.
using Description = std::vector<std::pair<std::string, std::string>>;
namespace cpu {
/// Name and version of what multiplies matrices.
std::string gemm_library();
Description describe();
}  // namespace cpu
/// How CUDA matrix products choose among cuBLASLt's algorithms.
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
  /// Files that are only read, for products that the file above does not have; where several have one, the
  /// first of them counts. Those that are not there are no error.
  std::vector<std::string> tables;
};
/// What a search for the fastest way of a product found.
struct GemmTrial {
  bool known = false;     ///< the file had it already: nothing was timed, and what follows is not set
  int candidates = 0;     ///< that ran
  double first_s = 0;     ///< one product the way it is done without a search: cuBLASLt's first suggestion
  double best_s = 0;      ///< the way that was kept
  bool separate = false;  ///< kept: what could be fused is faster as a pass of its own
};
namespace cuda {
Description describe();
/// Gives back what libraries keep for a stream (workspaces, handles): before it is destroyed, with its work
/// done and its graphs gone. Waits for the device.
void forget_stream(void* stream) noexcept;
/// Makes what libraries keep for a stream, so that its first product and its first attention allocate
/// nothing: an allocation may wait for what other ranks have to send. Errors: DeviceError.
void prepare_stream(void* stream);
/// Loads the code of all our kernels on the current device, once for all: afterwards no first launch waits
/// for what runs there. Errors: DeviceError; ConfigError in a build without CUDA.
void load_kernels();
/// Writes the device's time in nanoseconds to device memory when the stream comes to it. Unlike an event's it
/// can be read of every launch of a graph, by a copy that follows the launch.
void write_time(std::int64_t* to, void* stream);
/// Searches for the fastest way of one product: more of cuBLASLt's algorithms than a product in training
/// tries, shares of k, a pass of its own for what could be fused. Keeps it in launch.gemm_tuner, which is not
/// null, and in its file at once. Overwrites what `gemm` writes; beta 1 adds many times. Waits for the
/// stream.
GemmTrial tune_gemm(const Gemm& gemm, const Launch& launch);
/// What cuBLASLt refused where there was no tuner; empty the next time, or if all is well.
std::string take_gemm_note();
/// Why attention was computed the slower way; empty the next time, or if it was not.
std::string take_attention_note();
}  // namespace cuda

}  // namespace tessera::kernels
