/// The tape's less usual ways: several roots, gradients taken off, the two phases, gates of weights.

#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera {
namespace {

using test::make_parameter;
using test::random_tensor;

struct Phased : ::testing::Test {
  Tensor ones(const Shape& shape) const {
    const Tensor t = Tensor::empty(ctx, shape, DType::f32);
    ops::fill_constant(ctx, t, 1.0f);
    return t;
  }
  ExecCtx ctx = test::context(2, 3);
};

TEST_F(Phased, SeveralRootsAddUp) {
  const Tensor value = random_tensor(ctx, {3, 5}, 1), a = random_tensor(ctx, {3, 5}, 2),
               b = random_tensor(ctx, {3, 5}, 3);
  Tape tape;
  const Var x = tape.input(value, true), constant = tape.input(value, false);
  Var y = add(ctx, x, x), z = add(ctx, y, constant);
  y.take();  // a root may be without its value
  // An input, what it leads to, one root twice, one that wants no gradient, one that gets none.
  tape.backward(ctx, {x, y, z, z, constant, y}, {a, b, b, a, a, Tensor()});
  const auto got = tape.grad(x).to_floats(), va = a.to_floats(), vb = b.to_floats();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], 3 * va[i] + 4 * vb[i], 1e-5f);
  EXPECT_EQ(a.to_floats(), va);
  EXPECT_EQ(b.to_floats(), vb);
}

TEST_F(Phased, AGradientCanBeTakenOffTheTape) {
  const Tensor upstream = random_tensor(ctx, {3, 5}, 2);
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  const Var y = activation(ctx, x, ops::ActivationKind::silu);
  tape.backward(ctx, y, upstream);
  const auto expected = tape.grad(x).to_floats();
  const Tensor taken = tape.take_grad(x);
  EXPECT_TRUE(taken.is_unique());
  EXPECT_EQ(taken.to_floats(), expected);
  EXPECT_FALSE(tape.grad(x));
}

TEST_F(Phased, WrappedGradientsAndValuesAreNotWrittenOver) {
  if (test::on_cuda()) GTEST_SKIP() << "wrapped memory is the host's";
  std::vector<float> upstream(15, 0.5f), logits(15, 0.25f);
  const Tensor labels = Tensor::from(ctx, std::vector<std::int32_t>{1, 4, 0}, {3});
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  tape.backward(ctx, activation(ctx, x, ops::ActivationKind::silu),
                Tensor::wrap(upstream.data(), {3, 5}, DType::f32));
  EXPECT_EQ(upstream, std::vector<float>(15, 0.5f));
  Tape other;
  Var in = other.input(Tensor::wrap(logits.data(), {3, 5}, DType::f32), true);
  const Var loss = cross_entropy(ctx, in, labels);
  in.take();
  other.backward(ctx, loss, ones({3}));
  EXPECT_EQ(logits, std::vector<float>(15, 0.25f));
}

/// Counts which of its phases ran.
class Phases final : public Function {
 public:
  Phases(Parameter& weight, std::string& log) : weight_(weight), log_(log) {}
  const char* name() const override { return "phases"; }
  Tensors backward_input(const ExecCtx&, Tensors grads) override {
    log_ += "i";
    return grads;
  }
  void backward_weight(const ExecCtx&) override {
    log_ += "w";
    if (log_.starts_with("!")) throw TrainingError("no gradient today");
  }
  Tensors backward(const ExecCtx&, Tensors grads) override {
    log_ += "b";
    return grads;
  }
  std::vector<Parameter*> parameters() const override { return {&weight_}; }

 private:
  Parameter& weight_;
  std::string& log_;
};

TEST_F(Phased, BothPhasesAtOnceUnlessDeferred) {
  const auto weight = make_parameter(ctx, "weight", {5}, 5);
  for (const auto weights : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
    std::string log;
    Tape tape;
    const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
    const Var y = record({x}, x.value(), [&] { return std::make_unique<Phases>(*weight, log); });
    EXPECT_EQ(tape.parameters(), std::vector<Parameter*>{weight.get()});
    tape.backward(ctx, y, ones({3, 5}), weights);
    tape.run_weight_gradients(ctx);
    EXPECT_EQ(log, weights == Tape::WeightGradients::immediate ? "b" : "iw");
    tape.run_weight_gradients(ctx);  // nothing is left
    EXPECT_EQ(log.size(), weights == Tape::WeightGradients::immediate ? 1u : 2u);
  }
}

