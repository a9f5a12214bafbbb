#pragma once
/// Controls of the emulator, for tests.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace tessera_emulator {

/// Between two barriers the threads of a block run one after the other: warp by warp, lane by lane.
enum class Order : std::uint8_t { ascending, descending, shuffled };

/// For kernels launched from now on, on every stream. At first TESSERA_EMULATOR_ORDER, else ascending.
void set_thread_order(Order order, std::uint64_t seed = 0);
/// Runs `body` under ascending, descending and three shuffled orders; afterwards the order is what it was.
/// `body` waits for what it starts.
void for_each_order(const std::function<void()>& body);

/// How many devices there are: at first TESSERA_EMULATOR_DEVICES, else 8. Call it before any is used.
void set_device_count(int count);
/// Memory of every device: at first 8 GiB. Call it while little is allocated.
void set_device_memory(std::size_t bytes);
/// Whether device memory may be touched only while some stream works, so that the host's own accesses crash.
/// At first whether TESSERA_EMULATOR_PROTECT is 1.
void set_protection(bool on);
/// Allocations found overrun when they were freed, since the process began.
std::size_t overruns();
/// Calls so far in which the host of a GPU waits or goes to the driver for memory: synchronisations,
/// allocations and frees, copies to pageable memory.
std::uint64_t slow_calls();
/// Calls of this thread so far that put something on a stream or, while it is recorded, into its graph:
/// kernels, copies, fills, products, graphs, records of events and waits for them.
std::uint64_t stream_calls();
/// Whether the first launch of a kernel on a device waits for all that runs there, as loading its code may on
/// a GPU, unless it was loaded before. At first only with CUDA_MODULE_LOADING=LAZY, CUDA's own default; the
/// launcher sets EAGER.
void set_lazy_loading(bool on);
/// Launches so far that waited for that reason.
std::uint64_t loading_stops();
/// From now on streams of a device share so many hardware queues, counted over those that exist: work at the
/// head of a queue that cannot begin yet holds up what comes after it, of other streams too. At first
/// CUDA_DEVICE_MAX_CONNECTIONS, else 32 for each of 8 ranks, as the launcher sets it (CUDA's own default is
/// 8).
void set_connections(int count);
/// Products that are fused with something and called from now on are refused, that many times.
void plant_gemm_refusals(int count);
/// Pinned memory that there is.
std::size_t pinned_bytes();
/// Executables of graphs that there are.
std::size_t graph_executables();
/// Kernels run so far, on all devices.
std::uint64_t kernels_run();
/// The message of the latest kernel or copy that failed; empty when none did.
std::string last_failure();

/// From now on ncclCommGetAsyncError gives `result` (an ncclResult_t) for communicators of that device; 0
/// ends it.
void plant_nccl_error(int device, int result);
/// NCCL communicators since the process began, every rank's counted: made with an id of their own, and split
/// off another one.
struct NcclCounts {
  std::uint64_t made_by_id = 0, made_by_split = 0;
  std::uint64_t groups = 0;    ///< groups of calls that had something to do
  std::uint64_t threads = 0;   ///< that NCCL started for them, as it does without blocking
  std::uint64_t outlived = 0;  ///< communicators ended while a graph could still launch their calls
};
NcclCounts nccl_counts();

/// What goes wrong with graphs of a device from now on: nothing, recordings become none, or a launch leaves
/// out a kernel.
enum class GraphMistake : std::uint8_t { none, refused, incomplete };
void plant_graph_mistake(int device, GraphMistake mistake);

/// What a kernel did that a GPU would stop it for.
class Fault : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tessera_emulator
