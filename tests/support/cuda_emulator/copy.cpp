/// Copies and fills in the order of streams.

#include <cstring>

#include "graph.hpp"
#include "runtime.hpp"

namespace tessera_emulator {
namespace {

bool is_pageable(const void* address, std::size_t bytes) {
  return !memory::is_device(address) && !memory::is_pinned(address, bytes);
}

bool fits(cudaMemcpyKind kind, const void* target, const void* source) {
  const bool to_device = memory::is_device(target), from_device = memory::is_device(source);
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// Looked at when the copy runs: the memory may have been freed since.
void require(const void* address, std::size_t bytes, const char* role) {
  const std::string problem = memory::why_not(address, bytes);
  if (!problem.empty()) throw Fault(std::string(role) + " is " + problem);
}

}  // namespace
}  // namespace tessera_emulator

using namespace tessera_emulator;

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  if (bytes == 0) return cudaSuccess;
  if (!fits(kind, target, source)) return report(cudaErrorInvalidValue);
  CUstream_st& stream = resolve(handle);
  if (is_pageable(source, bytes) || is_pageable(target, bytes)) {  // when the graph runs, it may be another's
    if (const cudaError_t code = refuse_if_recorded(stream); code != cudaSuccess) return report(code);
  }
  std::shared_ptr<std::vector<char>> staged;  // pageable memory may change once the call has returned
  if (is_pageable(source, bytes)) {
    const char* const begin = static_cast<const char*>(source);
    staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    source = staged->data();
  }
  note_stream_call();
  const cudaError_t code = stream.enqueue("cudaMemcpyAsync", false, [=](cudaError_t) {
    const memory::Access access;
    require(source, bytes, "the source");
    require(target, bytes, "the target");
    std::memmove(target, source, bytes);
    static_cast<void>(staged);
    return cudaSuccess;
  });
  if (code != cudaSuccess) return report(code);
  if (!is_pageable(target, bytes)) return cudaSuccess;
  note_slow_call();
  return report(stream.synchronize());
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t code = cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  return code == cudaSuccess ? cudaStreamSynchronize(nullptr) : code;
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!memory::is_device(target)) return report(cudaErrorInvalidValue);
  return enqueue(stream, "cudaMemsetAsync", [=] {
    require(target, bytes, "the target");
    std::memset(target, value, bytes);
  });
}

cudaError_t cudaMemset(void* target, int value, std::size_t bytes) {
  const cudaError_t code = cudaMemsetAsync(target, value, bytes, nullptr);
  return code == cudaSuccess ? cudaStreamSynchronize(nullptr) : code;
}
