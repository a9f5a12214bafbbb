/// Losses in the middle of a model: cut, split and recomputed in any way, it trains as on one rank.

#include <algorithm>
#include <cmath>

#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using test::data_part;
using test::random_batch;
using test::run_local;

constexpr std::int64_t kVocabulary = 30, kWidth = 12, kLength = 10, kLayers = 5;
/// Layers that add to the loss of positions, and the one that tells classes of samples apart.
constexpr std::int64_t kBalanced = 2, kClassifies = 3;
constexpr double kBalance = 0.3, kOrder = 0.7, kDropout = 0.2;

/// Half the sum of squares of each row of x [..., c].
class RowSquares final : public Function {
 public:
  explicit RowSquares(Tensor x) : x_(std::move(x)) {}
  const char* name() const override { return "row_squares"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dx = Tensor::empty(ctx, x_.shape(), DType::f32);
    const std::int64_t c = x_.size(-1);
    for (std::int64_t i = 0; i < x_.numel(); ++i)
      dx.data<float>()[i] = x_.data<float>()[i] * grads[0].data<float>()[i / c];
    return {dx};
  }

 private:
  Tensor x_;
};

Var row_squares(const ExecCtx& ctx, const Var& x) {
  const Tensor& value = x.value();
  const std::int64_t c = value.size(-1);
  Tensor y = Tensor::empty(ctx, {value.numel() / c}, DType::f32);
  for (std::int64_t row = 0; row < y.numel(); ++row) {
    float sum = 0;
    for (std::int64_t i = 0; i < c; ++i) sum += 0.5f * std::pow(value.data<float>()[row * c + i], 2.0f);
    y.data<float>()[row] = sum;
  }
  return record({x}, std::move(y), [&] { return std::make_unique<RowSquares>(value); });
}

struct Front : Block {
  Front(std::string name, const TensorParallel& tensor)
      : Block(std::move(name)),
        embedding(submodule<nn::Embedding>("tokens", nn::Embedding::Options{.vocab_size = kVocabulary,
                                                                            .size = kWidth,
                                                                            .max_positions = kLength,
                                                                            .std = 0.5,
                                                                            .dropout = kDropout,
                                                                            .tensor = tensor})) {}
  Flow forward(const Forward& f, Flow) override { return {embedding.forward(f), {}, {}}; }
  nn::Embedding& embedding;
};

nn::Norm::Options norm_options(const TensorParallel& tensor) {
  return {.size = kWidth, .sequence_parallel = tensor.sharded_sequence()};
}

struct Mistakes {
  bool undeclared = false, off_tape = false, twice = false;
};

struct Layer : Block {
  Layer(std::string name, std::int64_t index, const TensorParallel& tp, const Mistakes& mistakes)
      : Block(std::move(name)),
        index(index),
        tensor(tp),
        mistakes(mistakes),
        norm(submodule<nn::Norm>("norm", norm_options(tp))),
        in(submodule<nn::Linear>("in", nn::Linear::Options{.in = kWidth,
                                                           .out = 2 * kWidth,
                                                           .std = 0.3,
                                                           .tensor = tp,
                                                           .split = nn::Linear::Split::column})),
        out(submodule<nn::Linear>("out", nn::Linear::Options{.in = 2 * kWidth,
                                                             .out = kWidth,
                                                             .std = 0.3,
                                                             .tensor = tp,
                                                             .split = nn::Linear::Split::row})) {
    if (index <= kBalanced)
      router = &parameter("router", Shape{3, kWidth}, Init::normal(0.5f),
                          {.partial_over_tensor = tp.sharded_sequence()});
    if (index == kClassifies)
      classes = &submodule<nn::Linear>("classes", nn::Linear::Options{.in = kWidth, .out = 2, .std = 0.5});
  }
  Flow forward(const Forward& f, Flow flow) override {
    const ResidualNorm x = norm.forward(f, flow.residual, flow.branch, flow.dropout);
    if (f.losses != nullptr) add_losses(f, x.y);
    const Var h = activation(f.exec, in.forward(f, x.y), ops::ActivationKind::relu);
    return {x.residual, out.forward(f, h), f.dropout(name(), kDropout)};
  }
  void add_losses(const Forward& f, const Var& x) {
    if (router != nullptr) {
      const Var from = mistakes.off_tape ? Var(x.value()) : x;
      Var values = row_squares(f.exec, linear(f.exec, from, *router, nullptr));
      f.add_loss(mistakes.undeclared ? "balanec" : "balance", std::move(values), tensor.sharded_sequence());
    }
    if (classes == nullptr) return;
    const Var logits = classes->forward(f, first_position(f.exec, tensor, x));
    f.add_loss("order", cross_entropy(f.exec, logits, f.input.sample_labels));
  }
  std::int64_t index;
  TensorParallel tensor;
  Mistakes mistakes;
  nn::Norm& norm;
  nn::Linear &in, &out;
  Parameter* router = nullptr;
  nn::Linear* classes = nullptr;
};

