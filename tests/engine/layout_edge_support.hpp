#pragma once
/// Small models for odd cases of layouts, and anything done with an engine compared with one process.

#include <string>
#include <vector>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test::edge {

inline constexpr std::int64_t kSeq = 8, kVocab = 61;

inline Config edge_config(Family family, const Overrides& overrides) {
  Settings c;
  c.model = {.family = family,
             .num_layers = 4,
             .hidden_size = 24,
             .num_heads = 4,
             .ffn_hidden_size = 32,
             .vocab_size = kVocab,
             .max_positions = 16,
             .dropout = 0.1,
             .attention_dropout = 0.1,
             .init_std = 0.1};
  if (family == Family::llama) c.model.num_kv_heads = 2;
  c.optimizer.lr = 1e-3;
  c.optimizer.eps = 1e-3;  // few samples: some elements of a gradient are all rounding
  c.lr_schedule.style = LrStyle::constant;
  c.training.seq_length = kSeq;
  if (family.name.ends_with("t5")) c.training.decoder_seq_length = kSeq;
  c.training.global_batch_size = 8;
  c.training.micro_batch_size = 1;
  c.device.threads = 1;
  return with_overrides(c, overrides);
}

inline const Overrides kTp2{"parallel.tensor=2"};
inline const Overrides kTp2Sp{"parallel.tensor=2", "parallel.sequence=true"};
inline const Overrides kPp2{"parallel.pipeline=2"};
inline const Overrides kCp2{"parallel.context=2"};
inline const Overrides kZbV{"parallel.pipeline=2", "parallel.schedule=zb-v"};
inline const Overrides kAll{"parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2",
                            "parallel.data=2"};

inline Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Batch own_part(const Engine& engine, const Batch& whole) {
  const int ranks = engine.mesh().shape().dp;
  const std::int64_t micro = engine.options().micro_batch_size;
  return ranks == 1 ? whole : data_part(whole, engine.mesh().coordinates().dp, ranks, micro);
}

/// Something done with an engine; the numbers it returns are the same on every rank of every layout.
using Body = std::function<std::vector<double>(Engine&)>;

/// Numbers, gradient (if one is there) and weights of `body` on a layout against one process.
inline void expect_serial(const Config& config, int ranks, const Body& body) {
  Config alone = config;
  alone.parallel = {};
  alone.training.recompute = Recompute::none;
  const auto serial = build_engine(alone);
  const std::vector<double> numbers = body(*serial);
  const bool trained = serial->params().gradient().finished_calls() > 0;
  const WholeTensors gradients = trained ? whole_tensors(*serial, true) : WholeTensors();
  const WholeTensors weights = whole_tensors(*serial, false);
  std::mutex mutex;
  run_ranks(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const std::vector<double> own = body(*engine);
    std::map<std::string, std::pair<double, double>> errors;
    for (const Parameter* p : engine->params().parameters()) {
      auto& [gradient, weight] = errors[p->name()];
      if (trained) gradient = local_error(*p, engine->params().gradient().whole(*p), gradients.at(p->name()));
      weight = local_error(*p, engine->params().weights().whole(*p), weights.at(p->name()));
    }
    const std::lock_guard lock(mutex);
    ASSERT_EQ(own.size(), numbers.size());
    for (std::size_t i = 0; i < own.size(); ++i)
      EXPECT_NEAR(own[i], numbers[i], 1e-5 * std::abs(numbers[i])) << "number " << i;
    EXPECT_EQ(engine->params().gradient().finished_calls() > 0, trained);
    for (const auto& [name, error] : errors) {
      EXPECT_LE(error.first, 1e-5) << "gradient of " << name;
      EXPECT_LE(error.second, 5e-5) << "weight " << name;
    }
  });
}

/// Two steps, and the gradient of a third.
inline Body steps_on(const std::vector<Batch>& batches) {
  return [batches](Engine& engine) {
    std::vector<double> numbers;
    for (const Batch& batch : batches) {
      if (!numbers.empty()) numbers.push_back(engine.update().grad_norm);
      numbers.push_back(engine.forward_backward(own_part(engine, batch)));
    }
    return numbers;
  };
}
inline Body three_steps(std::int64_t samples, std::int64_t length, std::int32_t vocab = kVocab) {
  std::vector<Batch> batches;
  for (unsigned i = 0; i < 3; ++i) batches.push_back(random_batch(samples, length, 70 + i, vocab));
  return steps_on(batches);
}

/// Samples with padding in front or behind, and with two documents each whose positions begin again.
inline Batch padded_and_packed(unsigned seed) {
  Batch batch = random_batch(8, kSeq, seed, kVocab);
  for (std::int32_t i = 0; i < 8; ++i) {
    batch.key_begin.push_back(i % 4 == 1 ? 2 : 0);
    batch.key_end.push_back(i % 4 == 2 ? 5 : static_cast<std::int32_t>(kSeq));
    for (std::int32_t s = 0; s < kSeq; ++s) {
      const std::int32_t cut = 2 + i % 5;
      const bool second = i % 4 == 3 && s >= cut;
      batch.document_ids.push_back(second ? 1 : 0);
      batch.position_ids.push_back(second ? s - cut : s);
      const bool padding = s < batch.key_begin.back() || s >= batch.key_end.back();
      if (padding) batch.labels[static_cast<std::size_t>(i * kSeq + s)] = kIgnoredLabel;
    }
  }
  return batch;
}

}  // namespace tessera::test::edge
