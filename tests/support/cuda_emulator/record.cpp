/// Which kernels were run, for tests/emulated_kernels.py: a line for each, once in a process, added to the
/// file that TESSERA_EMULATOR_RECORD names.

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <unordered_set>

#include "emulator.hpp"
#include "runtime.hpp"

namespace tessera_emulator {

namespace {

std::atomic<std::uint64_t> kernels_so_far = 0;

}  // namespace

std::uint64_t kernels_run() { return kernels_so_far; }

void record_kernel(const void* function) {
  ++kernels_so_far;
  static const char* const file = std::getenv("TESSERA_EMULATOR_RECORD");
  if (file == nullptr) return;
  static std::mutex mutex;
  static std::unordered_set<const void*> recorded;
  std::lock_guard lock(mutex);
  if (!recorded.insert(function).second) return;
  std::ofstream(file, std::ios::app) << name_of(function) + "\n";
}

namespace {

std::atomic<std::uint64_t> slow_calls_so_far = 0;
thread_local std::uint64_t stream_calls_so_far = 0;

}  // namespace

void note_slow_call() { ++slow_calls_so_far; }
std::uint64_t slow_calls() { return slow_calls_so_far; }

void note_stream_call() { ++stream_calls_so_far; }
std::uint64_t stream_calls() { return stream_calls_so_far; }

}  // namespace tessera_emulator
