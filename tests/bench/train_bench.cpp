// Tessera's side of tests/bench/compare_torch.py and compare_layouts.py: trains a model on random tokens, a
// number of steps at a time. Usage: train_bench BATCH SEQ WARMUP [section.key=value ...]. Prints "ready"
// after WARMUP steps; then for every line "N" on stdin runs N steps and prints {"seconds": [...],
// "rss_bytes": ..., "loss": ..., ...} on one line. Under a launcher's environment it is one rank of the job;
// BATCH counts the samples of all.

#include <sys/resource.h>

#include <chrono>
#include <iostream>
#include <random>

#include "tessera/base/env.hpp"
#include "tessera/base/families.hpp"
#include "tessera/engine/metrics.hpp"
#include "tessera/tessera.hpp"

using namespace tessera;

namespace {

/// As the family's data are: the next tokens, one in seven tokens masked, or what a decoder says of another
/// sequence.
Batch random_batch(std::int64_t batch, const Config& config, std::mt19937_64& random) {
  const ModelSpec::Samples samples = spec_of(config.model.family).samples;
  const SampleLengths lengths = sample_lengths(config);
  Batch b{.batch = batch, .seq_length = lengths.tokens};
  std::uniform_int_distribution<std::int32_t> token(0,
                                                    static_cast<std::int32_t>(config.model.vocab_size - 1));
  for (std::int64_t i = 0; i < batch * lengths.tokens; ++i) {
    b.tokens.push_back(token(random));
    const std::int32_t label = token(random);
    const bool guessed = samples != ModelSpec::Samples::masked_sentences || b.tokens.back() % 7 == 0;
    b.labels.push_back(guessed ? label : kIgnoredLabel);
  }
  b.encoder_seq_length = lengths.encoder;
  for (std::int64_t i = 0; i < batch * lengths.encoder; ++i) b.encoder_tokens.push_back(token(random));
  return b;
}

long minor_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void run(const std::vector<std::string>& args) {
  const std::int64_t batch = std::stoll(args[0]), warmup = std::stoll(args[2]);
  std::vector<std::string> overrides = {"training.seq_length=" + args[1]};
  overrides.insert(overrides.end(), args.begin() + 3, args.end());
  const Config config = parse_config("data: {path: none}", "defaults", overrides);
  const auto world = connect_world(read_environment(), 600);
  const auto engine = build_engine(config, true, world);
  const ProcessMesh& mesh = engine->mesh();
  std::mt19937_64 random(static_cast<std::uint64_t>(1 + mesh.coordinates().dp));
  double loss = 0.0;
  StepTimes times;
  auto step = [&] {
    const Batch b = random_batch(batch / mesh.shape().dp, config, random);
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
