/// Odd sizes, odd batches, and layouts that cannot be.

#include "tessera/engine/generate.hpp"
#include "tests/engine/layout_edge_support.hpp"

namespace tessera::test {
namespace {

using namespace edge;

TEST(LayoutEdge, SequencesOfOneToken) {
  for (const Family family : {Family::gpt2, Family::llama}) {
    const Config config =
        edge_config(family, {"parallel.tensor=2", "parallel.pipeline=2", "training.seq_length=1"});
    expect_serial(config, 8, three_steps(8, 1));
  }
}

TEST(LayoutEdge, FewerMicroBatchesThanStages) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    const Overrides four{"parallel.pipeline=4", std::string("parallel.schedule=") + schedule};
    for (const std::int64_t samples : {1, 2, 3})
      expect_serial(edge_config(Family::gpt2, four), 4, three_steps(samples, kSeq));
  }
  expect_serial(edge_config(Family::llama, kZbV), 2, three_steps(1, kSeq));
}

TEST(LayoutEdge, AsManyLayersAsPieces) {
  expect_serial(edge_config(Family::gpt2, {"parallel.pipeline=4"}), 4, three_steps(4, kSeq));
  expect_serial(edge_config(Family::llama, kZbV), 2, three_steps(4, kSeq));
  expect_serial(edge_config(Family::llama, {"parallel.pipeline=2", "parallel.schedule=interleaved",
                                            "parallel.virtual_stages=2"}),
                2, three_steps(4, kSeq));
}

TEST(LayoutEdge, PiecesWithoutLayers) {
  expect_serial(edge_config(Family::gpt2, {"parallel.pipeline=3", "parallel.pipeline_layout=\"0,4,0\""}), 3,
                three_steps(4, kSeq));
  expect_serial(
      edge_config(Family::llama, kTp2Sp + Overrides{"parallel.pipeline=2", "parallel.pipeline_layout=\"4,0\"",
                                                    "training.recompute=full"}),
      4, three_steps(4, kSeq));
}

TEST(LayoutEdge, OneTokenPerRank) {
  for (const Overrides& layout :
       {Overrides{"parallel.tensor=4"}, Overrides{"parallel.tensor=4", "parallel.sequence=true"}}) {
    expect_serial(edge_config(Family::gpt2, layout + Overrides{"model.vocab_size=4"}), 4,
                  three_steps(4, kSeq, 4));
  }
}

TEST(LayoutEdge, ALastMicroBatchThatIsNotFull) {
  for (const Overrides& layout : {kTp2Sp, kPp2, kZbV}) {
    Config config = edge_config(Family::gpt2, layout);
    config.training.micro_batch_size = 3;
    expect_serial(config, 2, three_steps(8, kSeq));
  }
}

