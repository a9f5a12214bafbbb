/// AdamW as the CPU updates, and optimizer state that lies on a disk, beside what memory and disk can do.
///
///   update_bench adam fp32|bf16|split ELEMENTS THREADS REPEATS
///   update_bench disk FOLDER ELEMENTS THREADS
///
/// Prints one line of JSON. adam: {"seconds": [of each update], "bytes": what one must read and write}. disk:
/// {"seconds": an update, "walk_seconds": its way to the disk and back alone, "raw_seconds": the same reads
/// and writes by as many threads that do nothing else, "bytes": read and written}.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernels/api/optimizer.hpp"
#include "kernels/bench/bench.hpp"
#include "tessera/base/error.hpp"
#include "tessera/optim/tile_walk.hpp"

namespace {

using namespace tessera;
using bench::Array;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// AdamW over some elements, of which none are alike; two groups take turns as matrices and vectors do.
class Update {
 public:
  Update(std::int64_t n, const std::string& weights, int threads)
      : grad_(DType::f32, n),
        main_(DType::f32, n),
        model_(DType::bf16, n),
        low_(DType::bf16, n),
        threads_(threads),
        split_(weights == "split"),
        copies_(weights == "bf16") {
    for (std::int64_t i = 0; i < n; i += kGroupBlock)
      of_block_.push_back(static_cast<std::uint8_t>(i / (std::int64_t{1} << 20) % 2));
  }
  void run(std::int64_t begin, std::int64_t count, float* m, float* v) {
    kernels::Adam adam{.n = count,
                       .groups = {factors_, 2, of_block_.data() + begin / kGroupBlock},
                       .state = &state_,
                       .grad = grad_.floats() + begin,
                       .m = m,
                       .v = v};
    if (!split_) adam.main = main_.floats() + begin;
    if (split_) adam.low = static_cast<std::uint16_t*>(low_.data()) + begin;
    if (split_ || copies_) adam.model = static_cast<bfloat16*>(model_.data()) + begin;
    kernels::cpu::adam(adam, {.threads = threads_});
  }
  /// Of gradient, weights and moments, read and written.
  double bytes_per_element() const { return split_ ? 28 : copies_ ? 30 : 28; }

 private:
  Array grad_, main_, model_, low_;
  int threads_;
  bool split_, copies_;
  UpdateState state_;
  std::vector<std::uint8_t> of_block_;
  kernels::GroupFactors factors_[2] = {
      {{1.0f, 0.0f, 0.1f, 0.999f, 0.001f, 1e-4f, 1.0f, 1e-8f}, {1e-4f, 0.0f, 0.9f}},
      {{0.9999f, 0.0f, 0.1f, 0.999f, 0.001f, 1e-4f, 1.0f, 1e-8f}, {1e-4f, 0.1f, 0.9f}}};
};

void adam(const std::string& weights, std::int64_t n, int threads, int repeats) {
  Update update(n, weights, threads);
  Array m(DType::f32, n), v(DType::f32, n);
  std::fill_n(v.floats(), n, 1.0f);  // squares: not negative
  update.run(0, n, m.floats(), v.floats());
  std::printf("{\"seconds\": [");
  for (int i = 0; i < repeats; ++i)
    std::printf("%s%.6f", i == 0 ? "" : ", ", seconds_of([&] { update.run(0, n, m.floats(), v.floats()); }));
  std::printf("], \"bytes\": %.0f}\n", update.bytes_per_element() * static_cast<double>(n));
}

constexpr std::size_t kLargePage = std::size_t{2} << 20;

/// Each thread reads a block and writes it back, until there are no more.
double raw_seconds(const std::string& folder, std::size_t block, std::int64_t blocks, int threads) {
  int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT, 0600);
  if (file < 0) file = ::open(folder.c_str(), O_TMPFILE | O_RDWR, 0600);
  TESSERA_ENSURE(IoError, file >= 0, "no file can be made in ", folder);
  TESSERA_ENSURE(IoError, ::posix_fallocate(file, 0, static_cast<off_t>(block) * blocks) == 0, folder,
                 " has no room");
  std::atomic<std::int64_t> next = 0;
  std::atomic<bool> failed = false;
  const auto work = [&] {
    // In large pages, as those of the allocator are: small ones take several times as long to send.
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kLargePage, block),
                                                             &std::free);
    madvise(memory.get(), block, MADV_HUGEPAGE);
    for (std::int64_t i = next++; i < blocks; i = next++) {
      const off_t at = static_cast<off_t>(block) * i;
      const auto size = static_cast<ssize_t>(block);
      if (::pread(file, memory.get(), block, at) != size || ::pwrite(file, memory.get(), block, at) != size)
        failed = true;
    }
  };
  const auto pass = [&] {
    next = 0;
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i) workers.emplace_back(work);
    for (std::thread& worker : workers) worker.join();
  };
  pass();  // blocks that were never written are read without the disk
  const double seconds = seconds_of(pass);
  ::close(file);
  TESSERA_ENSURE(IoError, !failed, "reading and writing in ", folder, " failed");
  return seconds;
}

void disk(const std::string& folder, std::int64_t n, int threads) {
  const ExecCtx ctx = ExecCtx::cpu(threads);
  const OffloadConfig config{.optimizer = OffloadTo::nvme, .path = folder};
  const auto place = std::make_shared<OffloadPlace>(ctx, config, 0);
  std::vector<TileWalk::Part> parts;
  for (const char* kind : {"adam_m", "adam_v"})
    parts.push_back({std::make_shared<OffloadedBuffer>(place, config.optimizer, kind, DType::f32, n)});
  TileWalk state(place, parts);
  std::vector<std::int64_t> tiles;
  for (std::int64_t i = 0; i * state.tile() < n; ++i) tiles.push_back(i);
  Update update(static_cast<std::int64_t>(tiles.size()) * state.tile(), "fp32", threads);
  const auto pass = [&] {
    return seconds_of([&] {
      state.walk(tiles, [&](std::int64_t tile, const std::vector<Tensor>& of_tile) {
        update.run(tile * state.tile(), state.tile(), static_cast<float*>(of_tile[0].raw()),
                   static_cast<float*>(of_tile[1].raw()));
      });
    });
  };
  pass();
  const double whole = pass();
  const double walk = seconds_of([&] { state.walk(tiles, [](std::int64_t, const std::vector<Tensor>&) {}); });
  const auto blocks = static_cast<std::int64_t>(tiles.size()) * 2;
  const double raw = raw_seconds(folder, static_cast<std::size_t>(state.tile()) * 4, blocks,
                                 static_cast<int>(config.buffers));
  std::printf("{\"seconds\": %.6f, \"walk_seconds\": %.6f, \"raw_seconds\": %.6f, \"bytes\": %.0f}\n", whole,
              walk, raw, 2.0 * static_cast<double>(place->on_disk));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 5 && words[0] == "adam") {
    adam(words[1], std::atoll(words[2].c_str()), std::atoi(words[3].c_str()), std::atoi(words[4].c_str()));
  } else if (words.size() == 4 && words[0] == "disk") {
    disk(words[1], std::atoll(words[2].c_str()), std::atoi(words[3].c_str()));
  } else {
    std::fprintf(stderr,
                 "usage: update_bench adam fp32|bf16|split ELEMENTS THREADS REPEATS\n"
                 "       update_bench disk FOLDER ELEMENTS THREADS\n");
    return 2;
  }
}
