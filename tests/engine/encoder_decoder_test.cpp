/// An encoder and a decoder in one stack: from the join on two values cross every boundary, of different
/// lengths. Cut anywhere it trains as in one piece.

#include <algorithm>
#include <cmath>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/engine/stack_support.hpp"
#include "tests/support/device.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using test::local_error;
using test::random_batch;
using test::run_local;

constexpr std::int64_t kVocabulary = 31, kWidth = 12, kLength = 9;
/// The encoder reads the first positions of each sample; layers count through encoder and decoder.
constexpr std::int64_t kEncoded = 5, kEncoderLayers = 3, kLayers = 6;
constexpr double kDropout = 0.2;
constexpr const char* kTable = "encoder.tokens.word_embeddings.weight";

/// Every row of x [s, b, c] reads the rows of memory [l, b, c]: attention with one head whose keys are its
/// values.
class Attend final : public Function {
 public:
  Attend(Tensor x, Tensor memory) : x_(std::move(x)), memory_(std::move(memory)) {}
  const char* name() const override { return "attend"; }

  /// y = sum over l of p_l memory_l, p = softmax(x . memory).
  static Tensor forward(const ExecCtx& ctx, const Tensor& x, const Tensor& memory) {
    Tensor y = Tensor::empty(ctx, x.shape(), DType::f32);
    for (std::int64_t row = 0; row < x.size(0) * x.size(1); ++row) {
      const std::vector<float> p = weights(x, memory, row);
      for (std::int64_t c = 0; c < x.size(2); ++c) {
        float sum = 0;
        for (std::size_t l = 0; l < p.size(); ++l) sum += p[l] * read(memory, l, row)[c];
        y.data<float>()[row * x.size(2) + c] = sum;
      }
    }
    return y;
  }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const std::int64_t width = x_.size(2);
    Tensor dx = Tensor::empty(ctx, x_.shape(), DType::f32),
           dm = Tensor::empty(ctx, memory_.shape(), DType::f32);
    std::fill_n(dx.data<float>(), dx.numel(), 0.0f);
    std::fill_n(dm.data<float>(), dm.numel(), 0.0f);
    for (std::int64_t row = 0; row < x_.size(0) * x_.size(1); ++row) {
      const std::vector<float> p = weights(x_, memory_, row);
      const float* const g = grads[0].data<float>() + row * width;
      const float* const x = x_.data<float>() + row * width;
      std::vector<float> of_p(p.size());
      float mean = 0;
      for (std::size_t l = 0; l < p.size(); ++l) {
        of_p[l] = dot(g, read(memory_, l, row), width);
        mean += p[l] * of_p[l];
      }
      for (std::size_t l = 0; l < p.size(); ++l) {
        const float of_score = p[l] * (of_p[l] - mean);
        float* const to = dm.data<float>() + (read(memory_, l, row) - memory_.data<float>());
        for (std::int64_t c = 0; c < width; ++c) {
          dx.data<float>()[row * width + c] += of_score * read(memory_, l, row)[c];
          to[c] += p[l] * g[c] + of_score * x[c];
        }
      }
    }
    return {dx, dm};
  }

 private:
  static float dot(const float* a, const float* b, std::int64_t n) {
    float sum = 0;
    for (std::int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
    return sum;
  }
  /// Position l of the sample that row `row` of x belongs to.
  static const float* read(const Tensor& memory, std::size_t l, std::int64_t row) {
    const std::int64_t batch = memory.size(1);
    return memory.data<float>() + (static_cast<std::int64_t>(l) * batch + row % batch) * memory.size(2);
  }
  static std::vector<float> weights(const Tensor& x, const Tensor& memory, std::int64_t row) {
    std::vector<float> p(static_cast<std::size_t>(memory.size(0)));
    float sum = 0;
    for (std::size_t l = 0; l < p.size(); ++l)
      sum += p[l] = std::exp(dot(x.data<float>() + row * x.size(2), read(memory, l, row), x.size(2)) * 0.3f);
    for (float& v : p) v /= sum;
    return p;
  }

  Tensor x_, memory_;
};

