#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/device/allocator.hpp"
#include "tessera/device/stream.hpp"

namespace tessera {

class ActivationOffload;
class GemmTuner;
class SharedCores;

/// Where work runs, where its memory comes from, what its random numbers are keyed by. Passed to everything
/// that computes; nothing is fetched from ambient state.
struct ExecCtx {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<CachingAllocator> allocator;
  std::uint64_t seed = 0;
  /// On CUDA attention that no fast kernel computes is refused (device.require_fast_attention).
  bool require_fast_attention = false;
  /// The same call gives the same bits; without, CUDA's attention may add in any order
  /// (device.deterministic).
  bool deterministic = true;
  /// Memory for the logits of a head that exist at a time, on all tensor ranks alike; 0 = that of 512 rows.
  /// Each part of the rows reads and writes the weight gradient of the head once.
  std::int64_t logit_bytes = 0;
  static constexpr std::int64_t kLogitBytesOnCuda = std::int64_t{768} << 20;
  /// On CUDA how matrix products choose among cuBLASLt's algorithms (ops::make_gemm_tuner). Null: its first
  /// suggestions.
  std::shared_ptr<GemmTuner> gemm_tuner = {};
  /// On the CPU whether others want its cores (ops::watch_cores). Null: nobody looks.
  std::shared_ptr<SharedCores> cores = {};
  /// Who keeps inputs of recomputed parts in host memory. Null: they stay on the device.
  std::shared_ptr<ActivationOffload> activations = {};

  /// A context on the CPU. threads = 0 takes every core this process may run on.
  static ExecCtx cpu(int threads = 0, std::uint64_t seed = 0);
  /// A context on CUDA device `index`, with a stream of its own. Errors: ConfigError, saying why, when there
  /// is no such device.
  static ExecCtx cuda(int index = 0, std::uint64_t seed = 0);
  /// A dry run: everything is checked, allocated, counted and traced as on the CPU with one thread, nothing
  /// is computed. The allocator's statistics are those of the real run; to read a value is an error.
  static ExecCtx meta(std::uint64_t seed = 0);
  Device device() const { return stream->device(); }
};

/// CUDA devices this process may use, and, if there are none, why.
struct CudaDevices {
  int count = 0;
  std::string why_none;
};
CudaDevices cuda_devices();
/// Name, memory and compute capability of one of them.
std::string describe_cuda_device(int index);
/// Bytes of memory: all of a GPU's; of the CPU's what the processes of this machine (or of their control
/// group, where that has a limit) may have in all.
std::int64_t memory_bytes_of(Device device);

}  // namespace tessera
