#include <cuda_runtime.h>

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera::cuda {
namespace {

/// Throws with the call's text and the runtime's own words.
void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the last error until it is read
  throw DeviceError(
      detail::concat(call, " failed: ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")"));
}
#define TESSERA_CUDA_CHECK(call) check(call, #call)

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::string why_none() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return detail::concat("the CUDA runtime finds no device: ", cudaGetErrorString(code));
  }
  return count > 0 ? "" : "the CUDA runtime finds no device (is CUDA_VISIBLE_DEVICES empty?)";
}

std::string describe(int device) {
  cudaDeviceProp properties;
  TESSERA_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return detail::concat(properties.name, ", ", properties.totalGlobalMem >> 20, " MiB, compute capability ",
                        properties.major, ".", properties.minor, ", ", properties.multiProcessorCount,
                        " multiprocessors");
}

std::size_t total_memory(int device) {
  cudaDeviceProp properties;
  TESSERA_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.totalGlobalMem;
}

void use_device(int device) { TESSERA_CUDA_CHECK(cudaSetDevice(device)); }

void* create_stream(int device, bool high_priority) {
  use_device(device);
  int least = 0, greatest = 0;
  TESSERA_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  TESSERA_CUDA_CHECK(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? greatest : least));
  return stream;
}

void destroy_stream(void* stream) noexcept { cudaStreamDestroy(as_stream(stream)); }
void synchronize(void* stream) { TESSERA_CUDA_CHECK(cudaStreamSynchronize(as_stream(stream))); }

void* create_event() {
  cudaEvent_t event = nullptr;
  TESSERA_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  return event;
}

void destroy_event(void* event) noexcept { cudaEventDestroy(as_event(event)); }
void record(void* event, void* stream) {
  TESSERA_CUDA_CHECK(cudaEventRecord(as_event(event), as_stream(stream)));
}
void wait(void* stream, void* event) {
  TESSERA_CUDA_CHECK(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0));
}

bool done(void* event) {
  const cudaError_t code = cudaEventQuery(as_event(event));
  if (code == cudaErrorNotReady) return false;
  check(code, "cudaEventQuery");
  return true;
}

void synchronize_event(void* event) { TESSERA_CUDA_CHECK(cudaEventSynchronize(as_event(event))); }

double seconds_between(void* begin, void* end) {
  float milliseconds = 0;
  TESSERA_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, as_event(begin), as_event(end)));
  return static_cast<double>(milliseconds) * 1e-3;
}

void begin_recording(void* stream) {
  // Relaxed: other calls of this process, in this thread or another, go on as always.
  TESSERA_CUDA_CHECK(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeRelaxed));
}

void* end_recording(void* stream) {
  cudaGraph_t graph = nullptr;
  TESSERA_CUDA_CHECK(cudaStreamEndCapture(as_stream(stream), &graph));
  return graph;
}

void record_outside(void* event, void* stream) {
  TESSERA_CUDA_CHECK(cudaEventRecordWithFlags(as_event(event), as_stream(stream), cudaEventRecordExternal));
}

void wait_outside(void* stream, void* event) {
  TESSERA_CUDA_CHECK(cudaStreamWaitEvent(as_stream(stream), as_event(event), cudaEventWaitExternal));
}

void* make_executable(void* graph) {
  cudaGraphExec_t executable = nullptr;
  TESSERA_CUDA_CHECK(cudaGraphInstantiate(&executable, static_cast<cudaGraph_t>(graph), 0));
  return executable;
}

std::string update_executable(void* executable, void* graph) {
  cudaGraphExecUpdateResultInfo info{};
  const cudaError_t code =
      cudaGraphExecUpdate(static_cast<cudaGraphExec_t>(executable), static_cast<cudaGraph_t>(graph), &info);
  if (code == cudaErrorGraphExecUpdateFailure) {
    cudaGetLastError();
    return detail::concat(
        "cudaGraphExecUpdate refused: ", static_cast<int>(info.result),
        info.result == cudaGraphExecUpdateErrorTopologyChanged ? " (topology changed)" : "");
  }
  check(code, "cudaGraphExecUpdate");
  return "";
}

void launch_executable(void* executable, void* stream) {
  TESSERA_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), as_stream(stream)));
}

void destroy_graph(void* graph) noexcept { cudaGraphDestroy(static_cast<cudaGraph_t>(graph)); }
void destroy_executable(void* executable) noexcept {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable));
}

void* allocate(int device, std::size_t bytes) {
  use_device(device);
  void* memory = nullptr;
  const cudaError_t code = cudaMalloc(&memory, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(code, "cudaMalloc");
  return memory;
}

void deallocate(void* memory) noexcept { cudaFree(memory); }

void* create_pool(int device) {
  int supported = 0;
  TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device));
  if (supported == 0) return nullptr;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  cudaMemPool_t pool = nullptr;
  TESSERA_CUDA_CHECK(cudaMemPoolCreate(&pool, &properties));
  return pool;
}

void destroy_pool(void* pool) noexcept { cudaMemPoolDestroy(static_cast<cudaMemPool_t>(pool)); }

void* allocate_from(void* pool, std::size_t bytes, void* stream) {
  void* memory = nullptr;
  const cudaError_t code =
      cudaMallocFromPoolAsync(&memory, bytes, static_cast<cudaMemPool_t>(pool), as_stream(stream));
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(code, "cudaMallocFromPoolAsync");
  return memory;
}

void deallocate_to_pool(void* memory, void* stream) noexcept { cudaFreeAsync(memory, as_stream(stream)); }

void trim_pool(void* pool) { TESSERA_CUDA_CHECK(cudaMemPoolTrimTo(static_cast<cudaMemPool_t>(pool), 0)); }

void* allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  const cudaError_t code = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(code, "cudaHostAlloc");
  return memory;
}

void deallocate_pinned(void* memory) noexcept { cudaFreeHost(memory); }

MemoryInfo memory_info(int device) {
  use_device(device);
  MemoryInfo info;
  TESSERA_CUDA_CHECK(cudaMemGetInfo(&info.free, &info.total));
  return info;
}

bool is_device_memory(const void* memory) {
  cudaPointerAttributes attributes{};
  TESSERA_CUDA_CHECK(cudaPointerGetAttributes(&attributes, memory));
  return attributes.type == cudaMemoryTypeDevice;
}

void copy(void* target, const void* source, std::size_t bytes, void* stream) {
  if (bytes == 0) return;
  TESSERA_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, as_stream(stream)));
}

}  // namespace tessera::cuda