Var attend(const ExecCtx& ctx, const Var& x, const Var& memory) {
  return record({x, memory}, Attend::forward(ctx, x.value(), memory.value()),
                [&] { return std::make_unique<Attend>(x.value(), memory.value()); });
}

/// The same value, through which no gradient goes: a mistake to plant.
class Forget final : public Function {
 public:
  const char* name() const override { return "forget"; }
  Tensors backward_input(const ExecCtx&, Tensors) override { return Tensors(1); }
};

nn::Embedding::Options embedding_options(bool tied) {
  return {.vocab_size = kVocabulary,
          .size = kWidth,
          .max_positions = kLength,
          .std = 0.5,
          .dropout = kDropout,
          .tied = tied};
}

struct EncoderFront : Block {
  EncoderFront(std::string name, bool tied)
      : Block(std::move(name)), embedding(submodule<nn::Embedding>("tokens", embedding_options(tied))) {}
  Flow forward(const Forward& f, Flow) override {
    MicroBatch begin = f.input;
    begin.seq_length = kEncoded;
    begin.tokens = f.input.tokens.narrow(0, 0, kEncoded);
    begin.positions = f.input.positions.narrow(0, 0, kEncoded * begin.batch);
    const Forward part{
        .exec = f.exec, .input = begin, .tape = f.tape, .training = f.training, .step = f.step};
    return {embedding.forward(part), {}, {}};
  }
  nn::Embedding& embedding;
};

/// The encoder's stream ends here as the memory; the decoder's begins.
struct Join : Block {
  Join(std::string name, bool tied)
      : Block(std::move(name)),
        norm(submodule<nn::Norm>("norm", nn::Norm::Options{.size = kWidth})),
        embedding(submodule<nn::Embedding>("tokens", embedding_options(tied))) {}
  Flow forward(const Forward& f, Flow flow) override {
    flow.memory = norm.forward(f, flow.residual, {}).y;
    flow.residual = embedding.forward(f);
    return flow;
  }
  nn::Norm& norm;
  nn::Embedding& embedding;
};

/// One branch, with dropout; in the decoder it reads the memory first.
struct Layer : Block {
  Layer(std::string name, std::int64_t length, const TensorParallel& tensor)
      : Block(std::move(name)),
        length(length),
        norm(submodule<nn::Norm>("norm", nn::Norm::Options{.size = kWidth})),
        in(submodule<nn::Linear>("in", nn::Linear::Options{.in = kWidth,
                                                           .out = 2 * kWidth,
                                                           .std = 0.2,
                                                           .tensor = tensor,
                                                           .split = nn::Linear::Split::column})),
        out(submodule<nn::Linear>("out", nn::Linear::Options{.in = 2 * kWidth,
                                                             .out = kWidth,
                                                             .std = 0.2,
                                                             .tensor = tensor,
                                                             .split = nn::Linear::Split::row})) {}
  Flow forward(const Forward& f, Flow flow) override {
    const ResidualNorm x = norm.forward(f, flow.residual, flow.branch, flow.dropout);
    const Var read = flow.memory ? attend(f.exec, x.y, flow.memory) : x.y;
    const Var h = activation(f.exec, in.forward(f, read), ops::ActivationKind::relu);
    flow.residual = x.residual;
    flow.branch = out.forward(f, h);
    flow.dropout = f.dropout(name(), kDropout, length);
    return flow;
  }
  std::int64_t length;
  nn::Norm& norm;
  nn::Linear &in, &out;
};

