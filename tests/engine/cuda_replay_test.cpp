/// A step that is launched again as it was recorded computes what one that is launched piece by piece does,
/// bit for bit, whatever has changed since it was recorded.

#include <map>
#include <random>
#include <set>

#include "tessera/engine/state.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/replay_support.hpp"
#include "tests/engine/stack_support.hpp"

namespace tessera::test::graph_replay {
namespace {

class CudaGraphReplay : public FolderTest {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs a CUDA device";
    FolderTest::SetUp();
  }
};

/// Runs the script with and without graphs and compares all it saw. Returns the run with graphs.
Seen compare(Config config, const Script& script) {
  config.device.type = DeviceChoice::cuda;
  Seen runs[2];
  for (const bool graph : {false, true}) {
    config.device.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
    const auto engine = build_engine(config);
    runs[graph] = run_of(*engine, script);
  }
  EXPECT_EQ(bits_of(runs[0].numbers), bits_of(runs[1].numbers));
  EXPECT_EQ(runs[0].weights, runs[1].weights);
  EXPECT_EQ(runs[0].graph.replayed, 0u);
  return runs[1];
}

/// A batch whose labels that count differ in number from step to step.
Batch ragged_batch(std::int64_t samples, unsigned step) {
  Batch batch = random_batch(samples, 11, 60 + step);
  for (std::size_t i = 0; i < batch.labels.size(); i += 2 + step % 5) batch.labels[i] = -100;
  return batch;
}

/// Steps of which two are under way at a time, as in training.
Script steps(unsigned count, const std::function<Batch(unsigned)>& batch_of) {
  return [=](Engine& engine, Numbers& numbers) {
    for (unsigned step = 0; step < count; ++step) {
      engine.launch_step(batch_of(step));
      if (step > 0) note(numbers, engine.finish_step());
    }
    note(numbers, engine.finish_step());
  };
}

TEST_F(CudaGraphReplay, EveryPrecision) {
  for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp16}) {
    SCOPED_TRACE(name_of(precision));
    Config config = tiny_config(0.1);
    config.training.precision = precision;
    config.lr_schedule.style = LrStyle::cosine;  // another rate for each step
    config.lr_schedule.decay_steps = 30;
    expect_replays(compare(config, steps(9, [](unsigned i) { return random_batch(4, 11, i); })), 9);
  }
}

/// The scale falls until gradients are finite, and rises again.
TEST_F(CudaGraphReplay, TheLossScaleChanges) {
  Config config = tiny_config(0.1);
  config.training.precision = Precision::fp16;
  config.training.initial_loss_scale = 1 << 24;
  config.training.loss_scale_window = 3;
  const Seen run = compare(config, steps(20, [](unsigned i) { return random_batch(4, 11, i); }));
  std::set<double> scales;
  for (std::size_t i = 3; i < run.numbers.size(); i += 6) scales.insert(run.numbers[i]);
  EXPECT_GT(scales.size(), 2u);
  expect_replays(run, 20);
}

/// Micro-batches of 2, 2 and 1 samples, and another number of targets in every step.
TEST_F(CudaGraphReplay, RaggedMicroBatches) {
  Config config = tiny_config(0.1);
  config.training.global_batch_size = 5;
  expect_replays(compare(config, steps(9, [](unsigned i) { return ragged_batch(5, i); })), 9);
}

TEST_F(CudaGraphReplay, Recomputed) {
  for (const Recompute what : {Recompute::full, Recompute::selective}) {
    Config config = tiny_llama(0.1);
    config.training.recompute = what;
    expect_replays(compare(config, steps(6, [](unsigned i) { return ragged_batch(8, i); })), 6);
  }
}

TEST_F(CudaGraphReplay, WhatElseABatchHolds) {
  const auto batch_of = [](unsigned step) {
    Batch batch = ragged_batch(4, step);
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      batch.document_ids.push_back(static_cast<std::int32_t>((i % 11 + step) / 4));
      batch.position_ids.push_back(static_cast<std::int32_t>((i + step) % 11));
    }
    for (std::int32_t i = 0; i < 4; ++i) {
      batch.key_begin.push_back((i + static_cast<std::int32_t>(step)) % 3);
      batch.key_end.push_back(11 - (i + static_cast<std::int32_t>(step)) % 2);
    }
    return batch;
  };
  expect_replays(compare(tiny_config(0.1), steps(7, batch_of)), 7);
}

