/// How fast samples come from the disk's cache: documents of random length in shuffled order, short samples.
///   loader_bench [MiB of tokens] [tokens a sample] [seconds] [folder]

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "tessera/data/dataset.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/loader.hpp"

using namespace tessera;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Of all threads: tells what work costs on a machine that others use as well.
double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

void write(const std::string& prefix, std::int64_t mebibytes) {
  IndexedDatasetWriter writer(prefix, DType::u16);
  std::mt19937 random(1);
  std::vector<std::int32_t> ids;
  for (std::int64_t tokens = 0; tokens < (mebibytes << 19); tokens += static_cast<std::int64_t>(ids.size())) {
    ids.resize(50 + random() % 1000);
    for (auto& id : ids) id = static_cast<std::int32_t>(random() % 50000);
    writer.add_document(ids);
  }
  writer.finish();
}

/// What a sample costs at least: its bytes copied from a place that is drawn, once they are in memory.
double ceiling(std::int64_t seq_length) {
  std::vector<std::uint16_t> from(std::size_t{1} << 25);
  std::vector<std::int32_t> to(2 * static_cast<std::size_t>(seq_length));
  std::mt19937 random(2);
  std::int64_t samples = 0;
  const double begin = processor_seconds();
  for (; processor_seconds() - begin < 1.0; samples += 100) {
    for (int i = 0; i < 100; ++i) {
      const std::size_t at = random() % (from.size() - to.size());
      for (std::size_t k = 0; k < to.size(); ++k) to[k] = from[at + k / 2];
    }
  }
  return static_cast<double>(samples) / (processor_seconds() - begin);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t mebibytes = argc > 1 ? std::atoll(argv[1]) : 1200;
  const std::int64_t seq_length = argc > 2 ? std::atoll(argv[2]) : 128;
  const double seconds = argc > 3 ? std::atof(argv[3]) : 5;
  const std::filesystem::path folder =
      argc > 4 ? argv[4] : std::filesystem::temp_directory_path() / "loader_bench";
  std::filesystem::create_directories(folder);
  const std::string prefix = (folder / "data").string();
  if (!std::filesystem::exists(prefix + ".idx")) write(prefix, mebibytes);

  auto files = std::make_shared<IndexedDataset>(prefix);
  GptDatasetOptions options;
  options.seq_length = seq_length;
  const auto opening = Clock::now();
  auto samples = std::make_shared<GptDataset>(files, ElementRange{0, files->sequences()}, options);
  std::printf("%lld MiB of tokens, %lld documents, %lld samples of %lld tokens; indices in %.2f s\n",
              static_cast<long long>(files->token_bytes() >> 20), static_cast<long long>(files->documents()),
              static_cast<long long>(samples->size()), static_cast<long long>(seq_length),
              seconds_since(opening));
  const double most = ceiling(seq_length);
  DataLoader loader(samples,
                    {.global_batch_size = 64, .micro_batch_size = 64, .prefetch = 2, .timeout_s = 600});
  std::int64_t count = 0;
  const auto begin = Clock::now();
  const double used = processor_seconds();
  while (seconds_since(begin) < seconds && loader.next()) count += 64;
  const double rate = static_cast<double>(count) / (processor_seconds() - used);
  std::printf("%.0f samples a second, %.0f a processor second; copying alone %.0f (%.2f of it)\n",
              static_cast<double>(count) / seconds_since(begin), rate, most, rate / most);
  return 0;
}
