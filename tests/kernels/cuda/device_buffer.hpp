#pragma once
/// Memory of CUDA device 0 for tests of launchers, and a stream. `offset` elements lie before the data, so
/// that rows can be misaligned.

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "device/cuda.hpp"
#include "kernels/api/launch.hpp"

#define SKIP_WITHOUT_CUDA() \
  if (::tessera::cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << ::tessera::cuda::why_none()

namespace tessera::test {

class DeviceStream {
 public:
  DeviceStream() : stream_(cuda::create_stream(0, false)) {}
  ~DeviceStream() { cuda::destroy_stream(stream_); }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  kernels::Launch launch() const { return {stream_, 1}; }
  void* get() const { return stream_; }
  void synchronize() const { cuda::synchronize(stream_); }

 private:
  void* stream_;
};

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer(const DeviceStream& stream, const std::vector<T>& values, std::size_t offset = 0)
      : stream_(stream), size_(values.size()), offset_(offset) {
    memory_ = static_cast<T*>(cuda::allocate(0, (offset + values.size() + 1) * sizeof(T)));
    cuda::copy(data(), values.data(), size_ * sizeof(T), stream_.get());
    stream_.synchronize();
  }
  ~DeviceBuffer() { cuda::deallocate(memory_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return memory_ + offset_; }
  /// Waits for the stream.
  std::vector<T> host() const {
    std::vector<T> values(size_);
    cuda::copy(values.data(), data(), size_ * sizeof(T), stream_.get());
    stream_.synchronize();
    return values;
  }

 private:
  const DeviceStream& stream_;
  std::size_t size_, offset_;
  T* memory_;
};

}  // namespace tessera::test
