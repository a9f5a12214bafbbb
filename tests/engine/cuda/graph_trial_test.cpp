/// device.cuda_graph auto: a trial decides, and whatever it finds the training is the same.

#include <gtest/gtest.h>

#if !__has_include("emulator.hpp")  // only an emulated build has its folder in the include path

TEST(CudaGraphTrial, NeedsTheEmulator) {
  GTEST_SKIP() << "the CUDA backend is not emulated in this build (TESSERA_CUDA=emulated)";
}

#else

#include "emulator.hpp"
#include "tessera/device/trace.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

using tessera_emulator::GraphMistake;

struct Trained {
  std::vector<double> numbers;
  std::vector<std::vector<float> > weights;
  std::optional<GraphTrial> trial;
  StreamGraph::Stats stats;
  std::vector<std::string> notes;
};

class CudaGraphTrial : public ::testing::Test {
 protected:
  void TearDown() override {
    for (int device = 0; device < 8; ++device)
      tessera_emulator::plant_graph_mistake(device, GraphMistake::none);
  }

  static Trained train(Config config, AutoSwitch use, const std::shared_ptr<Communicator>& world,
                       int steps = 7) {
    config.device.cuda_graph = use;
    const auto engine = build_engine(config, true, world);
    Trained run;
    for (int step = 0; step < steps; ++step) {
      const Batch batch =
          random_batch(config.training.global_batch_size, 11, 40 + static_cast<unsigned>(step));
      await_weights(*engine);
      const StepReport report =
          engine->step(data_part(batch, engine->mesh().coordinates().dp, engine->mesh().shape().dp,
                                 config.training.micro_batch_size));
      run.numbers.insert(run.numbers.end(), {report.loss, report.update.grad_norm, report.update.loss_scale});
      EXPECT_EQ(engine->graph().trial().has_value(), use == AutoSwitch::automatic && step >= 2) << step;
    }
    for (const Parameter* parameter : engine->params().parameters())
      run.weights.push_back(parameter->value().to_floats());
    run.trial = engine->graph().trial();
    run.stats = engine->graph().stats();
    for (EngineNote& note : engine->take_notes()) {
      if (!note.warning) run.notes.push_back(std::move(note.text));
    }
    return run;
  }

  /// Trains with and without, on every rank; `check` looks at the one with.
  static void compare(Config config, int ranks, const std::function<void(int, const Trained&)>& check) {
    config.device.type = DeviceChoice::cuda;
    run_ranks(ranks, {.timeout_s = 30}, [&](const std::shared_ptr<Communicator>& world) {
      Config own = config;
      own.device.index = world->rank();
      const Trained plain = train(own, AutoSwitch::off, world),
                    tried = train(own, AutoSwitch::automatic, world);
      EXPECT_EQ(plain.numbers, tried.numbers);
      EXPECT_EQ(plain.weights, tried.weights);
      EXPECT_FALSE(plain.trial);
      check(world->rank(), tried);
    });
  }

  static void expect_decision(const Trained& run) {
    ASSERT_TRUE(run.trial);
    EXPECT_EQ(run.notes, std::vector{run.trial->text()});
    EXPECT_EQ(run.trial->refusal, "");
    EXPECT_GT(run.trial->plain_s, 0);
    EXPECT_GT(run.trial->graph_s, 0);
    EXPECT_EQ(run.trial->used, run.trial->graph_s <= run.trial->plain_s);
    // The trial's own four, and the steps after it.
    EXPECT_EQ(run.stats.launched, run.trial->used ? 4u + 4u : 0u);
    EXPECT_NE(run.trial->text().find(run.trial->used ? "cuda_graph: on" : "cuda_graph: off"),
              std::string::npos)
        << run.trial->text();
  }
};

TEST_F(CudaGraphTrial, OneRankInEveryPrecision) {
  for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp16}) {
    SCOPED_TRACE(name_of(precision));
    Config config = tiny_config(0.1);
    config.training.precision = precision;
    config.training.initial_loss_scale = 65536;
    compare(config, 1, [](int, const Trained& run) {
      expect_decision(run);
      EXPECT_EQ(run.trial->recorded, "");
      EXPECT_EQ(run.stats.replayed, run.trial->used ? 7u : 0u);  // the first was recorded
    });
  }
}

Config four_ranks() {
  Config config = tiny_config(0.1);
  config.parallel.pipeline = 2;
  config.parallel.data = 2;
  config.training.micro_batch_size = 1;
  return config;
}

TEST_F(CudaGraphTrial, AllRanksDecideAlike) {
  std::mutex mutex;
  std::set<bool> decisions;
  compare(four_ranks(), 4, [&](int, const Trained& run) {
    expect_decision(run);
    EXPECT_EQ(run.trial->recorded, "");
    EXPECT_EQ(run.stats.replayed, run.trial->used ? 7u : 0u);
    const std::lock_guard lock(mutex);
    decisions.insert(run.trial->used);
  });
  EXPECT_EQ(decisions.size(), 1u);
}

TEST_F(CudaGraphTrial, WithoutARecordingTrainingGoesOn) {
  tessera_emulator::plant_graph_mistake(1, GraphMistake::refused);
  compare(four_ranks(), 4, [](int rank, const Trained& run) {
    ASSERT_TRUE(run.trial);
    EXPECT_FALSE(run.trial->used);
    const char* words =
        rank == 1 ? "cannot be recorded: cudaStreamEndCapture" : "another rank could not record";
    EXPECT_NE(run.trial->refusal.find(words), std::string::npos) << run.trial->refusal;
    EXPECT_NE(run.trial->text().find("cuda_graph: off"), std::string::npos);
    EXPECT_EQ(run.stats.launched, 0u);
  });
}

TEST_F(CudaGraphTrial, AGraphThatLacksAKernelIsFound) {
  tessera_emulator::plant_graph_mistake(0, GraphMistake::incomplete);
  compare(tiny_config(0.1), 1, [](int, const Trained& run) {
    ASSERT_TRUE(run.trial);
    EXPECT_EQ(run.trial->refusal, "as a graph the passes gave other numbers");
  });
  Config config = tiny_config(0.1);
  config.parallel.data = 2;
  config.parallel.zero_stage = 1;
  config.training.micro_batch_size = 1;
  compare(config, 2, [](int, const Trained& run) {
    ASSERT_TRUE(run.trial);
    EXPECT_EQ(run.trial->refusal.find("as a graph the passes gave other numbers"), 0u) << run.trial->refusal;
  });
}

TEST_F(CudaGraphTrial, WaitsUntilNobodyTraces) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  const auto engine = build_engine(config);
  const auto trace = std::make_shared<Trace>(*engine->ctx().stream);
  engine->set_trace(trace);
  for (unsigned step = 0; step < 4; ++step) engine->step(random_batch(4, 11, step));
  EXPECT_FALSE(engine->graph().trial());
  engine->set_trace(nullptr);
  engine->step(random_batch(4, 11, 4));
  EXPECT_TRUE(engine->graph().trial());
}

}  // namespace
}  // namespace tessera::test

#endif