/// Two losses, each over another number of values.
TEST_F(CudaGraphReplay, LossesOfTwoKinds) {
  Config config = tiny_config();
  config.model = ModelSettings{.family = {"bert"},
                               .num_layers = 2,
                               .hidden_size = 16,
                               .num_heads = 2,
                               .vocab_size = 31,
                               .max_positions = 12,
                               .dropout = 0.1,
                               .attention_dropout = 0.1,
                               .binary_head = true};
  const auto batch_of = [](unsigned step) {
    Batch batch = random_batch(4, 11, step, 31);
    batch.token_types.assign(batch.tokens.size(), static_cast<std::int32_t>(step % 2));
    batch.sample_labels = {0, 1, static_cast<std::int32_t>(step % 2), step % 3 == 0 ? -100 : 1};
    return batch;
  };
  expect_replays(compare(config, steps(7, batch_of)), 7);
}

TEST_F(CudaGraphReplay, AnEncoderBesideADecoder) {
  const auto batch_of = [](unsigned step) {
    Batch batch = random_batch(4, 7, step, 31);
    batch.encoder_seq_length = 13;
    batch.encoder_tokens = random_batch(4, 13, 90 + step, 31).tokens;
    for (std::int32_t i = 0; i < 4; ++i)
      batch.encoder_key_end.push_back(13 - (i + static_cast<std::int32_t>(step)) % 4);
    return batch;
  };
  expect_replays(compare(tiny_t5(0.1), steps(6, batch_of)), 6);
}

/// Each shape has a graph of its own, and what one is recorded with does not touch the other's.
TEST_F(CudaGraphReplay, ShapesInTurn) {
  const auto batch_of = [](unsigned step) {
    return random_batch(step % 3 == 2 ? 2 : 4, step % 3 ? 7 : 11, step);
  };
  expect_replays(compare(tiny_config(0.1), steps(18, batch_of)), 18, 3);
}

/// Several calls before an update, as a script that accumulates makes them: they compute other samples of the
/// step, which dropout tells apart.
TEST_F(CudaGraphReplay, CallsOfAStep) {
  const auto script = [](Engine& engine, Numbers& numbers) {
    for (unsigned step = 0; step < 5; ++step) {
      for (unsigned call = 0; call < 3; ++call)
        numbers.push_back(engine.forward_backward(ragged_batch(4, 3 * step + call), 1.0 / (call + 1.0)));
      numbers.push_back(engine.update().grad_norm);
    }
  };
  expect_replays(compare(tiny_config(0.1), script), 15, 3);
}

/// Calls beyond those that have a graph each are recorded every time.
TEST_F(CudaGraphReplay, ManyCallsOfAStep) {
  const auto script = [](Engine& engine, Numbers& numbers) {
    for (unsigned step = 0; step < 6; ++step) {
      for (unsigned call = 0; call < 7; ++call)
        numbers.push_back(engine.forward_backward(random_batch(2, 11, 7 * step + call), 0.25));
      numbers.push_back(engine.update().grad_norm);
    }
  };
  const Seen run = compare(tiny_config(0.1), script);
  EXPECT_EQ(run.graph.plain, 4u);
  EXPECT_EQ(run.graph.launched, 6u * 7u - 4u);
  EXPECT_EQ(run.graph.replayed, 4u * 3u);  // of calls that have a graph of their own
  EXPECT_EQ(run.because, "micro-batches are cut otherwise, or are other samples of the step");
}

/// An evaluation and a save take memory and give it back.
TEST_F(CudaGraphReplay, EvaluationsAndSavesInBetween) {
  const Config config = tiny_config(0.1);
  int saved = 0;
  const auto script = [&](Engine& engine, Numbers& numbers) {
    for (unsigned step = 0; step < 10; ++step) {
      note(numbers, engine.step(random_batch(4, 11, step)));
      if (step % 3 == 2) numbers.push_back(engine.evaluate(random_batch(9, 13, step)));
      if (step % 4 == 3)
        save_engine(dir_ / std::to_string(saved++), engine, {.step = step + 1, .config = config}, {});
    }
  };
  expect_replays(compare(config, script), 10);
}

/// What a load brings: weights, moments, the loss scale, the number of the step and the seed of dropout.
TEST_F(CudaGraphReplay, LoadsInBetween) {
  Config config = tiny_config(0.1);
  config.training.precision = Precision::fp16;
  config.training.initial_loss_scale = 65536;
  int saved = 0;
  const auto script = [&](Engine& engine, Numbers& numbers) {
    const auto root = dir_ / std::to_string(saved++);
    for (unsigned step = 0; step < 12; ++step) {
      note(numbers, engine.step(random_batch(4, 11, step > 6 ? step - 3 : step)));
      if (step == 3) save_engine(root, engine, {.step = 4, .config = config}, {});
      if (step == 6) resume_engine(resolve_checkpoint(root), engine);
      if (step == 9) engine.progress().seed += 1;
    }
    const std::vector<std::uint64_t> bits = bits_of(numbers);  // 6 of each step: steps 4 to 6 were made twice
    EXPECT_TRUE(std::equal(bits.begin() + 4 * 6, bits.begin() + 7 * 6, bits.begin() + 7 * 6));
  };
  const Seen run = compare(config, script);
  EXPECT_EQ(run.graph.launched, 11u);
  EXPECT_EQ(run.graph.replayed,
            8u);  // the load renews what the optimizer keeps, of which the graph knows nothing
  EXPECT_EQ(run.because, "the seed, what is frozen, or where weights and gradients lie has changed");
}

