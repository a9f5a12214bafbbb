/// What a run says at its start, against figures that Megatron printed and counts of engines that were built.

#include "tessera/engine/run_facts.hpp"

#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "tessera/base/config_file.hpp"
#include "tessera/engine/build.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {
namespace {

using Lines = std::vector<std::string>;

/// GPT-2 large on 2 x 2 ranks: Accelerate's page about Megatron-LM shows what Megatron printed for it.
TEST(RunFacts, ParametersAreThoseThatMegatronPrints) {
  const Config config = parse_config(
      "model: {family: gpt2, num_layers: 36, hidden_size: 1280, num_heads: 20, vocab_size: 50432}\n"
      "parallel: {tensor: 2, pipeline: 2, pipeline_layout: \"18,18\"}\n",
      "test");
  EXPECT_EQ(model_lines(config),
            (Lines{" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 210753280",
                   " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 210753280",
                   " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 209445120",
                   " > number of parameters on (tensor, pipeline) model parallel rank (1, 1): 209445120",
                   " > vocabulary of 50432 in 2 parts (2 x 25216), nothing padded"}));
}

TEST(RunFacts, TheVocabularyIsDividedAsItIs) {
  const Config config =
      parse_config("model: {num_layers: 1, hidden_size: 12, num_heads: 6}\nparallel: {tensor: 3}\n", "test");
  EXPECT_EQ(model_lines(config).back(),
            " > vocabulary of 50257 in 3 parts (16753, 2 x 16752), nothing padded");
}

TEST(RunFacts, ParametersAreThoseOfTheRanksEngines) {
  Config config = tiny_llama(0.0);
  config.model.vocab_size = 37;
  config.model.ffn_hidden_size = 20;
  config.parallel.tensor = 2;
  config.parallel.pipeline = 2;
  const Lines lines = model_lines(config);
  std::map<std::string, std::int64_t> counted;
  std::mutex mutex;
  run_local(4, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    std::int64_t sum = 0;
    for (const Parameter* p : engine->model().parameters()) sum += p->shape().numel();
    const MeshCoordinates& at = engine->mesh().coordinates();
    const std::lock_guard lock(mutex);
    counted[::tessera::detail::concat("(", at.tp, ", ", at.pp, ")")] = sum;
  });
  ASSERT_EQ(counted.size(), 4u);
  for (const auto& [place, sum] : counted) {
    const std::string line = ::tessera::detail::concat(
        " > number of parameters on (tensor, pipeline) model parallel rank ", place, ": ", sum);
    EXPECT_NE(std::find(lines.begin(), lines.end(), line), lines.end()) << line;
  }
}

TEST(RunFacts, SaysHowItTrains) {
  const Config config = parse_config(
      "training: {micro_batch_size: 2, global_batch_size: 24, seq_length: 128, steps: 500}\n"
      "optimizer: {lr: 6.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, clip_grad: 1.0}\n"
      "lr_schedule: {style: cosine, warmup_steps: 50, decay_steps: 400, min_lr: 6.0e-5}\n",
      "test");
  EXPECT_EQ(training_lines(config, 3),
            (Lines{"number of micro-batches: 4 of 2 samples on each of 3 data ranks",
                   "total batch: 24 samples of 128 tokens a step",
                   "optimizer: adamw, lr 0.0006, betas 0.9 and 0.95, eps 1e-08, weight decay 0.1, gradients "
                   "clipped to 1, its state divided among 3 data ranks",
                   "learning rate: cosine, 50 steps of warm-up, down to 6e-05 at step 400, of 500 steps"}));
  const Config plain = parse_config(
      "training: {micro_batch_size: 1, global_batch_size: 2, seq_length: 8, steps: 7}\n"
      "optimizer: {name: sgd, lr: 0.5, momentum: 0.25, weight_decay: 0, clip_grad: 0}\n"
      "lr_schedule: {style: constant}\n"
      "parallel: {zero_stage: 0}\n",
      "test");
  EXPECT_EQ(
      training_lines(plain, 2),
      (Lines{
          "number of micro-batches: 1 of 1 sample on each of 2 data ranks",
          "total batch: 2 samples of 8 tokens a step",
          "optimizer: sgd, lr 0.5, momentum 0.25, weight decay 0, no clipping, its state whole on each of 2 "
          "data ranks",
          "learning rate: constant, of 7 steps"}));
}

}  // namespace
}  // namespace tessera::test
