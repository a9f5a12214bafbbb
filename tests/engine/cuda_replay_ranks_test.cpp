/// Ranks whose steps are launched again as they recorded them together compute, send and count what steps do
/// that are launched piece by piece, along every axis.

#include <map>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/engine/replay_support.hpp"

namespace tessera::test::graph_replay {
namespace {

class CudaGraphReplayRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs a CUDA device";
  }
};

/// What a rank of several saw, and what it sent.
struct RankSeen : Seen {
  std::map<std::string, std::uint64_t> bytes;
  std::map<std::string, std::uint64_t> operations;
};

/// Steps whose weights have come before the next begins, or of which two are under way at a time. Every
/// batch has other labels that count.
RankSeen run_rank(Config config, AutoSwitch graph, const std::shared_ptr<Communicator>& world, bool ahead,
                  std::int64_t samples) {
  config.device.cuda_graph = graph;
  const auto engine = build_engine(config, true, world);
  const auto& mesh = engine->mesh();
  RankSeen run;
  const auto script = [&](Engine&, Numbers& numbers) {
    const auto finish = [&] {
      const StepReport report = engine->finish_step();
      note(numbers, report);
      EXPECT_GE(report.times.bubble, 0);
      for (const AxisTraffic& each : report.traffic) {
        if (each.axis != "world") run.bytes[each.axis] += each.bytes_sent;  // where they agree on graphs
      }
    };
    for (unsigned step = 0; step < 9; ++step) {
      if (!ahead) await_weights(*engine);
      const std::int64_t length = config.training.seq_length;
      Batch batch = random_batch(samples, length, 60 + step);
      for (std::size_t i = 0; i < batch.labels.size(); i += 2 + step % 5) batch.labels[i] = -100;
      engine->launch_step(
          data_part(batch, mesh.coordinates().dp, mesh.shape().dp, config.training.micro_batch_size));
      if (!ahead || step > 0) finish();
    }
    if (ahead) finish();
  };
  static_cast<Seen&>(run) = run_of(*engine, script);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp})
    run.operations[std::string(name_of(axis))] = mesh[axis].stats().operations;
  return run;
}

/// The steps of all ranks with graphs and without, whose numbers, weights and traffic are the same.
void compare_ranks(Config config, int ranks, bool ahead = false, std::int64_t samples = 4) {
  config.device.type = DeviceChoice::cuda;
  run_ranks(ranks, {.timeout_s = 120}, [&](const std::shared_ptr<Communicator>& world) {
    const RankSeen plain = run_rank(config, AutoSwitch::off, world, ahead, samples),
                   graph = run_rank(config, AutoSwitch::on, world, ahead, samples);
    EXPECT_EQ(bits_of(plain.numbers), bits_of(graph.numbers));
    EXPECT_EQ(plain.weights, graph.weights);
    EXPECT_EQ(plain.bytes, graph.bytes);
    EXPECT_EQ(plain.operations, graph.operations);
    EXPECT_EQ(plain.graph.launched, 0u);
    if (!ahead) expect_replays(graph, 9);
  });
}

Config ranks_config(const Overrides& layout) {
  Config config = tiny_config(0.1);
  config.model.num_heads = config.model.num_kv_heads = 4;
  config.model.ffn_hidden_size = 34;
  config.training.seq_length = 12;
  config.training.micro_batch_size = 1;
  return with_overrides(config, layout);
}

TEST_F(CudaGraphReplayRanks, AlongEveryAxis) {
  for (const Overrides& layout : {Overrides{"parallel.data=2", "parallel.zero_stage=0"},
                                  {"parallel.data=2"},
                                  {"parallel.tensor=2"},
                                  {"parallel.tensor=2", "parallel.sequence=true"},
                                  {"parallel.context=2"},
                                  {"parallel.context=2", "parallel.context_method=ulysses"},
                                  {"parallel.pipeline=2"},
                                  {"parallel.pipeline=2", "parallel.schedule=zb-h1"},
                                  {"model.num_layers=4", "parallel.pipeline=2", "parallel.schedule=zb-v"}}) {
    SCOPED_TRACE(layout.back());
    const Config config = ranks_config(layout);
    compare_ranks(config, static_cast<int>(config.parallel.data.value_or(1) * config.parallel.tensor *
                                           config.parallel.context * config.parallel.pipeline));
  }
}