TEST_F(CudaGraphReplay, OtherCutsAndFrozenParameters) {
  const auto script = [](Engine& engine, Numbers& numbers) {
    for (unsigned step = 0; step < 12; ++step) {
      if (step == 4) engine.set_micro_batches(4);
      if (step == 8) engine.set_frozen({{engine.params().parameters()[1]->name(), ""}});
      note(numbers, engine.step(random_batch(4, 11, step)));
    }
  };
  const Seen run = compare(tiny_config(0.1), script);
  // Since parameters were frozen, which forgets all graphs.
  EXPECT_EQ(run.graph.plain, 1u);
  EXPECT_EQ(run.graph.replayed, 2u);
}

/// Memory that the passes were recorded with belongs to others now: they are recorded anew, and nothing of
/// the others' is overwritten.
TEST_F(CudaGraphReplay, MemoryThatOthersTake) {
  const auto script = [](Engine& engine, Numbers& numbers) {
    std::vector<Tensor> held;
    for (unsigned step = 0; step < 12; ++step) {
      note(numbers, engine.step(random_batch(4, 11, step)));
      if (step % 4 != 3) continue;
      for (const std::int64_t elements : {64, 1000, 20000}) {
        held.push_back(Tensor::empty(engine.ctx(), {elements}, DType::f32));
        ops::fill_constant(engine.ctx(), held.back(), static_cast<float>(step));
      }
      const OpenForward forward = engine.forward(random_batch(2, 7, step), Engine::Output::logits);
      note(numbers, engine.step(random_batch(4, 11, 50 + step)));
      numbers.push_back(static_cast<double>(forward.output.to_floats()[3]));
    }
    for (const Tensor& tensor : held) {
      const std::vector<float> values = tensor.to_floats();
      numbers.insert(numbers.end(), values.begin(), values.end());
    }
  };
  const Seen run = compare(tiny_config(0.1), script);
  EXPECT_EQ(run.because, "others hold memory that it computes in, or memory that it reads was released");
  EXPECT_GT(run.graph.replayed, 2u);
}

/// One of the things that may happen between two steps, and what it gives to compare.
class Anything {
 public:
  explicit Anything(Engine& engine, unsigned seed) : engine_(engine), random_(seed) {}

  void happen(Numbers& numbers) {
    switch (below(16)) {
      case 0:
        return numbers.push_back(engine_.evaluate(random_batch(1 + below(9), 3 + below(13), random_())));
      case 1:
      case 2:
        held_.push_back(Tensor::empty(engine_.ctx(), {std::int64_t{1} << below(16)}, DType::f32));
        return ops::fill_constant(engine_.ctx(), held_.back(), static_cast<float>(held_.size()));
      case 3:
        if (!held_.empty()) held_.erase(held_.begin() + below(static_cast<int>(held_.size())));
        return;
      case 4:
        forwards_.push_back(engine_.forward(random_batch(2, 7, random_()), Engine::Output::token_losses));
        return;
      case 5:
        for (const OpenForward& forward : forwards_) add(numbers, forward.output);
        return forwards_.clear();
      case 6:
        return engine_.ctx().allocator->trim();
      case 7:
        engine_.progress().seed = 7 + static_cast<std::uint64_t>(below(2));
        return;
      case 8:
        return engine_.set_micro_batches(below(3));
      case 9:
        return engine_.set_frozen(below(2) == 0 ? std::map<std::string, std::string>{}
                                                : std::map<std::string, std::string>{
                                                      {engine_.params().parameters()[3]->name(), ""}});
      case 10:
        return calls(numbers);
      default:
        return steps(numbers);
    }
  }
  void end(Numbers& numbers) const {
    for (const Tensor& tensor : held_) add(numbers, tensor);
  }