struct LastHead : Head {
  LastHead(std::string name, const TensorParallel& tp)
      : Head(std::move(name)),
        tensor(tp),
        norm(submodule<nn::Norm>("norm", norm_options(tp))),
        weight(parameter("weight", Placement::split({kVocabulary, kWidth}, 0, tp.rank(), tp.size()),
                         Init::normal(0.4f))) {}
  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor& upstream) override {
    const Var y = norm.forward(f, flow.residual, flow.branch, flow.dropout).y;
    if (output == Model::Output::losses)
      return vocab_linear_cross_entropy(f.exec, tensor, y, weight, f.input.labels, upstream);
    return linear(f.exec, y, weight, nullptr);
  }
  TensorParallel tensor;
  nn::Norm& norm;
  Parameter& weight;
};

struct LossyStack : Stack {
  LossyStack(const Sharding& given, const Mistakes& mistakes = {})
      : Stack(kWidth, kLayers, {}, given), mistakes_(mistakes) {
    for (const ModelPiece& piece : sharding().pieces) {
      begin_piece();
      if (piece.embedding) add_front<Front>("front", sharding().tensor);
      for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i)
        add_layer<Layer>("layers." + std::to_string(i), i, sharding().tensor, mistakes);
      if (piece.head) add_head<LastHead>("head", sharding().tensor);
    }
  }
  std::int64_t vocab_size() const override { return kVocabulary; }
  std::int64_t max_positions() const override { return kLength; }
  std::int64_t sample_classes() const override { return 2; }
  std::vector<ExtraLossSpec> extra_losses() const override {
    return {{"balance", kBalance, LossCount::positions},
            {mistakes_.twice ? "balance" : "order", kOrder, LossCount::sample_targets}};
  }
  Mistakes mistakes_;
};

/// How ranks share the model.
struct Case {
  std::string name;
  std::vector<std::int64_t> layers = {kLayers};  // of each piece, in the order the model runs
  int stages = 1, tensor = 1, data = 1;
  bool sequence = false;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  RecomputeOptions recompute = {};
  float loss_scale = 1;
  Mistakes mistakes = {};

  int ranks() const { return stages * tensor * data; }
};
void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

std::vector<ModelPiece> pieces_of(const Case& c, int stage) {
  Schedule schedule;
  schedule.kind = c.schedule;
  schedule.stages = c.stages;
  schedule.chunks = static_cast<int>(c.layers.size()) / c.stages;
  std::vector<ModelPiece> pieces;
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    const auto index = static_cast<std::size_t>(schedule.piece_of(stage, chunk));
    ModelPiece piece{0, c.layers[index], index == 0, index + 1 == c.layers.size()};
    for (std::size_t i = 0; i < index; ++i) piece.first_layer += c.layers[i];
    pieces.push_back(piece);
  }
  return pieces;
}

std::unique_ptr<Engine> make_engine(const Case& c, std::shared_ptr<Communicator> world) {
  EngineOptions options{.steps = 4, .micro_batch_size = 1};
  options.optimizer.lr = 1e-2;
  options.optimizer.eps = 1e-3;  // small gradients' rounding is not blown up to a whole step
  options.lr_schedule.style = LrStyle::constant;
  options.loss_scale.first = c.loss_scale;
  const auto mesh = std::make_shared<ProcessMesh>(std::move(world),
                                                  MeshShape{.tp = c.tensor, .dp = c.data, .pp = c.stages});
  options.layout.mesh = mesh;
  options.layout.schedule = c.schedule;
  options.layout.chunks = static_cast<int>(c.layers.size()) / c.stages;
  const Sharding sharding{.tensor = {.comm = &(*mesh)[Axis::tp], .sequence = c.sequence},
                          .pieces = pieces_of(c, mesh->coordinates().pp),
                          .recompute = c.recompute};
  return std::make_unique<Engine>(std::make_unique<LossyStack>(sharding, c.mistakes), options,
                                  test::context(1, 3));
}

