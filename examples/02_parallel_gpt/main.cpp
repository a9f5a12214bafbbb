// A small GPT on any layout. Started alone it trains in one process. The same program, started several times
// by `tessera launch --num_processes 4 parallel_gpt 2 2`, shares the work out, here as 2 tensor ranks times 2
// pipeline stages, and prints the same losses. What tensor ranks and stages leave over of the processes are
// data ranks. torchrun, mpirun and srun can start it as well.

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <tessera/tessera.hpp>

using namespace tessera;

constexpr std::int64_t kSamples = 12, kLength = 32;  // of a step, over all ranks

// Sample `number` of step `step`: words in a random order. No rank comes into it.
std::string text(std::int64_t step, std::int64_t number) {
  static const char* const words[] = {"the ",    "small ", "blue ", "tile ", "fits ",
                                      "beside ", "an ",    "old ",  "stone "};
  std::mt19937 random(static_cast<unsigned>(step * kSamples + number));
  std::string line;
  while (line.size() <= kLength) line += words[random() % std::size(words)];
  return line.substr(0, kLength + 1);
}

// The part of data rank `rank`. The numbers of the samples (sample0) make dropout the same on any layout.
Batch data_share(std::int64_t step, int rank, int ranks) {
  Batch batch{.batch = kSamples / ranks, .seq_length = kLength};
  batch.sample0 = rank * batch.batch;
  for (std::int64_t i = 0; i < batch.batch; ++i) {
    const std::string line = text(step, batch.sample0 + i);
    batch.tokens.insert(batch.tokens.end(), line.begin(), line.end() - 1);
    batch.labels.insert(batch.labels.end(), line.begin() + 1, line.end());
  }
  return batch;
}

Config small_gpt(int tensor, int pipeline) {
  Settings config;
  config.model = {
      .num_layers = 2, .hidden_size = 64, .num_heads = 4, .vocab_size = 128, .max_positions = kLength};
  config.model.dropout = 0.1;
  config.parallel.tensor = tensor;
  config.parallel.sequence = tensor > 1;
  config.parallel.pipeline = pipeline;
  config.optimizer.lr = 3e-3;
  config.training.steps = 20;
  config.training.seq_length = kLength;
  config.training.global_batch_size = kSamples;
  config.training.micro_batch_size = 1;
  config.device.threads = 1;
  return config;
}

// Every rank comes here, each with its own end of `world`.
void train(const Config& config, std::shared_ptr<Communicator> world) {
  const bool first = world->rank() == 0;
  const auto engine = build_engine(config, /*trainable=*/true, std::move(world));
  const ProcessMesh& mesh = engine->mesh();
  for (std::int64_t step = 0; step < config.training.steps; ++step) {
    const Batch share = data_share(step, mesh.coordinates().dp, mesh.shape().dp);
    const StepReport report = engine->step(share);  // the loss is that of the whole batch, on every rank
    if (first) std::cout << "step " << step + 1 << "  loss " << report.loss << std::endl;
  }
}

int main(int argc, char** argv) try {
  const Environment environment = read_environment();
  Config config = small_gpt(argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? std::atoi(argv[2]) : 1);
  config.parallel = resolve_layout(config, environment.world_size.value_or(1));  // or says all that is wrong
  const std::string open = warning_of_open_world(environment);  // several machines without a secret
  if (!open.empty()) std::cerr << "warning: " << open << std::endl;
  const auto world = connect_world(environment, /*timeout_s=*/60);
  try {
    train(config, world);
  } catch (const std::exception& error) {
    tell_others(*world, error);  // their messages then begin with the reason
    throw;
  }
} catch (const CommunicationError& error) {
  std::cerr << "error: " << error.what() << std::endl;
  return kLostPeerExitCode;  // another rank was lost: the launcher looks for the one that failed first
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << std::endl;
  return 1;
}
