// How fast texts grow beside the bound of reading the weights once for every token. Usage: generate_bench
// CONFIG PROMPT NEW BATCH[,BATCH...] [section.key=value ...]: random prompts of PROMPT tokens, to each of
// which NEW are added; CONFIG is a file, of which the model, the precision and the device count. Prints a
// line of JSON for each batch. What a text costs before its second token is measured alone and taken off.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>
#include <sstream>

#include "tessera/base/config_file.hpp"
#include "tessera/engine/generate.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/reduce.hpp"
#include "tessera/tessera.hpp"

using namespace tessera;

namespace {

constexpr int kRounds = 3;

double seconds_of(const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::ranges::sort(times);
  return times[kRounds / 2];
}

/// Of a sum over more than any cache holds.
double bytes_read_per_s(const ExecCtx& ctx) {
  const std::int64_t count = ctx.device().is_cuda() ? std::int64_t{1} << 28 : std::int64_t{1} << 26;
  const Tensor x = Tensor::empty(ctx, {count}, DType::f32);
  ops::fill_constant(ctx, x, 1.0f);
  ops::sum(ctx, x);
  ctx.stream->synchronize();
  constexpr int kTimes = 10;
  const double s = seconds_of([&] {
    for (int i = 0; i < kTimes; ++i) ops::sum(ctx, x);
    ctx.stream->synchronize();
  });
  return kTimes * static_cast<double>(x.nbytes()) / s;
}

/// Every matrix is read whole for a token; of tables of tokens and positions, unless one is the head, a row.
double weight_bytes(Engine& engine, const Config& config) {
  double values = 0;
  for (const Parameter* parameter : engine.params().parameters()) {
    const std::string& name = parameter->name();
    const bool table = name.starts_with("embedding.") &&
                       (name != "embedding.word_embeddings.weight" || !config.model.tied_head);
    if (parameter->shape().rank() == 2 && !table) values += static_cast<double>(parameter->shape().numel());
  }
  return values * (config.training.precision == Precision::fp32 ? 4.0 : 2.0);
}

void measure(Engine& engine, const Config& config, std::int64_t batch, std::int64_t prompt,
             std::int64_t added, double bytes_per_s) {
  std::mt19937 random(1);
  std::uniform_int_distribution<std::int32_t> token(0,
                                                    static_cast<std::int32_t>(config.model.vocab_size - 1));
  std::vector<std::vector<std::int32_t>> prompts(static_cast<std::size_t>(batch));
  for (auto& each : prompts) {
    for (std::int64_t i = 0; i < prompt; ++i) each.push_back(token(random));
  }
  Generator generator(engine);
  const auto write = [&](std::int64_t tokens) {
    generator.run(prompts, {.max_new_tokens = tokens, .top_k = 40, .seed = 1});
  };
  write(4);
  const double first = seconds_of([&] { write(1); }), whole = seconds_of([&] { write(added); });
  const double tokens = static_cast<double>(batch * (added - 1)) / (whole - first);
  const double bound = static_cast<double>(batch) * bytes_per_s / weight_bytes(engine, config);
  const StreamGraph::Stats graph = generator.graph();
  std::cout << "{\"batch\": " << batch << ", \"tokens_per_s\": " << tokens
            << ", \"bound_tokens_per_s\": " << bound << ", \"of_bound\": " << tokens / bound
            << ", \"prefill_s\": " << first << ", \"bytes_per_s\": " << bytes_per_s
            << ", \"passes_plain\": " << graph.plain
            << ", \"passes_recorded\": " << graph.launched - graph.replayed
            << ", \"passes_replayed\": " << graph.replayed << "}" << std::endl;
}

void run(const std::vector<std::string>& args) {
  std::vector<std::string> overrides = {"data.path=none"};
  overrides.insert(overrides.end(), args.begin() + 4, args.end());
  const Config config = load_config(args[0], overrides);
  const auto engine = build_engine(config, false);
  const double bytes_per_s = bytes_read_per_s(engine->ctx());
  std::istringstream batches(args[3]);
  for (std::string batch; std::getline(batches, batch, ',');)
    measure(*engine, config, std::stoll(batch), std::stoll(args[1]), std::stoll(args[2]), bytes_per_s);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: generate_bench CONFIG PROMPT NEW BATCH[,BATCH...] [section.key=value ...]\n";
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
