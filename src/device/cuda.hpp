#pragma once
/// The few calls of the CUDA runtime that the library is built on. One implementation calls the runtime, one
/// (no_cuda.cpp) belongs to builds without it: there are no devices then, and everything else throws
/// ConfigError. Streams and events are opaque. Errors: DeviceError naming the call, unless said otherwise.

#include <cstddef>
#include <string>

namespace tessera::cuda {

/// Devices this process may use; 0 without driver or GPU.
int device_count();
/// Why there is no device, as a sentence; empty if there is one.
std::string why_none();
/// Name, memory, compute capability.
std::string describe(int device);
/// Its memory in bytes; asked without making a context on it, which would take some of that memory.
std::size_t total_memory(int device);

/// Makes `device` the calling thread's: kernels and libraries need that of their stream.
void use_device(int device);

void* create_stream(int device, bool high_priority);
void destroy_stream(void* stream) noexcept;
void synchronize(void* stream);

/// An event that can be timed.
void* create_event();
void destroy_event(void* event) noexcept;
void record(void* event, void* stream);
/// Later work on `stream` starts after `event`.
void wait(void* stream, void* event);
bool done(void* event);
void synchronize_event(void* event);
/// Seconds from one recorded event to another; both are done.
double seconds_between(void* begin, void* end);

/// From here to end_recording, what is put on `stream`, and on streams that wait for events recorded on it,
/// becomes a graph instead. All such streams must have been waited for by `stream` before the end.
void begin_recording(void* stream);
/// The graph; null if it cannot be made, because the recording was broken off.
void* end_recording(void* stream);
/// Of a stream that is being recorded: a record of an event that others see when the graph runs, a wait for
/// an event of work outside the graph.
void record_outside(void* event, void* stream);
void wait_outside(void* stream, void* event);
void* make_executable(void* graph);
/// Replaces the parameters of the graph an executable was made of; otherwise why that cannot be: it was of
/// another shape, mostly. Empty if it was done.
std::string update_executable(void* executable, void* graph);
void launch_executable(void* executable, void* stream);
void destroy_graph(void* graph) noexcept;
/// Not while it runs.
void destroy_executable(void* executable) noexcept;

/// Device memory, 256-byte aligned; null when there is not enough. To deallocate waits for everything that
/// runs on the device, kernels that wait for other ranks among it: only for the end.
void* allocate(int device, std::size_t bytes);
void deallocate(void* memory) noexcept;
/// Memory that comes and goes in the order of a stream, so that nobody waits for other streams. Null where
/// the device has no such pools (some virtual GPUs).
void* create_pool(int device);
void destroy_pool(void* pool) noexcept;
/// 256-byte aligned, for work on `stream`, which is not being recorded; null when there is not enough.
void* allocate_from(void* pool, std::size_t bytes, void* stream);
void deallocate_to_pool(void* memory, void* stream) noexcept;
/// Gives back to the system what was deallocated and whose stream is known to have come to it.
void trim_pool(void* pool);
/// Host memory that devices copy from and to without a stop; null when there is not enough.
void* allocate_pinned(std::size_t bytes);
void deallocate_pinned(void* memory) noexcept;
/// Bytes free and in all on a device.
struct MemoryInfo {
  std::size_t free = 0, total = 0;
};
MemoryInfo memory_info(int device);

/// Whether an address is one of a device.
bool is_device_memory(const void* memory);
/// In the order of the stream, between any two of device and pinned memory; from or to other host memory the
/// call may return only when the copy is done.
void copy(void* target, const void* source, std::size_t bytes, void* stream);

}  // namespace tessera::cuda