/// The third of four samples has no label of its own.
Batch whole_batch(unsigned seed) {
  Batch batch = random_batch(4, kLength, seed, kVocabulary);
  batch.sample_labels = {1, static_cast<std::int32_t>(seed % 2), -100, 0};
  return batch;
}

/// Loss, what it is made of, and norms of three steps, the second of two calls; an evaluation; gradients of
/// the first step and weights after the last.
struct Results {
  std::vector<double> numbers;
  test::WholeTensors gradients, weights;
};

/// `see` is given each parameter's gradient, then each weight.
Results train(const Case& c, std::shared_ptr<Communicator> world,
              const std::function<void(const Parameter&, const Tensor&, bool gradient)>& see) {
  Results results;
  const auto engine = make_engine(c, std::move(world));
  const auto part = [&](unsigned seed) {
    return data_part(whole_batch(seed), engine->mesh().coordinates().dp, c.data, 1);
  };
  const auto note = [&](double loss, const std::vector<LossTerm>& terms) {
    results.numbers.push_back(loss);
    for (const LossTerm& term : terms) results.numbers.push_back(term.mean());
  };
  for (unsigned step = 0; step < 3; ++step) {
    const double factor = step == 1 ? 0.25 : 1.0;
    const double loss = engine->forward_backward(part(step), factor);
    note(loss, engine->terms());
    if (step == 0) {
      for (const Parameter* p : engine->params().parameters())
        see(*p, engine->params().gradient().whole(*p), true);
    }
    if (step == 1) note(engine->forward_backward(part(7), 0.75), engine->terms());
    results.numbers.push_back(engine->update().grad_norm);
  }
  const std::vector<LossTerm> terms = engine->evaluate_terms(part(9));
  note(engine->evaluate(part(9)), terms);
  EXPECT_DOUBLE_EQ(total_of(terms), engine->evaluate(part(9)));
  const StepReport report = engine->step(part(10));
  note(report.loss, report.terms);
  for (const Parameter* p : engine->params().parameters())
    see(*p, engine->params().weights().whole(*p), false);
  return results;
}

Results train_whole() {
  Results whole;
  test::WholeTensors gradients, weights;
  whole = train({"whole"}, make_self_communicator(), [&](const Parameter& p, const Tensor& t, bool gradient) {
    (gradient ? gradients : weights)[p.name()] = t.to_floats();
  });
  whole.gradients = std::move(gradients);
  whole.weights = std::move(weights);
  return whole;
}

class ExtraLossLayouts : public ::testing::TestWithParam<Case> {};

TEST_P(ExtraLossLayouts, TrainAsOnOneRank) {
  if (test::on_cuda()) GTEST_SKIP() << "this test's loss reads its tensors on the host";
  const Results whole = train_whole();
  const Case& c = GetParam();
  std::mutex mutex;
  run_local(c.ranks(), [&](std::shared_ptr<Communicator> world) {
    const Results own = train(c, std::move(world), [&](const Parameter& p, const Tensor& t, bool gradient) {
      if (gradient && c.loss_scale != 1) return;  // it is scaled
      const double error = test::local_error(p, t, (gradient ? whole.gradients : whole.weights).at(p.name()));
      const std::lock_guard lock(mutex);
      EXPECT_LE(error, 1e-5) << p.name() << (gradient ? ", gradient" : "");
    });
    const std::lock_guard lock(mutex);
    ASSERT_EQ(own.numbers.size(), whole.numbers.size());
    for (std::size_t i = 0; i < own.numbers.size(); ++i)
      EXPECT_NEAR(own.numbers[i], whole.numbers[i], 2e-6 * std::abs(whole.numbers[i])) << i;
  });
}