TEST_F(CudaGraphReplayRanks, AlongAllAxes) {
  Config config = tiny_llama(0.1);
  config.model.ffn_hidden_size = 18;
  config.training.precision = Precision::bf16;
  config.training.micro_batch_size = 1;
  config.training.seq_length = 12;
  config.parallel.tensor = config.parallel.pipeline = 2;
  config.parallel.data = 2;
  compare_ranks(config, 8);
}

/// Three data ranks share out four samples, and two: one has fewer, or none.
TEST_F(CudaGraphReplayRanks, WithFewerSamples) {
  for (const std::int64_t samples : {4, 2}) {
    SCOPED_TRACE(samples);
    compare_ranks(ranks_config({"training.global_batch_size=3", "parallel.data=3"}), 3, false, samples);
  }
}

/// Weights of the last update may have come when passes begin, or not.
TEST_F(CudaGraphReplayRanks, RunAhead) {
  compare_ranks(ranks_config({"parallel.data=2"}), 2, true);
  compare_ranks(ranks_config({"parallel.data=2", "parallel.zero_stage=0", "parallel.tensor=2"}), 4, true);
}

/// Where one rank has to record anew all do: NCCL wants their calls out of one recording, as the emulator
/// sees to.
TEST_F(CudaGraphReplayRanks, RecordTogether) {
  Config config = ranks_config({"parallel.data=2", "parallel.tensor=2"});
  config.device.type = DeviceChoice::cuda;
  config.device.cuda_graph = AutoSwitch::on;
  run_ranks(4, {.timeout_s = 120}, [&](const std::shared_ptr<Communicator>& world) {
    std::vector<double> losses[2];
    for (const bool apart : {false, true}) {
      const auto engine = build_engine(config, true, world);
      const auto& mesh = engine->mesh();
      std::vector<Tensor> held;
      for (unsigned step = 0; step < 10; ++step) {
        await_weights(*engine);
        // Memory that the graph computes in is somebody else's from here on.
        if (apart && world->rank() == 1 && step >= 4 && step < 7)
          held.push_back(Tensor::empty(engine->ctx(), {std::int64_t{1000} << (step - 4)}, DType::f32));
        const Batch batch = random_batch(config.training.global_batch_size, 12, step);
        losses[apart].push_back(
            engine->step(data_part(batch, mesh.coordinates().dp, mesh.shape().dp, 1)).loss);
      }
      const std::uint64_t replayed = engine->graph().stats().replayed;
      const std::string& because = engine->graph().recorded_because();
      if (!apart) {
        EXPECT_EQ(replayed, 8u) << because;
        continue;
      }
      EXPECT_EQ(engine->graph().stats().launched, 9u);
      EXPECT_GE(replayed, 4u);
      EXPECT_LT(replayed, 8u);
      const char* const words =
          world->rank() == 1 ? "others hold memory" : "another rank could not launch its own again";
      EXPECT_NE(because.find(words), std::string::npos) << because;
    }
    EXPECT_EQ(losses[0], losses[1]);
  });
}

/// Data ranks whose batches are of several shapes, each in its own order: calls are plain until all ranks
/// know their shape, and repeated where all have recorded theirs in one step.
TEST_F(CudaGraphReplayRanks, OfDifferentShapes) {
  Config config = ranks_config({"parallel.data=2", "parallel.zero_stage=0"});
  config.device.type = DeviceChoice::cuda;
  run_ranks(2, {.timeout_s = 120}, [&](const std::shared_ptr<Communicator>& world) {
    Seen runs[2];
    for (const bool graph : {false, true}) {
      config.device.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
      const auto engine = build_engine(config, true, world);
      runs[graph] = run_of(*engine, [&](Engine& with, Numbers& numbers) {
        for (unsigned step = 0; step < 16; ++step) {
          const unsigned kind = world->rank() == 0 ? step % 2 : step / 4 % 2;
          Batch batch = random_batch(2, 12, 2 * step + static_cast<unsigned>(world->rank()));
          for (std::size_t i = 0; kind == 1 && i < batch.tokens.size(); ++i)
            batch.document_ids.push_back(static_cast<std::int32_t>(i % 12 / 5));
          note(numbers, with.step(batch));
        }
      });
    }
    EXPECT_EQ(bits_of(runs[0].numbers), bits_of(runs[1].numbers));
    EXPECT_EQ(runs[0].weights, runs[1].weights);
    EXPECT_GT(runs[1].graph.plain, 2u);
    EXPECT_GT(runs[1].graph.launched, runs[1].graph.replayed);
    EXPECT_EQ(runs[1].graph.plain + runs[1].graph.launched, 16u);
  });
}

}  // namespace
}  // namespace tessera::test::graph_replay
