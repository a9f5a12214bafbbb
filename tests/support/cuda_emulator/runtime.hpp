#pragma once
/// What the emulator's own files share.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace tessera_emulator {

struct Graph;

/// What the streams of a device share: work of one queue begins in the order it was put there.
class HardwareQueue {
 public:
  std::uint64_t add();
  /// Waits until all that was added before has begun.
  void await_turn(std::uint64_t ticket);
  void begin(std::uint64_t ticket);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::uint64_t> waiting_;
  std::uint64_t next_ = 0;
};
/// The one of the device that serves the fewest streams.
std::shared_ptr<HardwareQueue> queue_for_stream(int device);

/// Keeps the code for cudaGetLastError unless it is success, and returns it.
cudaError_t report(cudaError_t code);
/// Notes a failure for last_failure(), and prints it.
void note_failure(const std::string& message);

/// Of the calling thread.
int current_device();
int device_count();
std::size_t device_memory();

struct ThreadOrder {
  Order order = Order::ascending;
  std::uint64_t seed = 0;
};
ThreadOrder thread_order();

struct Grid {
  const void* function;
  dim3 grid, block;
  std::size_t shared_bytes;
  std::function<void()> thread;
  ThreadOrder order;
};
/// Runs every block on the calling thread. Throws what a thread threw, or Fault.
void run(const Grid& grid);
/// The source's name of a kernel, or its address when the program has no symbols.
std::string name_of(const void* function);
/// Notes that a kernel was run, where a file for that was named.
void record_kernel(const void* function);
/// Waits for the device if `function` has not been loaded there.
void load_kernel(const void* function, int device);
/// Counts one of slow_calls().
void note_slow_call();
/// Counts one of stream_calls().
void note_stream_call();

/// Reserved address space with device memory in it.
namespace memory {
/// Whether the address is the emulator's, allocated or not.
bool is_device(const void* address);
bool is_pinned(const void* address, std::size_t bytes);
/// Device the memory is of; -1 when there is no allocation there.
int device_of(const void* address);
/// Empty, or what is wrong with an access of the host's copies: it must lie in one allocation.
std::string why_not(const void* address, std::size_t bytes);

/// While one lives, device memory may be touched.
class Access {
 public:
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};
}  // namespace memory

}  // namespace tessera_emulator

/// A point in the work of streams. Shared by the handle and the work that refers to it.
struct CUevent_st {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t recorded = 0, completed = 0;
    cudaError_t error = cudaSuccess;
    double seconds = 0;
    std::weak_ptr<tessera_emulator::Graph> graph;  ///< in which it was recorded last, if in one
    std::size_t node = 0;                          ///< there
    bool captured = false;                         ///< also when that graph is gone
    std::uint64_t next_record();
    std::uint64_t last_record();
    void complete(std::uint64_t record, cudaError_t so_far);
    /// Waits for the given record; the error of the stream that recorded it.
    cudaError_t wait(std::uint64_t record);
  };
  std::shared_ptr<State> state = std::make_shared<State>();
};

/// A host thread that does work in order. A failure stops all work after it but that of events.
struct CUstream_st {
 public:
  /// Without a queue it is held up by nothing but its own work.
  explicit CUstream_st(int device, std::shared_ptr<tessera_emulator::HardwareQueue> queue = nullptr);
  ~CUstream_st();  ///< finishes the work first
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  int device() const { return device_; }
  /// `always`: also after a failure, with the error as argument. Returns the error so far.
  using Work = std::function<cudaError_t(cudaError_t so_far)>;
  /// `waits`: it keeps the head of the queue until it is done.
  cudaError_t enqueue(std::string name, bool always, Work work, bool waits = false);
  cudaError_t synchronize();
  cudaError_t query();
  /// What work is added to instead of being done; null: it is done.
  std::shared_ptr<tessera_emulator::Graph> recording();
  void set_recording(std::shared_ptr<tessera_emulator::Graph> graph);

 private:
  struct Item {
    std::string name;
    bool always;
    Work work;
    bool waits;
    std::uint64_t ticket;
  };
  void work();
  cudaError_t perform(const Item& item, cudaError_t so_far);

  const int device_;
  const std::shared_ptr<tessera_emulator::HardwareQueue> queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false, ending_ = false;
  cudaError_t error_ = cudaSuccess;
  std::shared_ptr<tessera_emulator::Graph> recording_;
  std::thread thread_;
};

namespace tessera_emulator {
/// The stream a handle means; null means the default stream of the current device.
CUstream_st& resolve(cudaStream_t stream);
/// Waits for what every stream of a device has to do; recordings are not disturbed.
void drain(int device);
/// Waits for every stream of a device; the first error met.
cudaError_t synchronize_device(int device);
}  // namespace tessera_emulator
