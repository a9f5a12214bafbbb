/// device.cuda_graph launches the same work: every number is the same, bit for bit.

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

constexpr int kSteps = 10;

class CudaGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs a CUDA device";
  }
};

/// Losses, norms and own weights of one rank.
struct Run {
  std::vector<double> numbers;
  std::vector<std::vector<float>> weights;
  StreamGraph::Stats graph;
  std::vector<std::string> notes;
};

/// Texts of two lengths, odd ones where positions are not shared out; every third batch holds documents.
Batch batch_of(const Config& config, unsigned step) {
  const std::int64_t length = (step % 4 == 3 ? 7 : 11) + (config.parallel.sequence ? 1 : 0);
  Batch batch = random_batch(config.training.global_batch_size, length, 40 + step);
  if (step % 3 == 2) {
    for (std::size_t i = 0; i < batch.tokens.size(); ++i)
      batch.document_ids.push_back(
          static_cast<std::int32_t>(i % static_cast<std::size_t>(batch.seq_length) / 4));
  }
  return batch;
}

/// Two steps are under way at a time, as in training.
Run train(Engine& engine, const Config& config) {
  Run run;
  const MeshShape& shape = engine.mesh().shape();
  const auto finish = [&] {
    const StepReport report = engine.finish_step();
    run.numbers.insert(run.numbers.end(), {report.loss, report.update.grad_norm, report.update.loss_scale});
  };
  for (unsigned step = 0; step < kSteps; ++step) {
    engine.launch_step(data_part(batch_of(config, step), engine.mesh().coordinates().dp, shape.dp,
                                 config.training.micro_batch_size));
    if (step > 0) finish();
  }
  finish();
  for (const Parameter* parameter : engine.params().parameters())
    run.weights.push_back(parameter->value().to_floats());
  run.graph = engine.graph().stats();
  for (EngineNote& note : engine.take_notes()) {
    if (!note.warning) run.notes.push_back(std::move(note.text));
  }
  return run;
}

/// `sends_weights`: after an update, which may still be under way when the next passes begin; those have a
/// graph of their own.
void expect_equal(const Run& plain, const Run& graph, bool sends_weights) {
  EXPECT_EQ(plain.numbers, graph.numbers);
  EXPECT_EQ(plain.weights, graph.weights);
  EXPECT_EQ(plain.graph.launched + plain.graph.plain, 0u);
  // Three kinds of batches, whose first turns are plain.
  EXPECT_EQ(graph.graph.plain + graph.graph.launched, static_cast<std::uint64_t>(kSteps));
  if (!sends_weights) {
    EXPECT_EQ(graph.graph.plain, 3u);
    EXPECT_EQ(graph.graph.made, 3u) << graph.graph.refused_update;
  }
  // The second kind is told of, the third is not.
  EXPECT_EQ(plain.notes.size(), 0u);
  ASSERT_EQ(graph.notes.size(), 1u);
  EXPECT_NE(graph.notes[0].find(" + documents): its first turn runs piece by piece"), std::string::npos)
      << graph.notes[0];
}

void compare(Config config, int ranks) {
  config.device.type = DeviceChoice::cuda;
  run_ranks(ranks, {.timeout_s = 120}, [&](const std::shared_ptr<Communicator>& world) {
    Run runs[2];
    for (const bool graph : {false, true}) {
      config.device.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
      const auto engine = build_engine(config, true, world);
      runs[graph] = train(*engine, config);
    }
    expect_equal(runs[0], runs[1], config.parallel.data > 1 && config.parallel.zero_stage == 1);
  });
}

TEST_F(CudaGraph, OneRankInEveryPrecision) {
  for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp16}) {
    SCOPED_TRACE(name_of(precision));
    Config config = tiny_config(0.1);
    config.training.precision = precision;
    config.training.initial_loss_scale = 65536;
    compare(config, 1);
  }
}

TEST_F(CudaGraph, LlamaRecomputed) {
  Config config = tiny_llama(0.1);
  config.training.recompute = Recompute::full;
  compare(config, 1);
}

TEST_F(CudaGraph, DataParallel) {
  Config config = tiny_config(0.1);
  config.parallel.data = 2;
  config.training.micro_batch_size = 1;
  for (config.parallel.zero_stage = 0; config.parallel.zero_stage <= 1; ++config.parallel.zero_stage)
    compare(config, 2);
}

TEST_F(CudaGraph, TensorAndSequenceParallel) {
  Config config = tiny_config(0.1);
  config.model.num_heads = 4;
  config.model.num_kv_heads = 4;
  config.model.ffn_hidden_size = 34;
  config.training.seq_length = 12;
  config.parallel.tensor = 2;
  config.parallel.sequence = true;
  for (config.parallel.tensor_chunks = 1; config.parallel.tensor_chunks <= 2;
       ++config.parallel.tensor_chunks) {
    SCOPED_TRACE(config.parallel.tensor_chunks);
    compare(config, 2);
  }
}

TEST_F(CudaGraph, PipelineParallel) {
  for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
    SCOPED_TRACE(name_of(schedule));
    Config config = tiny_config(0.1);
    config.parallel.pipeline = 2;
    config.parallel.schedule = schedule;
    compare(config, 2);
  }
}

TEST_F(CudaGraph, AllAxes) {
  Config config = tiny_llama(0.1);
  config.model.ffn_hidden_size = 18;
  config.parallel.tensor = 2;
  config.parallel.pipeline = 2;
  config.parallel.data = 2;
  config.training.micro_batch_size = 1;
  compare(config, 8);
}

/// Calls are opened, weighed and given up between updates, as a script does.
TEST_F(CudaGraph, Calls) {
  Config config = tiny_config(0.1);
  config.device.type = DeviceChoice::cuda;
  std::vector<double> numbers[2];
  for (const bool graph : {false, true}) {
    config.device.cuda_graph = graph ? AutoSwitch::on : AutoSwitch::off;
    const auto engine = build_engine(config);
    for (unsigned step = 0; step < 6; ++step) {
      OpenCall first = engine->open_call(random_batch(4, 11, 2 * step));
      OpenCall second = engine->open_call(random_batch(4, 11, 2 * step + 1));
      second.add(0.5);
      const double losses[] = {first.loss(), second.loss()};
      if (step % 2 == 0) {
        first.add(0.25);
      } else {
        first = {};
      }
      numbers[graph].insert(numbers[graph].end(), {losses[0], losses[1], engine->update().grad_norm});
    }
    EXPECT_EQ(engine->graph().stats().launched, graph ? 10u : 0u);
    EXPECT_EQ(engine->graph().stats().made, graph ? 2u : 0u);
  }
  EXPECT_EQ(numbers[0], numbers[1]);
}

}  // namespace
}  // namespace tessera::test
