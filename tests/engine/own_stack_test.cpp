/// A stack that is no decoder: cut, recomputed and tied, it trains as in one piece.

#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using test::random_batch;
using test::run_local;

constexpr std::int64_t kVocabulary = 31, kWidth = 12, kLength = 9, kLayers = 5;

struct Front : Block {
  explicit Front(std::string name, const nn::Embedding::Options& options)
      : Block(std::move(name)), embedding(submodule<nn::Embedding>("tokens", options)) {}
  Flow forward(const Forward& f, Flow) override { return {embedding.forward(f), {}, {}}; }
  nn::Embedding& embedding;
};

/// One branch per layer, with dropout.
struct Mixer : Block {
  explicit Mixer(std::string name)
      : Block(std::move(name)),
        norm(submodule<nn::Norm>("norm", nn::Norm::Options{.size = kWidth})),
        in(submodule<nn::Linear>("in", nn::Linear::Options{.in = kWidth, .out = 2 * kWidth, .std = 0.2})),
        out(submodule<nn::Linear>("out", nn::Linear::Options{.in = 2 * kWidth, .out = kWidth, .std = 0.2})) {}
  Flow forward(const Forward& f, Flow flow) override {
    const ResidualNorm x = norm.forward(f, flow.residual, flow.branch, flow.dropout);
    const Var h = activation(f.exec, in.forward(f, x.y), ops::ActivationKind::relu);
    return {x.residual, out.forward(f, h), f.dropout(name(), 0.2)};
  }
  nn::Norm& norm;
  nn::Linear &in, &out;
};

/// The head is the token table: the same object on the same rank, else a copy under the same name.
struct TiedHead : Head {
  TiedHead(std::string name, Parameter* shared)
      : Head(std::move(name)),
        norm(submodule<nn::Norm>("head.norm", nn::Norm::Options{.size = kWidth})),
        table(shared),
        weight(shared != nullptr
                   ? *shared
                   : parameter("front.tokens.word_embeddings.weight", Shape{kVocabulary, kWidth},
                               Init::normal(0.2f), {.reads_main = true, .tied = true, .counted = false})) {}
  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor&) override {
    const Var y = norm.forward(f, flow.residual, flow.branch, flow.dropout).y;
    Var logits = linear(f.exec, y, weight, nullptr);
    return output == Model::Output::logits ? logits
                                           : cross_entropy(f.exec, std::move(logits), f.input.labels);
  }
  const Parameter* borrowed() const override { return table; }
  nn::Norm& norm;
  Parameter* table;
  Parameter& weight;
};

struct OwnStack : Stack {
  explicit OwnStack(const Sharding& given) : Stack(kWidth, kLayers, {}, given) {
    Front* front = nullptr;
    for (const ModelPiece& piece : sharding().pieces) {
      begin_piece();
      if (piece.embedding)
        front = &add_front<Front>("front", nn::Embedding::Options{.vocab_size = kVocabulary,
                                                                  .size = kWidth,
                                                                  .max_positions = kLength,
                                                                  .std = 0.2,
                                                                  .dropout = 0.2,
                                                                  .tied = !holds_head()});
      for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i)
        add_layer<Mixer>("layers." + std::to_string(i));
      if (piece.head) add_head<TiedHead>("", front != nullptr ? &front->embedding.table() : nullptr);
    }
  }
  std::int64_t vocab_size() const override { return kVocabulary; }
  std::int64_t max_positions() const override { return kLength; }
};

/// Layers per piece, in the order the model runs, and how ranks share them.
struct Cut {
  std::string name;
  std::vector<std::int64_t> layers;
  int stages = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  RecomputeOptions recompute = {};
};

Sharding sharding_of(const Cut& cut, int stage) {
  Schedule schedule;
  schedule.kind = cut.schedule;
  schedule.stages = cut.stages;
  schedule.chunks = static_cast<int>(cut.layers.size()) / cut.stages;
  Sharding sharding{.tensor = {}, .pieces = {}, .recompute = cut.recompute};
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    const auto index = static_cast<std::size_t>(schedule.piece_of(stage, chunk));
    ModelPiece piece{.first_layer = 0,
                     .num_layers = cut.layers[index],
                     .embedding = index == 0,
                     .head = index + 1 == cut.layers.size()};
    for (std::size_t i = 0; i < index; ++i) piece.first_layer += cut.layers[i];
    sharding.pieces.push_back(piece);
  }
  return sharding;
}

/// Losses of four steps and one evaluation, and the gradients' norms: 0 where there is none.
std::vector<double> train(const Cut& cut) {
  std::vector<double> numbers;
  run_local(cut.stages, [&](std::shared_ptr<Communicator> world) {
    const int rank = world->rank();
    EngineOptions options{.steps = 4, .micro_batch_size = 1};
    options.optimizer.lr = 1e-2;
    options.lr_schedule.style = LrStyle::constant;
    options.layout.mesh = std::make_shared<ProcessMesh>(std::move(world), MeshShape{.pp = cut.stages});
    options.layout.schedule = cut.schedule;
    options.layout.chunks = static_cast<int>(cut.layers.size()) / cut.stages;
    Engine engine(std::make_unique<OwnStack>(sharding_of(cut, rank)), options, test::context(1, 3));
    std::vector<double> own;
    for (unsigned step = 0; step < 4; ++step) {
      const StepReport report = engine.step(random_batch(4, kLength, step, kVocabulary));
      own.push_back(report.loss);
      own.push_back(report.update.grad_norm);
    }
    own.push_back(engine.evaluate(random_batch(4, kLength, 9, kVocabulary)));
    if (rank == 0) numbers = own;
  });
  return numbers;
}

class OwnStackCuts : public ::testing::TestWithParam<Cut> {};

TEST_P(OwnStackCuts, TrainAsOnePieceDoes) {
  if (test::on_cuda() && GetParam().stages > 1) GTEST_SKIP() << "ranks are threads here";
  const std::vector<double> expected = train({"whole", {kLayers}}), got = train(GetParam());
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << i;
}

constexpr RecomputeOptions full(RecomputeMethod method, std::int64_t layers) {
  return {.what = Recompute::full, .method = method, .layers = layers};
}

INSTANTIATE_TEST_SUITE_P(
    All, OwnStackCuts,
    ::testing::Values(
        Cut{"recomputed_by_two", {5}, 1, PipelineSchedule::one_f_one_b, full(RecomputeMethod::uniform, 2)},
        Cut{"two_stages", {3, 2}, 2},
        Cut{"three_stages_some_recomputed",
            {2, 2, 1},
            3,
            PipelineSchedule::zb_h1,
            full(RecomputeMethod::block, 1)},
        Cut{"interleaved", {2, 1, 1, 1}, 2, PipelineSchedule::interleaved},
        Cut{"folded_with_both_ends_on_one_stage", {1, 2, 1, 1}, 2, PipelineSchedule::zb_v}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