struct EncoderDecoder : Stack {
  /// Mistakes: `forgetful`, the layer of the decoder before which a boundary loses the memory's gradient (-1
  /// = none); `third_tie`, the decoder's table is declared as tied too.
  explicit EncoderDecoder(const Sharding& given, std::int64_t forgetful = -1, bool third_tie = false)
      : Stack(kWidth, kLayers, {}, given), forgetful_(forgetful) {
    EncoderFront* front = nullptr;
    for (const ModelPiece& piece : sharding().pieces) {
      begin_piece();
      if (piece.embedding) front = &add_front<EncoderFront>("encoder", !holds_head());
      for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i) {
        if (i == kEncoderLayers) add_front<Join>("decoder", third_tie);
        add_layer<Layer>("layers." + std::to_string(i), i < kEncoderLayers ? kEncoded : kLength,
                         sharding().tensor);
      }
      if (piece.head)
        add_head<test::TiedHead>("", front != nullptr ? &front->embedding.table() : nullptr, kTable,
                                 Shape{kVocabulary, kWidth}, 0.5f);
    }
  }
  std::vector<Var> run_piece(const Forward& forward, int piece, const std::vector<Var>& inputs, Output output,
                             const Tensor& upstream) override {
    std::vector<Var> given = inputs;
    if (sharding().pieces[static_cast<std::size_t>(piece)].first_layer == forgetful_)
      given[1] = record({inputs[1]}, inputs[1].value(), [] { return std::make_unique<Forget>(); });
    return Stack::run_piece(forward, piece, given, output, upstream);
  }
  std::int64_t vocab_size() const override { return kVocabulary; }
  std::int64_t max_positions() const override { return kLength; }

 protected:
  std::vector<Port> flow_before(std::int64_t layer, const MicroBatchSize& size) const override {
    const MicroBatchSize encoded{size.batch, kEncoded};
    if (layer <= kEncoderLayers) return {stream("residual", encoded)};
    if (layer == kLayers) return {stream("residual", size)};  // the head reads no memory
    return {stream("residual", size), stream("memory", encoded)};
  }

 private:
  std::int64_t forgetful_;
};

struct Cut : test::LayerCut {
  int tensor = 1;
  std::int64_t forgetful = -1;
  bool third_tie = false;
  std::map<std::string, std::string> frozen = {};
};
void PrintTo(const Cut& cut, std::ostream* out) { *out << cut.name; }

std::unique_ptr<Engine> make_engine(const Cut& cut, std::shared_ptr<Communicator> world) {
  const auto mesh =
      std::make_shared<ProcessMesh>(std::move(world), MeshShape{.tp = cut.tensor, .pp = cut.stages});
  EngineOptions options = cut.engine_options(mesh);
  options.optimizer.eps = 1e-5;
  const Sharding sharding{.tensor = {&(*mesh)[Axis::tp]},
                          .pieces = cut.pieces_of(mesh->coordinates().pp),
                          .recompute = cut.recompute};
  auto engine = std::make_unique<Engine>(
      std::make_unique<EncoderDecoder>(sharding, cut.forgetful, cut.third_tie), options, test::context(1, 3));
  engine->set_frozen(cut.frozen);
  return engine;
}

/// Losses of three steps and an evaluation; gradients of the first and weights after the last, whole, by
/// name.
test::TrainedRun train_whole(const Cut& cut) {
  test::TrainedRun run;
  const auto engine = make_engine(cut, make_self_communicator());
  for (unsigned step = 0; step < 3; ++step) {
    run.losses.push_back(engine->forward_backward(random_batch(4, kLength, step, kVocabulary)));
    if (step == 0) run.gradients = test::whole_tensors(*engine, true);
    run.norms.push_back(engine->update().grad_norm);
  }
  run.losses.push_back(engine->evaluate(random_batch(4, kLength, 9, kVocabulary)));
  run.weights = test::whole_tensors(*engine, false);
  return run;
}

/// Largest errors, relative to each whole tensor's norm.
struct Errors {
  double loss = 0, gradient = 0, table = 0, weight = 0;  ///< table: gradient of what two stages may hold
  std::string worst_gradient, worst_weight;
};