 private:
  int below(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  static void add(Numbers& numbers, const Tensor& tensor) {
    const std::vector<float> values = tensor.to_floats();
    numbers.insert(numbers.end(), values.begin(), values.end());
  }
  void calls(Numbers& numbers) {
    for (int call = below(4); call >= 0; --call)
      numbers.push_back(engine_.forward_backward(ragged_batch(4, random_()), 0.5 + below(3)));
    numbers.push_back(engine_.update().grad_norm);
  }
  /// As many under way at a time as the optimizer takes.
  void steps(Numbers& numbers) {
    const int ahead = 1 + below(2);
    for (int i = 0; i < ahead; ++i) engine_.launch_step(ragged_batch(below(4) == 0 ? 3 : 4, random_()));
    for (int i = 0; i < ahead; ++i) note(numbers, engine_.finish_step());
  }

  Engine& engine_;
  std::mt19937 random_;
  std::vector<Tensor> held_;
  std::vector<OpenForward> forwards_;
};

TEST_F(CudaGraphReplay, AnythingInBetween) {
  std::uint64_t replayed = 0;
  for (unsigned seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const auto script = [&](Engine& engine, Numbers& numbers) {
      Anything anything(engine, seed);
      for (int i = 0; i < 70; ++i) anything.happen(numbers);
      anything.end(numbers);
    };
    replayed += compare(tiny_config(0.1), script).graph.replayed;
  }
  EXPECT_GT(replayed, 10u);  // though so much changes
}

/// Times are those of each launch, though many are under way.
TEST_F(CudaGraphReplay, TellsTimesOfEveryStep) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  config.device.cuda_graph = AutoSwitch::on;
  const auto engine = build_engine(config);
  for (unsigned step = 0; step < 6; ++step) {
    engine->launch_step(random_batch(4, 11, step));
    if (step == 0) continue;
    const StepReport report = engine->finish_step();
    EXPECT_GT(report.times.forward, 0) << step;
    EXPECT_GT(report.times.backward, 0) << step;
    EXPECT_LT(report.times.forward + report.times.backward, 60) << step;
    EXPECT_EQ(report.executed.size(), 4u) << step;
  }
  engine->finish_step();
}

/// A block that does on the host what a recording would not see.
struct Restless : Block {
  explicit Restless(std::string name)
      : Block(std::move(name)),
        norm(submodule<nn::Norm>("norm", nn::Norm::Options{.size = 12})),
        linear(submodule<nn::Linear>("linear", nn::Linear::Options{.in = 12, .out = 12, .std = 0.2})) {}
  Flow forward(const Forward& f, Flow flow) override {
    const ResidualNorm x = norm.forward(f, flow.residual, flow.branch, flow.dropout);
    return {x.residual, linear.forward(f, x.y), f.dropout(name(), f.step % 2 == 0 ? 0.2 : 0.4)};
  }
  nn::Norm& norm;
  nn::Linear& linear;
};

struct RestlessStack : Stack {
  RestlessStack() : Stack(12, 2, {}, {}) {
    begin_piece();
    struct Front : Block {
      Front(std::string name)
          : Block(std::move(name)),
            embedding(submodule<nn::Embedding>(
                "tokens",
                nn::Embedding::Options{.vocab_size = 31, .size = 12, .max_positions = 9, .std = 0.2})) {}
      Flow forward(const Forward& f, Flow) override { return {embedding.forward(f), {}, {}}; }
      nn::Embedding& embedding;
    };
    Front& front = add_front<Front>("front");
    for (const char* name : {"layers.0", "layers.1"}) add_layer<Restless>(name);
    add_head<TiedHead>("", &front.embedding.table(), "front.tokens.word_embeddings.weight", Shape{31, 12},
                       0.2f);
  }
  std::int64_t vocab_size() const override { return 31; }
  std::int64_t max_positions() const override { return 9; }
};

TEST_F(CudaGraphReplay, AModelThatDoesNotSaySoIsRecordedEveryTime) {
  Seen runs[2];
  for (const bool graph : {false, true}) {
    EngineOptions options;
    options.optimizer.lr = 1e-2;
    options.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
    Engine engine(std::make_unique<RestlessStack>(), options, context(1, 3));
    runs[graph] = run_of(engine, steps(6, [](unsigned i) { return random_batch(4, 9, i, 31); }));
  }
  EXPECT_EQ(bits_of(runs[0].numbers), bits_of(runs[1].numbers));
  EXPECT_EQ(runs[0].weights, runs[1].weights);
  EXPECT_EQ(runs[1].graph.launched, 5u);
  EXPECT_EQ(runs[1].graph.replayed, 0u);
  EXPECT_NE(runs[1].because.find("Model::is_repeatable"), std::string::npos) << runs[1].because;
}

}  // namespace
}  // namespace tessera::test::graph_replay
