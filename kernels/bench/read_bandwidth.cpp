/// How fast all threads together read memory: what bounds the writing of a text, whose every token reads all
/// weights once. Prints {"bytes_per_s": ...}, the best of some readings. Usage: read_bandwidth [threads] [MB]

#include <sys/mman.h>

#include <thread>
#include <vector>

#include "kernels/bench/bench.hpp"

namespace {

/// Added up in enough places that no addition waits for the one before it.
float sum_of(const float* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 64;
  float sums[kLanes] = {};
  for (std::int64_t i = 0; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane];
  }
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 512) << 20;
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(std::size_t{2} << 20, static_cast<std::size_t>(bytes)), &std::free);
  madvise(memory.get(), static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  auto* x = static_cast<float*>(memory.get());
  const std::int64_t n = bytes / 4;
  std::fill_n(x, n, 1.0f);
  std::vector<float> sums(static_cast<std::size_t>(threads));
  const double s = tessera::bench::shortest(
      [&] {
        std::vector<std::thread> readers;
        for (int t = 0; t < threads; ++t)
          readers.emplace_back([&, t] {
            const std::int64_t begin = n / threads * t;
            sums[static_cast<std::size_t>(t)] = sum_of(x + begin, n / threads);
          });
        for (std::thread& reader : readers) reader.join();
      },
      1.0);
  // What was read is used.
  if (sums[0] < 0) return 1;
  std::printf("{\"bytes_per_s\": %.0f}\n", static_cast<double>(bytes) / s);
  return 0;
}