Errors compare(const Cut& cut, const test::TrainedRun& whole) {
  Errors errors;
  std::mutex mutex;
  const auto see = [&](double& most, std::string* where, double error, const std::string& name) {
    const std::lock_guard lock(mutex);
    if (error <= most) return;
    most = error;
    if (where != nullptr) *where = name;
  };
  const auto relative = [](double a, double b) { return std::abs(a - b) / std::abs(b); };
  run_local(cut.stages * cut.tensor, [&](std::shared_ptr<Communicator> world) {
    const auto engine = make_engine(cut, std::move(world));
    for (unsigned step = 0; step < 3; ++step) {
      const double loss = engine->forward_backward(random_batch(4, kLength, step, kVocabulary));
      see(errors.loss, nullptr, relative(loss, whole.losses[step]), "");
      for (const Parameter* p : engine->params().parameters()) {
        if (step > 0 || !p->trained()) continue;
        const Tensor held = engine->params().gradient().whole(*p);
        const double error = local_error(*p, held, whole.gradients.at(p->name()));
        const bool table = p->name() == kTable;
        see(table ? errors.table : errors.gradient, table ? nullptr : &errors.worst_gradient, error,
            p->name());
      }
      see(errors.loss, nullptr, relative(engine->update().grad_norm, whole.norms[step]), "");
    }
    see(errors.loss, nullptr,
        relative(engine->evaluate(random_batch(4, kLength, 9, kVocabulary)), whole.losses.back()), "");
    for (const Parameter* p : engine->params().parameters()) {
      const Tensor held = engine->params().weights().whole(*p);
      see(errors.weight, &errors.worst_weight, local_error(*p, held, whole.weights.at(p->name())), p->name());
    }
  });
  return errors;
}

class EncoderDecoderCuts : public ::testing::TestWithParam<Cut> {
 protected:
  void SetUp() override {
    if (test::on_cuda()) GTEST_SKIP() << "this test's attention reads its tensors on the host";
  }
};

TEST_P(EncoderDecoderCuts, TrainAsOnePieceDoes) {
  Cut one{"whole", {kLayers}};
  one.frozen = GetParam().frozen;
  const Errors errors = compare(GetParam(), train_whole(one));
  EXPECT_LE(errors.loss, 1e-6);
  EXPECT_LE(errors.gradient, 1e-5) << errors.worst_gradient;
  EXPECT_LE(errors.table, 1e-5);
  EXPECT_LE(errors.weight, 1e-5) << errors.worst_weight;
}

/// The same pieces on one rank, which hands values over: between stages every gradient has the same bits, but
/// for the table's, whose two parts are added after all micro-batches.
TEST_P(EncoderDecoderCuts, HaveTheBitsOfTheirPiecesOnOneRank) {
  Cut cut = GetParam();
  if (cut.layers.size() == 1 || cut.tensor > 1) GTEST_SKIP() << "one piece, or sums over tensor ranks";
  cut.stages = 1;
  cut.schedule = PipelineSchedule::interleaved;
  const Errors errors = compare(GetParam(), train_whole(cut));
  EXPECT_EQ(errors.gradient, 0.0) << errors.worst_gradient;
  EXPECT_LE(errors.table, 1e-6);
}

constexpr RecomputeOptions full(RecomputeMethod method, std::int64_t layers, bool partition = false) {
  return {.what = Recompute::full, .method = method, .layers = layers, .partition = partition};
}

