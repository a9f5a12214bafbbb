/// A stack that is no decoder: cut, recomputed and tied, it trains as in one piece.

#include "tests/engine/engine_support.hpp"
#include "tests/engine/stack_support.hpp"
#include "tests/support/device.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using Cut = test::LayerCut;
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
      if (piece.head)
        add_head<test::TiedHead>("", front != nullptr ? &front->embedding.table() : nullptr,
                                 "front.tokens.word_embeddings.weight", Shape{kVocabulary, kWidth}, 0.2f);
    }
  }
  std::int64_t vocab_size() const override { return kVocabulary; }
  std::int64_t max_positions() const override { return kLength; }
};

/// Losses of four steps and one evaluation, and the gradients' norms: 0 where there is none.
std::vector<double> train(const Cut& cut) {
  std::vector<double> numbers;
  run_local(cut.stages, [&](std::shared_ptr<Communicator> world) {
    const int rank = world->rank();
    const auto mesh = std::make_shared<ProcessMesh>(std::move(world), MeshShape{.pp = cut.stages});
    const Sharding sharding{.tensor = {}, .pieces = cut.pieces_of(rank), .recompute = cut.recompute};
    Engine engine(std::make_unique<OwnStack>(sharding), cut.engine_options(mesh), test::context(1, 3));
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