/// Where nothing is deferred a norm computes both gradients in one pass.
TEST_F(Phased, NormsGiveTheSameGradientsInOnePassAndInTwo) {
  const DropoutSpec drop{.key = {.seed = 3, .site = 4}, .probability = 0.3f, .batch = 7, .seq_length = 11};
  for (const bool rms : {false, true}) {
    std::vector<std::vector<float>> gradients[2];
    for (const auto weights : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
      const auto weight = make_parameter(ctx, "weight", {68}, 5), bias = make_parameter(ctx, "bias", {68}, 6);
      auto& found = gradients[weights == Tape::WeightGradients::immediate ? 0 : 1];
      for (int contribution = 0; contribution < 2; ++contribution) {  // written, then added to
        Tape tape;
        const Var x = tape.input(random_tensor(ctx, {11, 7, 68}, 1), true),
                  branch = tape.input(random_tensor(ctx, {11, 7, 68}, 2), true);
        const ResidualNorm n =
            add_norm(ctx, x, branch, *weight, rms ? nullptr : bias.get(), {.rms = rms}, drop);
        tape.backward(ctx, {n.residual, n.y},
                      {random_tensor(ctx, {11, 7, 68}, 3), random_tensor(ctx, {11, 7, 68}, 4)}, weights);
        tape.run_weight_gradients(ctx);
        found.push_back(tape.grad(x).to_floats());
        found.push_back(tape.grad(branch).to_floats());
        found.push_back(weight->grad().to_floats());
        if (!rms) found.push_back(bias->grad().to_floats());
      }
    }
    ASSERT_EQ(gradients[0].size(), gradients[1].size());
    for (std::size_t g = 0; g < gradients[0].size(); ++g) {
      if (!test::on_cuda()) {
        EXPECT_EQ(gradients[0][g], gradients[1][g]) << "gradient " << g;
      }
      for (std::size_t i = 0; i < gradients[0][g].size(); ++i)
        ASSERT_NEAR(gradients[0][g][i], gradients[1][g][i], 2e-5f) << "gradient " << g << " [" << i << "]";
    }
  }
}

/// What is trained of a norm has the same gradient whether the rest is trained or not.
TEST_F(Phased, TheWeightOrTheBiasOfANormMayBeFrozen) {
  using Gradients = std::vector<std::vector<float>>;
  const auto gradients = [&](bool train_weight, bool train_bias, Tape::WeightGradients when) {
    const auto weight = make_parameter(ctx, "weight", {17}, 5, train_weight),
               bias = make_parameter(ctx, "bias", {17}, 7, train_bias);
    Gradients found(3);
    for (int contribution = 0; contribution < 2; ++contribution) {  // written, then added to
      Tape tape;
      const Var x = tape.input(random_tensor(ctx, {3, 5, 17}, 1), true);
      const ResidualNorm n = add_norm(ctx, x, Var(), *weight, bias.get(), {});
      tape.backward(ctx, n.y, random_tensor(ctx, {3, 5, 17}, 3), when);
      tape.run_weight_gradients(ctx);
      found[0] = tape.grad(x).to_floats();
    }
    EXPECT_EQ(weight->has_grad(), train_weight);
    EXPECT_EQ(bias->has_grad(), train_bias);
    if (train_weight) found[1] = weight->grad().to_floats();
    if (train_bias) found[2] = bias->grad().to_floats();
    return found;
  };
  for (const auto when : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
    const Gradients both = gradients(true, true, when);
    EXPECT_EQ(gradients(true, false, when), (Gradients{both[0], both[1], {}}));
    EXPECT_EQ(gradients(false, true, when), (Gradients{both[0], {}, both[2]}));
    const Gradients none = gradients(false, false, when);
    for (std::size_t i = 0; i < both[0].size(); ++i) ASSERT_NEAR(none[0][i], both[0][i], 2e-5f) << i;
  }
}

TEST_F(Phased, AFailedWeightGradientLeavesNothingToRunTwice) {
  const auto weight = make_parameter(ctx, "weight", {5}, 5);
  std::string log = "!";
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  const auto phases = [&] { return std::make_unique<Phases>(*weight, log); };
  const Var y = record({record({x}, x.value(), phases)}, x.value(), phases);
  tape.backward(ctx, y, ones({3, 5}), Tape::WeightGradients::deferred);
  EXPECT_THROW(tape.run_weight_gradients(ctx), TrainingError);
  tape.run_weight_gradients(ctx);
  EXPECT_EQ(log, "!iiw");
}

TEST_F(Phased, AGateIsWaitedForOnceAndAgainIfItFails) {
  const auto weight = make_parameter(ctx, "weight", {5}, 5);
  int calls = 0;
  weight->set_gate([&] {
    if (++calls == 1) throw TrainingError("not there yet");
  });
  EXPECT_THROW(weight->value(), TrainingError);
  weight->main();
  weight->value();
  EXPECT_EQ(calls, 2);
  weight->set_gate(
      [&] { test::edit(weight->value(), [](auto& v) { v[0] = 3.5f; }); });  // it may read what it guards
  EXPECT_EQ(weight->main().to_floats()[0], 3.5f);
}

}  // namespace
}  // namespace tessera