INSTANTIATE_TEST_SUITE_P(
    All, EncoderDecoderCuts,
    ::testing::Values(
        Cut{"recomputed_by_two", {6}, 1, PipelineSchedule::one_f_one_b, full(RecomputeMethod::uniform, 2)},
        Cut{"two_stages_at_the_join", {3, 3}, 2},
        Cut{"two_stages_in_the_encoder", {2, 4}, 2, PipelineSchedule::gpipe},
        Cut{"two_stages_in_the_decoder",
            {4, 2},
            2,
            PipelineSchedule::one_f_one_b,
            full(RecomputeMethod::block, 1)},
        Cut{"two_stages_and_a_head_alone", {4, 2, 0}, 3}, Cut{"three_stages", {2, 2, 2}, 3},
        Cut{"three_stages_zb_h1", {2, 2, 2}, 3, PipelineSchedule::zb_h1, full(RecomputeMethod::uniform, 3)},
        Cut{"four_stages", {1, 2, 2, 1}, 4},
        Cut{"four_stages_in_the_decoder_gpipe", {3, 1, 1, 1}, 4, PipelineSchedule::gpipe},
        Cut{"four_stages_zb_h1", {2, 2, 1, 1}, 4, PipelineSchedule::zb_h1},
        Cut{"interleaved", {2, 2, 1, 1}, 2, PipelineSchedule::interleaved},
        Cut{"interleaved_by_three",
            {1, 2, 1, 1, 1, 0},
            2,
            PipelineSchedule::interleaved,
            full(RecomputeMethod::uniform, 1)},
        Cut{"folded_with_both_ends_on_one_stage", {1, 3, 1, 1}, 2, PipelineSchedule::zb_v},
        Cut{"tensor_and_pipeline", {4, 2}, 2, PipelineSchedule::one_f_one_b, {}, 2},
        Cut{"tensor_and_pipeline_partitioned",
            {2, 4},
            2,
            PipelineSchedule::zb_h1,
            full(RecomputeMethod::uniform, 2, true),
            2},
        Cut{{"frozen_on_the_way", {2, 2, 2}, 3},
            1,
            -1,
            false,
            {{"layers.1.in.weight", "a"}, {"layers.3.out.weight", "b"}, {"decoder.norm.bias", "c"}}}),
    [](const auto& info) { return info.param.name; });

/// What the comparison above is for. The loss and the decoder's own gradients say nothing of it.
TEST(EncoderDecoder, AMemorysGradientLostAtOneBoundaryIsSeen) {
  if (test::on_cuda()) GTEST_SKIP() << "this test's attention reads its tensors on the host";
  Cut cut{"forgetful", {2, 2, 2}, 3};
  cut.forgetful = 4;
  const test::TrainedRun whole = train_whole({"whole", {kLayers}});
  const Errors errors = compare(cut, whole);
  EXPECT_GT(errors.gradient, 1e-2);
  const std::vector<std::string> before{"encoder.", "decoder.norm.", "layers.0.", "layers.1.", "layers.2."};
  EXPECT_TRUE(std::ranges::any_of(before, [&](const std::string& part) {
    return errors.worst_gradient.starts_with(part);
  })) << errors.worst_gradient;
}

/// Three samples in four micro-batches of an interleaved pipeline: one is empty, and crosses every boundary.
TEST(EncoderDecoder, PassesAnEmptyMicroBatchOn) {
  if (test::on_cuda()) GTEST_SKIP() << "this test's attention reads its tensors on the host";
  const auto train = [](const Cut& cut, std::shared_ptr<Communicator> world) {
    const auto engine = make_engine(cut, std::move(world));
    if (cut.stages > 1) engine->set_micro_batches(4);
    const double loss = engine->forward_backward(random_batch(3, kLength, 4, kVocabulary));
    return std::pair(loss, engine->update().grad_norm);
  };
  const auto [loss, norm] = train({"whole", {kLayers}}, make_self_communicator());
  run_local(2, [&, loss = loss, norm = norm](std::shared_ptr<Communicator> world) {
    const auto [own_loss, own_norm] =
        train({"interleaved", {2, 2, 1, 1}, 2, PipelineSchedule::interleaved}, std::move(world));
    EXPECT_NEAR(own_loss, loss, 1e-6 * loss);
    EXPECT_NEAR(own_norm, norm, 1e-6 * norm);
  });
}

