/// A training step as the host of a GPU sees it.

#include <gtest/gtest.h>

#if !__has_include("emulator.hpp")  // only an emulated build has its folder in the include path

TEST(CudaStep, IsCountedOnTheEmulator) {
  GTEST_SKIP() << "the CUDA backend is not emulated in this build (TESSERA_CUDA=emulated)";
}

#else

#include "emulator.hpp"
#include "tessera/device/trace.hpp"
#include "tessera/engine/build.hpp"
#include "tests/engine/engine_support.hpp"

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
