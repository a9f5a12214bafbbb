// Tessera's side of tests/bench/compare_torch.py and compare_layouts.py: trains a GPT-2 on random tokens, a
// number of steps at a time. Usage: train_bench BATCH SEQ WARMUP [section.key=value ...]. Prints "ready"
// after WARMUP steps; then for every line "N" on stdin runs N steps and prints {"seconds": [...],
// "rss_bytes": ..., "loss": ..., ...} on one line. Under a launcher's environment it is one rank of the job;
// BATCH counts the samples of all.

#include <sys/resource.h>

#include <chrono>
#include <iostream>
#include <random>

#include "tessera/base/env.hpp"
#include "tessera/engine/metrics.hpp"
#include "tessera/tessera.hpp"

using namespace tessera;

namespace {

Batch random_batch(std::int64_t batch, std::int64_t seq, std::int64_t vocab, std::mt19937_64& random) {
  Batch b{.batch = batch, .seq_length = seq};
  std::uniform_int_distribution<std::int32_t> token(0, static_cast<std::int32_t>(vocab - 1));
  for (std::int64_t i = 0; i < batch * seq; ++i) {
    b.tokens.push_back(token(random));
    b.labels.push_back(token(random));
  }
  return b;
}

long minor_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void run(const std::vector<std::string>& args) {
  const std::int64_t batch = std::stoll(args[0]), seq = std::stoll(args[1]), warmup = std::stoll(args[2]);
  const Config config = parse_config("data: {path: none}", "defaults", {args.begin() + 3, args.end()});
  const auto world = connect_world(read_environment(), 600);
  const auto engine = build_engine(config, true, world);
  const ProcessMesh& mesh = engine->mesh();
  std::mt19937_64 random(static_cast<std::uint64_t>(1 + mesh.coordinates().dp));
  double loss = 0.0;
  StepTimes times;
  auto step = [&] {
    const Batch b = random_batch(batch / mesh.shape().dp, seq, config.model.vocab_size, random);
    const auto start = std::chrono::steady_clock::now();
    const StepReport report = engine->step(b);
    loss = report.loss;
    times = report.times;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (std::int64_t i = 0; i < warmup; ++i) step();
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line) && !line.empty();) {
    const std::int64_t n = std::stoll(line);
    const std::uint64_t asked = engine->ctx().allocator->stats().system_allocations;
    const long faults = minor_faults();
    std::cout << "{\"seconds\": [";
    for (std::int64_t i = 0; i < n; ++i) std::cout << (i ? ", " : "") << step();
    std::cout << "], \"rss_bytes\": " << peak_memory_bytes(engine->ctx()) << ", \"loss\": " << loss
              << ", \"system_allocations\": " << engine->ctx().allocator->stats().system_allocations - asked
              << ", \"allocator_bytes\": " << engine->ctx().allocator->stats().system_bytes
              << ", \"allocator_peak_used\": " << engine->ctx().allocator->stats().peak_used_bytes
              << ", \"minor_faults\": " << minor_faults() - faults << ", \"forward_s\": " << times.forward
              << ", \"backward_s\": " << times.backward << ", \"update_s\": " << times.update << "}"
              << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: train_bench BATCH SEQ WARMUP [section.key=value ...]\n";
    return 2;
  }
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