constexpr RecomputeOptions full(RecomputeMethod method, std::int64_t layers, bool partition = false) {
  return {.what = Recompute::full, .method = method, .layers = layers, .partition = partition};
}

INSTANTIATE_TEST_SUITE_P(
    All, ExtraLossLayouts,
    ::testing::Values(Case{.name = "data", .data = 2}, Case{.name = "tensor", .tensor = 2},
                      Case{.name = "sequence", .tensor = 2, .sequence = true},
                      Case{.name = "pipeline", .layers = {3, 2}, .stages = 2},
                      Case{.name = "tensor_and_pipeline",
                           .layers = {1, 4},
                           .stages = 2,
                           .tensor = 2,
                           .sequence = true,
                           .recompute = full(RecomputeMethod::uniform, 2)},
                      Case{.name = "three_stages_zb_h1_scaled",
                           .layers = {2, 2, 1},
                           .stages = 3,
                           .schedule = PipelineSchedule::zb_h1,
                           .recompute = full(RecomputeMethod::block, 1),
                           .loss_scale = 1024},
                      Case{.name = "interleaved",
                           .layers = {2, 1, 1, 1},
                           .stages = 2,
                           .schedule = PipelineSchedule::interleaved},
                      Case{.name = "folded_over_data",
                           .layers = {1, 2, 1, 1},
                           .stages = 2,
                           .data = 2,
                           .schedule = PipelineSchedule::zb_v},
                      Case{.name = "recomputed", .recompute = full(RecomputeMethod::uniform, 2)},
                      Case{.name = "recomputed_in_shares",
                           .tensor = 2,
                           .recompute = full(RecomputeMethod::uniform, 3, true)}),
    [](const auto& info) { return info.param.name; });

class ExtraLossCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (test::on_cuda()) GTEST_SKIP() << "this test's loss reads its tensors on the host";
  }
  static std::unique_ptr<Engine> engine_of(const Mistakes& mistakes = {}) {
    return make_engine({.name = "", .mistakes = mistakes}, make_self_communicator());
  }
};

/// It is the model's own loss that they belong to.
TEST_F(ExtraLossCalls, IsNotTrainedWithALossOfTheCallers) {
  const auto engine = engine_of();
  const Batch batch = whole_batch(1);
  for (const auto output : {Engine::Output::logits, Engine::Output::token_losses}) {
    OpenForward forward = engine->forward(batch, output);
    Tensor ones = Tensor::empty(engine->ctx(), forward.output.shape(), DType::f32);
    std::fill_n(ones.data<float>(), ones.numel(), 1.0f);
    forward.backward(ones);
    for (const Parameter* p : engine->params().parameters()) {
      const std::vector<float> gradient = engine->params().gradient().whole(*p).to_floats();
      const bool none = std::ranges::all_of(gradient, [](float v) { return v == 0; });
      EXPECT_EQ(none, p->name().ends_with("router") || p->name().find("classes") != std::string::npos)
          << p->name();
    }
    engine->discard();
  }
}

TEST_F(ExtraLossCalls, IsRefusedWhereItWouldBeLost) {
  const Batch batch = whole_batch(1);
  const auto train = [&](const Mistakes& mistakes, const Batch& given) {
    engine_of(mistakes)->forward_backward(given);
  };
  test::expect_error<InvalidArgument>([&] { train({.undeclared = true}, batch); }, "'balanec'", "declare");
  test::expect_error<InvalidArgument>([&] { train({.off_tape = true}, batch); }, "'balance'", "no tape");
  test::expect_error<InvalidArgument>([&] { train({.twice = true}, batch); }, "two losses", "'balance'");
  Batch without = batch;
  without.sample_labels.clear();
  test::expect_error<InvalidArgument>([&] { train({}, without); }, "'order'", "sample_labels");
  Batch wrong = batch;
  wrong.sample_labels[1] = 2;
  test::expect_error<DataError>([&] { train({}, wrong); }, "sample 1", "[0, 2)");
  wrong = batch;
  wrong.token_types.assign(wrong.tokens.size(), 0);
  test::expect_error<InvalidArgument>([&] { train({}, wrong); }, "token_types", "reads none");
}

}  // namespace
}  // namespace tessera
