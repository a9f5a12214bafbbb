#pragma once
/// What benches of CUDA kernels share: timing on the GPU, random memory, and lines beside the rate of a copy.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "device/cuda.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/api/reduce.hpp"
#include "tessera/base/error.hpp"

namespace tessera::bench {

using std::int32_t;
using std::int64_t;

class Gpu {
 public:
  Gpu() : stream_(cuda::create_stream(0, false)), begin_(cuda::create_event()), end_(cuda::create_event()) {}
  ~Gpu() {
    cuda::destroy_event(begin_);
    cuda::destroy_event(end_);
    cuda::destroy_stream(stream_);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  kernels::Launch launch() const { return {stream_, 1}; }

  /// The median over a second of calls of f, so that clocks are those of sustained work; in seconds on the
  /// GPU. `before` runs ahead of each and is not timed.
  double median(const std::function<void()>& before, const std::function<void()>& f) const {
    std::vector<double> times;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (int i = 0; i < 25 || (i < 20000 && std::chrono::steady_clock::now() < end); ++i) {
      before();
      cuda::record(begin_, stream_);
      f();
      cuda::record(end_, stream_);
      cuda::synchronize_event(end_);
      if (i >= 4) times.push_back(cuda::seconds_between(begin_, end_));
    }
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                     times.end());
    return times[times.size() / 2];
  }

 private:
  void* stream_;
  void* begin_;
  void* end_;
};

class Memory {
 public:
  explicit Memory(std::size_t bytes) : data_(cuda::allocate(0, bytes)) {
    TESSERA_ENSURE(DeviceError, data_ != nullptr, "the GPU has no ", bytes,
                   " bytes left; run the bench on an idle one");
  }
  ~Memory() { cuda::deallocate(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  double* doubles() const { return static_cast<double*>(data_); }
  int32_t* ints() const { return static_cast<int32_t*>(data_); }

 private:
  void* data_;
};

/// n normal variates.
class Random : public Memory {
 public:
  Random(const Gpu& gpu, DType dtype, int64_t n) : Memory(static_cast<std::size_t>(n) * size_of(dtype)) {
    const auto site =
        static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(data()) >> 8);  // its own values
    const int64_t piece = std::min<int64_t>(n, 1 << 24);
    const Memory values(static_cast<std::size_t>(piece) * 4);
    for (int64_t first = 0; first < n; first += piece) {
      const int64_t count = std::min(piece, n - first);
      kernels::cuda::fill_normal({.rows = 1,
                                  .cols = count,
                                  .col0 = first,
                                  .global_cols = n,
                                  .key = {.seed = 1, .site = site},
                                  .out = values.floats()},
                                 gpu.launch());
      kernels::cuda::axpby(
          {.n = count,
           .y_dtype = dtype,
           .x = values.data(),
           .y = static_cast<char*>(data()) + static_cast<std::size_t>(first) * size_of(dtype)},
          gpu.launch());
    }
    cuda::synchronize(gpu.launch().stream);
  }
};

/// n integers below `bound`, every time the same.
class Indices : public Memory {
 public:
  Indices(const Gpu& gpu, int64_t n, int64_t bound) : Memory(static_cast<std::size_t>(n) * 4) {
    std::vector<int32_t> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<int32_t>(i * 4999 % bound));
    cuda::copy(data(), values.data(), values.size() * 4, gpu.launch().stream);
    cuda::synchronize(gpu.launch().stream);
  }
};

/// Measures with a cold cache, and prints.
class Report {
 public:
  explicit Report(const Gpu& gpu)
      : gpu_(gpu), cold_(gpu, DType::f32, kCold), sums_(8 * (kernels::kSumParts + 1)) {
    const Random x(gpu, DType::f32, kCold);
    copy_bytes_s_ = 8.0 * kCold / seconds([&] { cuda::copy(x.data(), cold_.data(), 4 * kCold, stream()); });
    std::printf("copy of %lld MiB: %.1f GB/s\n", static_cast<long long>(kCold >> 18), 1e-9 * copy_bytes_s_);
  }
  void row(const std::string& name, double bytes, const std::function<void()>& f) const {
    const double s = seconds(f);
    std::printf("  %-34s %9.2f us %8.1f GB/s %5.1f %% of copy\n", name.c_str(), 1e6 * s, 1e-9 * bytes / s,
                1e2 * bytes / s / copy_bytes_s_);
  }
  const Gpu& gpu() const { return gpu_; }

 private:
  static constexpr int64_t kCold = 1 << 26;  // floats, more than any cache

  void* stream() const { return gpu_.launch().stream; }
  /// Reading something else first leaves nothing of f's operands in the cache, nor anything to be written
  /// back; and it lasts longer than the launches of f, so that they are not what is measured.
  double seconds(const std::function<void()>& f) const {
    const kernels::Sum read{
        .n = kCold, .x = cold_.floats(), .out = sums_.doubles(), .scratch = sums_.doubles() + 1};
    return gpu_.median([&] { kernels::cuda::sum(read, gpu_.launch()); }, f);
  }

  const Gpu& gpu_;
  Random cold_;
  Memory sums_;
  double copy_bytes_s_ = 0.0;
};

}  // namespace tessera::bench