TEST(LayoutEdge, OneDataRankWithoutTargets) {
  std::vector<Batch> batches;
  for (unsigned i = 0; i < 3; ++i) {
    batches.push_back(random_batch(8, kSeq, 80 + i, kVocab));
    for (std::size_t k = 0; k < batches.back().labels.size(); ++k) {
      if (k / kSeq % 2 == 1) batches.back().labels[k] = kIgnoredLabel;
    }
  }
  for (const char* stage : {"parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"})
    expect_serial(edge_config(Family::gpt2, {"parallel.data=2", stage}), 2, steps_on(batches));
  expect_serial(edge_config(Family::llama, kAll), 8, steps_on(batches));
  for (std::int32_t& label : batches[0].labels) label = kIgnoredLabel;
  std::atomic<int> refused =
      0;  // by a step; a call alone has no gradient, and as a mean over nothing no loss
  run_local(2, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(edge_config(Family::gpt2, {"parallel.data=2"}), true, world);
    EXPECT_TRUE(std::isnan(engine->forward_backward(own_part(*engine, batches[0]))));
    EXPECT_EQ(engine->optimizer().grad_norm(), 0.0);
    engine->discard();
    expect_error<DataError>([&] { engine->step(own_part(*engine, batches[0])); },
                            "no label of this batch counts");
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

/// Their experts work for others' tokens.
TEST(LayoutEdge, ExpertRanksWithoutSamples) {
  const Overrides experts{"model.num_experts=4", "model.router_aux_loss=0.3", "model.router_z_loss=0.1",
                          "parallel.data=4"};
  const auto layout = [&](int ranks, const Overrides& more) {
    return edge_config(Family::llama, experts + more + Overrides{"parallel.expert=" + std::to_string(ranks)});
  };
  for (const std::int64_t samples : {1, 3, 5}) {
    SCOPED_TRACE(samples);
    expect_serial(layout(1, {}), 4, three_steps(samples, kSeq));
    expect_serial(layout(4, {}), 4, three_steps(samples, kSeq));
    expect_serial(layout(2, {"parallel.zero_stage=3"}), 4, three_steps(samples, kSeq));
    expect_serial(layout(2, kTp2Sp), 8, three_steps(samples, kSeq));
    expect_serial(layout(2, kZbV), 8, three_steps(samples, kSeq));
  }
  expect_serial(layout(8, kCp2 + Overrides{"model.num_experts=8", "training.recompute=full"}), 8,
                three_steps(3, kSeq));
}

TEST(LayoutEdge, PaddedAndPackedBatches) {
  const Body body = steps_on({padded_and_packed(1), padded_and_packed(2), padded_and_packed(3)});
  for (const Family family : {Family::gpt2, Family::llama}) {
    expect_serial(edge_config(family, kTp2), 2, body);
    expect_serial(edge_config(family, kTp2Sp), 2, body);
    expect_serial(edge_config(family, kZbV), 2, body);
    expect_serial(edge_config(family, {"training.micro_batch_size=2", "parallel.data=2"}), 2, body);
    expect_serial(edge_config(family, kAll), 8, body);
    expect_serial(edge_config(family, kAll + Overrides{"parallel.zero_stage=3"}), 8, body);
    expect_serial(edge_config(family, kCp2), 2, body);
    expect_serial(edge_config(family, {"parallel.context=4", "training.micro_batch_size=2"}), 4, body);
    expect_serial(edge_config(family, kCp2 + kTp2Sp + kZbV), 8, body);
  }
}

TEST(LayoutEdge, SeveralCallsBeforeAnUpdate) {
  const Body body = [](Engine& engine) {
    std::vector<double> numbers;
    for (unsigned step = 0; step < 2; ++step) {
      for (const double factor : {0.5, -0.25, 2.0}) {
        const Batch whole = random_batch(factor < 0 ? 4 : 8, kSeq, 90 + step, kVocab);
        numbers.push_back(engine.forward_backward(own_part(engine, whole), factor));
      }
      if (step == 0) numbers.push_back(engine.update().grad_norm);
    }
    return numbers;
  };
  for (const int zero : {0, 1, 2, 3}) {
    const Overrides stage{"parallel.zero_stage=" + std::to_string(zero)};
    expect_serial(edge_config(Family::gpt2, kPp2 + Overrides{"parallel.data=2"} + stage), 4, body);
    expect_serial(edge_config(Family::llama, kAll + stage), 8, body);
  }
  expect_serial(edge_config(Family::gpt2, kZbV), 2, body);
}

/// Every rank gets an error of type E, and nobody waits for another.
template <typename E>
void expect_refused(int ranks, Config config, const std::function<void(Engine&)>& body,
                    const std::string& text) {
  std::atomic<int> refused = 0;
  const auto begin = std::chrono::steady_clock::now();
  run_local(ranks, {.timeout_s = 20}, [&](std::shared_ptr<Communicator> world) {
    expect_error<E>(
        [&] {
          const auto engine = build_engine(config, true, world);
          if (body) body(*engine);
        },
        text);
    ++refused;
  });
  EXPECT_EQ(refused, ranks);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << text;
}

TEST(LayoutEdge, ImpossibleLayoutsAreRefusedOnEveryRank) {
  const auto layout = [](int tensor, int pipeline) {
    Config config = edge_config(Family::llama, {});
    config.parallel.tensor = tensor;
    config.parallel.pipeline = pipeline;
    return config;
  };
  expect_refused<ConfigError>(3, layout(3, 1), nullptr, "model.num_heads (4)");
  Config heads = layout(3, 1);
  heads.model.num_heads = 12;
  heads.model.head_dim = 2;
  expect_refused<ConfigError>(3, heads, nullptr, "model.num_kv_heads (2)");
  heads.model.num_kv_heads = 3;
  expect_refused<ConfigError>(3, heads, nullptr, "model.ffn_hidden_size (32)");
  expect_refused<ConfigError>(3, layout(2, 2), nullptr, "does not make 3 processes");
  expect_refused<ConfigError>(5, layout(1, 5), nullptr, "layers");
  Config interleaved = layout(1, 2);
  interleaved.parallel.schedule = PipelineSchedule::interleaved;
  interleaved.parallel.virtual_stages = 2;
  expect_refused<ConfigError>(
      2, interleaved, [](Engine& engine) { engine.step(random_batch(3, kSeq, 1, kVocab)); },
      "micro-batches in multiples of the 2 pipeline stages, not 3");
  Config vocabulary = layout(4, 1);
  vocabulary.model.vocab_size = 3;
  expect_refused<ConfigError>(4, vocabulary, nullptr, "model.vocab_size (3)");
  Config context = layout(1, 1);
  context.parallel.context = 2;
  expect_refused<InvalidArgument>(
      2, context, [](Engine& engine) { engine.step(random_batch(2, 6, 1, kVocab)); },
      "a sequence of 6 positions cannot be shared by 2 context ranks");
  const auto writes = [](Engine& engine) { Generator(engine).run({{1, 2}}, {}); };
  expect_refused<ConfigError>(2, context, writes, "texts are not written by context ranks");
  Config experts = layout(1, 1);
  experts.model.num_experts = 4;
  experts.parallel.expert = experts.parallel.data.emplace(2);
  expect_refused<ConfigError>(2, experts, writes, "texts are not written by expert ranks");
  experts.model.num_experts = 3;
  expect_refused<ConfigError>(2, experts, nullptr, "does not divide by parallel.expert (2)");
  Config encoder = edge_config({"bert"}, {});
  encoder.parallel.context = 2;
  expect_refused<ConfigError>(2, encoder, nullptr, "computes whole samples only");
  Config sequence = layout(2, 1);
  sequence.parallel.sequence = true;
  expect_refused<InvalidArgument>(
      2, sequence, [](Engine& engine) { engine.step(random_batch(2, 7, 1, kVocab)); }, "7");
}

}  // namespace
}  // namespace tessera::test
