/// Devices, errors, launches and the emulator's own controls.

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "cuda.h"
#include "runtime.hpp"

namespace tessera_emulator {
namespace {

constexpr std::size_t kSharedPerBlock = 48 * 1024, kSharedOptIn = 227 * 1024, kSharedReserved = 1024;
constexpr int kMultiprocessors = 4;  // few, so that grids sized by them loop

ThreadOrder order_from_environment() {
  const char* text = std::getenv("TESSERA_EMULATOR_ORDER");
  if (text == nullptr || std::strcmp(text, "ascending") == 0 || *text == '\0') return {};
  if (std::strcmp(text, "descending") == 0) return {Order::descending, 0};
  constexpr const char* kShuffled = "shuffled";
  if (std::strncmp(text, kShuffled, std::strlen(kShuffled)) == 0) {
    const char* seed = text + std::strlen(kShuffled);
    return {Order::shuffled, *seed == ':' ? std::strtoull(seed + 1, nullptr, 10) : 1};
  }
  std::fprintf(stderr,
               "CUDA emulator: TESSERA_EMULATOR_ORDER=%s is not ascending, descending or shuffled:SEED\n",
               text);
  std::exit(2);
}

int count_from_environment() {
  const char* text = std::getenv("TESSERA_EMULATOR_DEVICES");
  return text == nullptr ? 8 : std::atoi(text);
}

bool lazy_from_environment() {
  const char* text = std::getenv("CUDA_MODULE_LOADING");
  return text != nullptr && std::strcmp(text, "LAZY") == 0;
}

struct State {
  std::mutex mutex;
  ThreadOrder order = order_from_environment();
  std::atomic<int> count = count_from_environment();
  std::atomic<std::size_t> memory = std::size_t{8} << 30;
  std::map<const void*, std::size_t> shared_limits;  // of kernels, where raised
  std::atomic<bool> lazy = lazy_from_environment();
  std::set<std::pair<int, const void*>> loaded;  // by device; null: all kernels
  std::atomic<std::uint64_t> loading_stops = 0;
  std::string failure;
  std::set<std::string> texts;  // cudaGetErrorString's answers live for ever
};
State& state() {
  static State* const instance = new State;  // streams may be used while the process ends
  return *instance;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t check_launch(const void* function, dim3 grid, dim3 block, std::size_t shared_bytes,
                         const CUstream_st& stream) {
  if (stream.device() != current_device()) return cudaErrorInvalidResourceHandle;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
    return cudaErrorInvalidConfiguration;
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidConfiguration;
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
  std::lock_guard lock(state().mutex);
  const auto raised = state().shared_limits.find(function);
  const std::size_t limit = raised == state().shared_limits.end() ? kSharedPerBlock : raised->second;
  return shared_bytes > limit ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

cudaError_t report(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

void note_failure(const std::string& message) {
  std::fprintf(stderr, "CUDA emulator: %s\n", message.c_str());
  std::lock_guard lock(state().mutex);
  state().failure = message;
}

std::string last_failure() {
  std::lock_guard lock(state().mutex);
  return state().failure;
}

int current_device() { return device_of_thread; }
int device_count() { return state().count; }
std::size_t device_memory() { return state().memory; }
void set_device_count(int count) { state().count = count; }
void set_device_memory(std::size_t bytes) { state().memory = bytes; }

void set_lazy_loading(bool on) {
  const std::lock_guard lock(state().mutex);
  state().lazy = on;
  state().loaded.clear();
}
std::uint64_t loading_stops() { return state().loading_stops; }

void load_kernel(const void* function, int device) {
  if (!state().lazy) return;
  {
    const std::lock_guard lock(state().mutex);
    if (state().loaded.contains({device, nullptr})) return;
    if (!state().loaded.insert({device, function}).second) return;
    ++state().loading_stops;
  }
  drain(device);
}

ThreadOrder thread_order() {
  std::lock_guard lock(state().mutex);
  return state().order;
}

void set_thread_order(Order order, std::uint64_t seed) {
  std::lock_guard lock(state().mutex);
  state().order = {order, seed};
}

void for_each_order(const std::function<void()>& body) {
  struct Restore {
    ThreadOrder before = thread_order();
    ~Restore() { set_thread_order(before.order, before.seed); }
  } restore;
  for (const ThreadOrder order :
       {ThreadOrder{Order::ascending, 0}, ThreadOrder{Order::descending, 0}, ThreadOrder{Order::shuffled, 1},
        ThreadOrder{Order::shuffled, 2}, ThreadOrder{Order::shuffled, 3}}) {
    set_thread_order(order.order, order.seed);
    body();
  }
}

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, std::size_t shared_bytes,
                          cudaStream_t handle, std::function<void()> thread) {
  if (device_count() == 0) return report(cudaErrorNoDevice);
  CUstream_st& stream = resolve(handle);
  const cudaError_t code = check_launch(function, grid, block, shared_bytes, stream);
  if (code != cudaSuccess) return report(code);
  load_kernel(function, stream.device());
  Grid work{function, grid, block, shared_bytes, std::move(thread), thread_order()};
  note_stream_call();
  return report(stream.enqueue("", false, [work = std::move(work)](cudaError_t) {
    const memory::Access access;
    try {
      run(work);
    } catch (const std::exception& error) {
      throw Fault(name_of(work.function) + ": " + error.what());
    }
    record_kernel(work.function);
    return cudaSuccess;
  }));
}

}  // namespace tessera_emulator

using namespace tessera_emulator;

const char* cudaGetErrorName(cudaError_t code) {
#define TESSERA_NAME(name) \
  case name:               \
    return #name;
  switch (code) {
    TESSERA_NAME(cudaSuccess)
    TESSERA_NAME(cudaErrorInvalidValue)
    TESSERA_NAME(cudaErrorMemoryAllocation)
    TESSERA_NAME(cudaErrorInvalidConfiguration)
    TESSERA_NAME(cudaErrorNoDevice)
    TESSERA_NAME(cudaErrorInvalidDevice)
    TESSERA_NAME(cudaErrorInvalidResourceHandle)
    TESSERA_NAME(cudaErrorNotReady)
    TESSERA_NAME(cudaErrorPeerAccessAlreadyEnabled)
    TESSERA_NAME(cudaErrorLaunchFailure)
    TESSERA_NAME(cudaErrorIllegalState)
    TESSERA_NAME(cudaErrorStreamCaptureUnsupported)
    TESSERA_NAME(cudaErrorStreamCaptureInvalidated)
    TESSERA_NAME(cudaErrorStreamCaptureUnmatched)
    TESSERA_NAME(cudaErrorStreamCaptureUnjoined)
    TESSERA_NAME(cudaErrorStreamCaptureIsolation)
    TESSERA_NAME(cudaErrorCapturedEvent)
    TESSERA_NAME(cudaErrorGraphExecUpdateFailure)
  }
#undef TESSERA_NAME
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorPeerAccessAlreadyEnabled:
      return "peer access is already enabled";
    case cudaErrorIllegalState:
      return "the operation cannot be performed in the present state";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnmatched:
      return "the capture was not initiated in this stream";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorGraphExecUpdateFailure:
      return "the graph update was not performed";
    case cudaErrorLaunchFailure:
      break;
  }
  std::lock_guard lock(state().mutex);
  return state().texts.insert("unspecified launch failure: " + state().failure).first->c_str();
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count == 0 ? report(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return report(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return report(cudaErrorInvalidDevice);
  *properties = {};
  std::strncpy(properties->name, "Emulated GPU", sizeof properties->name - 1);
  properties->totalGlobalMem = device_memory();
  properties->sharedMemPerBlock = kSharedPerBlock;
  properties->sharedMemPerBlockOptin = kSharedOptIn;
  properties->sharedMemPerMultiprocessor = kSharedOptIn + kSharedReserved;
  properties->regsPerBlock = 65536;
  properties->warpSize = warpSize;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->multiProcessorCount = kMultiprocessors;
  properties->major = 9;
  properties->minor = 0;
  properties->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  const cudaError_t code = cudaGetDeviceProperties(&properties, device);
  if (code != cudaSuccess) return code;
  const std::map<cudaDeviceAttr, std::size_t> values{
      {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlock, properties.sharedMemPerBlock},
      {cudaDevAttrWarpSize, properties.warpSize},
      {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
      {cudaDevAttrL2CacheSize, properties.l2CacheSize},
      {cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
      {cudaDevAttrComputeCapabilityMajor, properties.major},
      {cudaDevAttrComputeCapabilityMinor, properties.minor},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, properties.sharedMemPerMultiprocessor},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, properties.sharedMemPerBlockOptin},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  const auto found = values.find(attribute);
  if (found == values.end()) return report(cudaErrorInvalidValue);
  *value = static_cast<int>(found->second);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const bool known = device >= 0 && device < device_count() && peer >= 0 && peer < device_count();
  *can = known && device != peer;
  return known ? cudaSuccess : report(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return peer >= 0 && peer < device_count() ? cudaSuccess : report(cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (function == nullptr || value < 0) return report(cudaErrorInvalidValue);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (static_cast<std::size_t>(value) > kSharedOptIn) return report(cudaErrorInvalidValue);
  std::lock_guard lock(state().mutex);
  state().shared_limits[function] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

namespace {

/// The addresses mean nothing: what loads one of them loads all.
CUfunction all_kernels() { return reinterpret_cast<CUfunction>(&state()); }
CUresult get_module(CUmodule* module, CUfunction) {
  *module = reinterpret_cast<CUmodule>(&state());
  return CUDA_SUCCESS;
}
CUresult count_functions(unsigned* count, CUmodule) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult enumerate_functions(CUfunction* functions, unsigned count, CUmodule) {
  if (count > 0) *functions = all_kernels();
  return CUDA_SUCCESS;
}
CUresult load_function(CUfunction) {
  const std::lock_guard lock(state().mutex);
  state().loaded.insert({current_device(), nullptr});
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  if (symbol == nullptr) return report(cudaErrorInvalidValue);
  *function = all_kernels();
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> known{
      {"cuFuncGetModule", reinterpret_cast<void*>(&get_module)},
      {"cuModuleGetFunctionCount", reinterpret_cast<void*>(&count_functions)},
      {"cuModuleEnumerateFunctions", reinterpret_cast<void*>(&enumerate_functions)},
      {"cuFuncLoad", reinterpret_cast<void*>(&load_function)},
  };
  const auto found = known.find(name);
  *function = found == known.end() ? nullptr : found->second;
  if (result != nullptr)
    *result = found == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return found == known.end() ? report(cudaErrorInvalidValue) : cudaSuccess;
}
