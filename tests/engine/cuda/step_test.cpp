/// A training step as the host of a GPU sees it.

#include <gtest/gtest.h>

#if !__has_include("emulator.hpp")  // only an emulated build has its folder in the include path

TEST(CudaStep, IsCountedOnTheEmulator) {
  GTEST_SKIP() << "the CUDA backend is not emulated in this build (TESSERA_CUDA=emulated)";
}

#else

#include <map>
#include <mutex>
#include <set>

#include "emulator.hpp"
#include "tessera/device/trace.hpp"
#include "tessera/engine/build.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

struct StepCase {
  Precision precision = Precision::fp32;
  bool graph = false;
};

class CudaStep : public ::testing::TestWithParam<StepCase> {};

TEST_P(CudaStep, NeitherWaitsNorAllocates) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  config.training.precision = GetParam().precision;
  config.device.cuda_graph = GetParam().graph ? AutoSwitch::on : AutoSwitch::off;
  config.training.initial_loss_scale = 65536;
  const auto engine = build_engine(config);
  // The first steps fill the pools; how many do depends on how far the device is behind when the next is
  // launched.
  int in_a_row = 0;
  for (unsigned i = 0; i < 40 && in_a_row < 4; ++i) {
    const Batch batch = random_batch(4, 11, i);
    const std::uint64_t before = tessera_emulator::slow_calls();
    engine->launch_step(batch);
    in_a_row = tessera_emulator::slow_calls() == before ? in_a_row + 1 : 0;
    if (i > 0) engine->finish_step();
  }
  EXPECT_EQ(in_a_row, 4);
  engine->finish_step();
}

TEST(CudaStep, RecordingItDoesNotWaitEither) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  const auto engine = build_engine(config);
  for (unsigned i = 0; i < 4; ++i) engine->step(random_batch(4, 11, i));
  const auto trace = std::make_shared<Trace>(*engine->ctx().stream);
  engine->set_trace(trace);
  const Batch batch = random_batch(4, 11, 3);
  const std::uint64_t before = tessera_emulator::slow_calls();
  engine->launch_step(batch);
  EXPECT_EQ(tessera_emulator::slow_calls() - before, 0u);
  engine->finish_step();
  const auto lanes = trace->lanes();
  ASSERT_EQ(lanes.size(), 2u);
  EXPECT_EQ(lanes[0].name, "stream");
  EXPECT_EQ(lanes[0].work.size() - lanes[1].work.size(), 0u);
}

/// What the host puts on streams in one step of a model of so many layers: all of it, and for the passes
/// alone.
struct Calls {
  std::uint64_t step = 0, passes = 0;
  friend bool operator==(const Calls&, const Calls&) = default;
};

Calls calls_of_a_steady_step(std::int64_t layers, bool graph) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  config.training.precision = Precision::bf16;
  config.model.num_layers = layers;
  config.device.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
  const auto engine = build_engine(config);
  std::vector<Calls> seen;
  for (unsigned i = 0; i < 8; ++i) {
    const Batch batch = random_batch(4, 11, i);
    const std::uint64_t before = tessera_emulator::stream_calls();
    engine->forward_backward(batch);
    const std::uint64_t between = tessera_emulator::stream_calls();
    engine->update();
    seen.push_back({tessera_emulator::stream_calls() - before, between - before});
  }
  for (std::size_t i = 4; i < seen.size(); ++i)
    EXPECT_EQ(seen[i], seen[3]) << layers << " layers, step " << i;
  EXPECT_EQ(engine->graph().stats().replayed, graph ? 6u : 0u);
  return seen.back();
}

/// However many layers there are: the passes are an upload and its event, a graph between two events, and
/// copies of the loss and of times, each with its event.
TEST(CudaStep, ASteadyStepMakesAFewCalls) {
  const Calls two = calls_of_a_steady_step(2, true), six = calls_of_a_steady_step(6, true);
  EXPECT_EQ(two, six);
  EXPECT_EQ(six.passes, 9u);
  EXPECT_EQ(six.step, 16u);
  EXPECT_GT(calls_of_a_steady_step(6, false).passes, calls_of_a_steady_step(2, false).passes + 100);
}

/// The same with two ranks that exchange something in every layer: each lane is joined once, before the graph
/// and after it.
TEST(CudaStep, ASteadyStepOfARankMakesAFewCalls) {
  std::map<std::int64_t, std::set<std::uint64_t> > seen;
  std::mutex mutex;
  for (const std::int64_t layers : {2, 6}) {
    run_ranks(2, {.timeout_s = 60}, [&](const std::shared_ptr<Communicator>& world) {
      Config config = tiny_config(0.1);
      config.device.type = DeviceChoice::cuda;
      config.device.cuda_graph = AutoSwitch::on;
      config.model.num_layers = layers;
      config.model.num_heads = config.model.num_kv_heads = 4;
      config.model.ffn_hidden_size = 34;
      config.parallel.tensor = 2;
      const auto engine = build_engine(config, true, world);
      for (unsigned i = 0; i < 8; ++i) {
        const Batch batch = random_batch(4, 11, i);
        const std::uint64_t before = tessera_emulator::stream_calls();
        engine->forward_backward(batch);
        const std::lock_guard lock(mutex);
        if (i >= 4) seen[layers].insert(tessera_emulator::stream_calls() - before);
        engine->discard();
      }
      EXPECT_EQ(engine->graph().stats().replayed, 6u) << engine->graph().recorded_because();
    });
  }
  EXPECT_EQ(seen[2], seen[6]);
  EXPECT_EQ(seen[6], std::set<std::uint64_t>{12u});
}

INSTANTIATE_TEST_SUITE_P(Precisions, CudaStep,
                         ::testing::Values(StepCase{Precision::fp32}, StepCase{Precision::bf16},
                                           StepCase{Precision::fp16}, StepCase{Precision::bf16, true}),
                         [](const auto& info) {
                           return std::string(name_of(info.param.precision)) +
                                  (info.param.graph ? "_graph" : "");
                         });

}  // namespace
}  // namespace tessera::test

#endif