TEST(EncoderDecoder, RefusesATieOfAStageInTheMiddle) {
  Cut cut{"tied", {2, 2, 2}, 3};
  cut.third_tie = true;
  const auto build = [&] {
    run_local(3, [&](std::shared_ptr<Communicator> world) { make_engine(cut, std::move(world)); });
  };
  test::expect_error<InvalidArgument>(build, "decoder.tokens.word_embeddings.weight", "neither the first");
}

/// The stack alone, without an engine.
class EncoderDecoderStack : public ::testing::Test {
 protected:
  void SetUp() override {
    if (test::on_cuda()) GTEST_SKIP() << "this test's attention reads its tensors on the host";
  }
  const ExecCtx ctx = test::context(1, 3);
  const MicroBatch input = to_micro_batch(ctx, random_batch(2, kLength, 1, kVocabulary));

  Var zeros(const Port& port) const {
    Tensor t = Tensor::empty(ctx, port.shape, port.dtype);
    std::fill_n(t.data<float>(), t.numel(), 0.0f);
    return t;
  }
};

TEST_F(EncoderDecoderStack, PassesAMemoryOnAsItCame) {
  EncoderDecoder model({.tensor = {}, .pieces = {{4, 1, false, false}}, .recompute = {}});
  ParamStore store(ctx, model.parameters(), {});
  const std::vector<Port> in = model.inputs(0, {2, kLength});
  ASSERT_EQ(in.size(), 2u);
  EXPECT_EQ(in[0].shape, (Shape{kLength, 2, kWidth}));
  EXPECT_EQ(in[1].shape, (Shape{kEncoded, 2, kWidth}));
  EXPECT_EQ(in[1].name, "memory");
  Tape tape;
  const std::vector<Var> given = {tape.input(zeros(in[0]).take(), true),
                                  tape.input(zeros(in[1]).take(), true)};
  const Forward forward{.exec = ctx, .input = input, .tape = &tape};
  const std::vector<Var> out = model.run_piece(forward, 0, given, Model::Output::losses, {});
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].value().raw(), given[1].value().raw());
  test::expect_error<InvalidArgument>(
      [&] { model.run_piece(forward, 0, {given[0]}, Model::Output::losses, {}); }, "1 values of 2");
}

/// Builds its Flow anew, and so loses what it knows nothing of.
struct Forgetful : Block {
  using Block::Block;
  Flow forward(const Forward&, Flow flow) override { return {flow.residual, {}, {}}; }
};
struct ForgetfulStack : Stack {
  explicit ForgetfulStack()
      : Stack(kWidth, 1, {}, {.tensor = {}, .pieces = {{0, 1, false, false}}, .recompute = {}}) {
    begin_piece();
    add_layer<Forgetful>("layers.0");
  }
  std::int64_t vocab_size() const override { return kVocabulary; }
  std::int64_t max_positions() const override { return kLength; }
  std::vector<Port> flow_before(std::int64_t, const MicroBatchSize& size) const override {
    return {stream("residual", size), stream(value, size)};
  }
  std::string value = "memory";
};

TEST_F(EncoderDecoderStack, RefusesBlocksThatLoseTheMemory) {
  ForgetfulStack model;
  const std::vector<Port> in = model.inputs(0, {2, kLength});
  const Forward forward{.exec = ctx, .input = input};
  const auto run = [&] {
    model.run_piece(forward, 0, {zeros(in[0]), zeros(in[1])}, Model::Output::losses, {});
  };
  test::expect_error<InvalidArgument>(run, "'layers.0'", "memory");
  model.value = "memori";
  test::expect_error<InvalidArgument>(run, "memori", "residual, memory");
}

TEST_F(EncoderDecoderStack, HasNoCache) {
  const EncoderDecoder model({});
  test::expect_error<InvalidArgument>([&] { model.check_generates(kLength); }, "stack", "not cached");
}

}  // namespace
}  // namespace tessera
