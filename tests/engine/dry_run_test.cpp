/// Dry runs of models that are no configuration: a user's own, one rank and several.

#include "tessera/engine/dry_run.hpp"

#include <gtest/gtest.h>

#include <mutex>

#include "tessera/autograd/functions.hpp"
#include "tessera/nn/layers.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::dry {
namespace {

/// The model of examples/01_own_model.
struct Reciter : Model {
  Reciter(std::int64_t vocab, std::int64_t length, std::int64_t width)
      : vocab_(vocab),
        length_(length),
        embedding_(submodule<nn::Embedding>(
            "embedding",
            nn::Embedding::Options{.vocab_size = vocab, .size = width, .max_positions = length})),
        norm_(submodule<nn::Norm>("norm", nn::Norm::Options{.size = width})),
        hidden_(submodule<nn::Linear>("hidden", nn::Linear::Options{.in = width, .out = 4 * width})),
        head_(submodule<nn::Linear>("head", nn::Linear::Options{.in = 4 * width, .out = vocab})) {}

  Var forward(const Forward& f) override {
    const Var x_sbh = norm_.forward(f, embedding_.forward(f), {}).y;
    const Var h_sbf = activation(f.exec, hidden_.forward(f, x_sbh), ops::ActivationKind::gelu_tanh);
    return head_.forward(f, h_sbf);
  }
  std::int64_t vocab_size() const override { return vocab_; }
  std::int64_t max_positions() const override { return length_; }

  std::int64_t vocab_, length_;
  nn::Embedding& embedding_;
  nn::Norm& norm_;
  nn::Linear& hidden_;
  nn::Linear& head_;
};

constexpr std::int64_t kVocab = 257, kLength = 32;

std::unique_ptr<Model> make_reciter(ProcessMesh&) { return std::make_unique<Reciter>(kVocab, kLength, 32); }

struct Case {
  const char* name;
  int ranks = 1;
  int zero_stage = 1;
  OptimizerName optimizer = OptimizerName::adamw;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class OwnModel : public ::testing::TestWithParam<Case> {};

TEST_P(OwnModel, IsFoundOutAsItRuns) {
  const Case& c = GetParam();
  EngineOptions options{.micro_batch_size = 2};
  options.optimizer.name = c.optimizer;
  options.layout.zero_stage = c.zero_stage;
  const MeshShape mesh{.dp = c.ranks};
  std::mutex mutex;
  test::run_local(c.ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const int rank = world->rank();
    EngineOptions real = options;
    real.layout.mesh = c.ranks == 1 ? ProcessMesh::self() : std::make_shared<ProcessMesh>(world, mesh);
    Engine engine(make_reciter(*real.layout.mesh), real, ExecCtx::cpu(1));
    StepReport report;
    for (int step = 0; step < 2; ++step) report = engine.step(test::random_batch(8, kLength, 3, kVocab));
    const DryRun dry = dry_run(make_reciter, options, mesh, rank, {2, kLength}, 4);
    const std::lock_guard lock(mutex);
    const auto peak = static_cast<double>(engine.ctx().allocator->stats().peak_used_bytes);
    EXPECT_NEAR(static_cast<double>(dry.memory_bytes()) / peak, 1.0, 0.02) << "rank " << rank;
    for (const AxisTraffic& axis : report.traffic)
      EXPECT_EQ(dry.bytes_sent(axis.axis), static_cast<std::int64_t>(axis.bytes_sent)) << axis.axis;
    // 2 for a product and 4 for its gradients, of every weight that multiplies: the table does not.
    const double weights = 32 * 128 + 128 * kVocab, tokens = 2 * kLength;
    EXPECT_EQ(dry.pieces.at(0).forward.flops, 2 * weights * tokens);
    EXPECT_EQ(dry.pieces.at(0).backward.flops, 4 * weights * tokens);
    EXPECT_EQ(dry.most_in_flight, 1);
  });
}

const Case kCases[] = {
    {"one_rank"},        {"sgd", 1, 1, OptimizerName::sgd},     {"dp2", 2},
    {"dp3_zero0", 3, 0}, {"dp4_sgd", 4, 1, OptimizerName::sgd},
};
INSTANTIATE_TEST_SUITE_P(Layouts, OwnModel, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DryRank, SaysWhereAValueIsRead) {
  struct Reader : Reciter {
    using Reciter::Reciter;
    Var forward(const Forward& f) override {
      const Var logits = Reciter::forward(f);
      if (logits.value().to_floats()[0] > 0) return logits;
      return logits;
    }
  };
  const auto make = [](ProcessMesh&) { return std::make_unique<Reader>(kVocab, kLength, 32); };
  try {
    dry_run(make, {}, {}, 0, {2, kLength}, 1);
    FAIL() << "a value was read";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("on the meta device"), std::string::npos) << text;
    EXPECT_NE(text.find("(dry_run_test.cpp:"), std::string::npos) << text;
  }
}

TEST(RunColumn, LongStepsFollowFromShortOnes) {
  // Four stages of 100 bytes kept each, 10 more while a pass runs, messages of 256 bytes.
  const Port port{{64}, DType::f32, "residual"};
  for (const PipelineSchedule kind : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
    for (int stage = 0; stage < 4; ++stage) {
      PieceRecord piece;
      piece.forward.kept = 100;
      piece.forward.peak = 110;
      piece.backward.peak = 10;
      if (stage > 0) piece.inputs = {port};
      if (stage < 3) piece.outputs = {port};
      const auto record = [&](int m) { return run_column(make_schedule(kind, 4, 1, m), stage, {piece}, 1); };
      const ColumnRecord a = record(20), b = record(30), c = record(40);
      EXPECT_EQ(c.peak() - b.peak(), b.peak() - a.peak());
      EXPECT_EQ(c.sent, 40 * 256 * ((stage > 0) + (stage < 3)));
      const int in_flight = kind == PipelineSchedule::gpipe ? 40 : 4 - stage;
      EXPECT_EQ(c.most_in_flight, in_flight);
      EXPECT_EQ(c.activations, 100 * in_flight);
      EXPECT_EQ(c.batch, 40);
    }
  }
}

}  // namespace
}  // namespace tessera::dry
