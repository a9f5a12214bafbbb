/// A build without CUDA: no devices.

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera::cuda {
namespace {

[[noreturn]] void refuse() {
  throw ConfigError(
      "this build of Tessera has no CUDA backend: set device.type to cpu or auto, or build with " +
      std::string("-DTESSERA_CUDA=ON"));
}

}  // namespace

int device_count() { return 0; }
std::string why_none() { return "this build of Tessera has no CUDA backend"; }
std::string describe(int) { refuse(); }
std::size_t total_memory(int) { refuse(); }
void use_device(int) { refuse(); }
void* create_stream(int, bool) { refuse(); }
void destroy_stream(void*) noexcept {}
void synchronize(void*) { refuse(); }
void* create_event() { refuse(); }
void destroy_event(void*) noexcept {}
void record(void*, void*) { refuse(); }
void wait(void*, void*) { refuse(); }
bool done(void*) { refuse(); }
void synchronize_event(void*) { refuse(); }
double seconds_between(void*, void*) { refuse(); }
void begin_recording(void*) { refuse(); }
void* end_recording(void*) { refuse(); }
void record_outside(void*, void*) { refuse(); }
void wait_outside(void*, void*) { refuse(); }
void* make_executable(void*) { refuse(); }
std::string update_executable(void*, void*) { refuse(); }
void launch_executable(void*, void*) { refuse(); }
void destroy_graph(void*) noexcept {}
void destroy_executable(void*) noexcept {}
void* allocate(int, std::size_t) { refuse(); }
void deallocate(void*) noexcept {}
void* create_pool(int) { refuse(); }
void destroy_pool(void*) noexcept {}
void* allocate_from(void*, std::size_t, void*) { refuse(); }
void deallocate_to_pool(void*, void*) noexcept {}
void trim_pool(void*) { refuse(); }
void* allocate_pinned(std::size_t) { refuse(); }
void deallocate_pinned(void*) noexcept {}
MemoryInfo memory_info(int) { refuse(); }
bool is_device_memory(const void*) { refuse(); }
void copy(void*, const void*, std::size_t, void*) { refuse(); }

}  // namespace tessera::cuda
