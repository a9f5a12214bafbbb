/// The tape's rules: fan-out, what records and what does not, two phases, callbacks, refusals.

#include "tests/support/gradcheck.hpp"

#include <map>

#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::expect_gradients;
using test::expect_refusal;
using test::make_parameter;
using test::random_tensor;

struct TapeTest : ::testing::Test {
  Tensor ones(const Shape& shape) const {
    const Tensor t = Tensor::empty(ctx, shape, DType::f32);
    ops::fill_constant(ctx, t, 1.0f);
    return t;
  }
  ExecCtx ctx = test::context(2, 3);
};

TEST_F(TapeTest, FanOutAddsUp) {
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  const Var y = add(ctx, add(ctx, x, x), add(ctx, x, x));
  const Tensor upstream = random_tensor(ctx, {3, 5}, 2);
  tape.backward(ctx, y, upstream);
  const auto gradient = tape.grad(x).to_floats(), expected = upstream.to_floats();
  for (std::size_t i = 0; i < gradient.size(); ++i) EXPECT_EQ(gradient[i], 4.0f * expected[i]);
}

TEST_F(TapeTest, TheCallersGradientIsNotWrittenOver) {
  const Tensor upstream = random_tensor(ctx, {3, 5}, 2);
  const auto before = upstream.to_floats();
  for (const bool twice : {false, true}) {
    Tape tape;
    const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
    const Var y = activation(ctx, x, ops::ActivationKind::silu);
    tape.backward(ctx, twice ? add(ctx, y, y) : y, upstream);
    EXPECT_EQ(upstream.to_floats(), before);
  }
}

TEST_F(TapeTest, InPlaceBackwardNeverCorruptsASharedTensor) {
  // Each value is used in two places; what one backward writes over must not be what the other still reads.
  const auto weight = make_parameter(ctx, "weight", {5, 5}, 5);
  const auto scale = make_parameter(ctx, "scale", {5}, 7);
  const Tensor labels = Tensor::from(ctx, std::vector<std::int32_t>{1, 4, -100}, {3});
  const Tensor x = random_tensor(ctx, {3, 5}, 3);
  const auto silu = [](const ExecCtx& c, const Var& v) {
    return activation(c, v, ops::ActivationKind::silu);
  };
  expect_gradients(ctx, {{x}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                           const Var a = silu(c, in[0]);
                           return add(c, add(c, a, silu(c, a)), in[0]);
                         }});
  expect_gradients(ctx, {{x}, {weight.get()}, [&](const ExecCtx& c, std::vector<Var> in) {
                           const Var y = linear(c, in[0], *weight, nullptr);
                           return add(c, silu(c, y), linear(c, y, *weight, nullptr));
                         }});
  expect_gradients(ctx, {{x}, {scale.get()}, [&](const ExecCtx& c, std::vector<Var> in) {
                           const ResidualNorm n = add_norm(c, in[0], in[0], *scale, nullptr, {.rms = true});
                           const ResidualNorm m =
                               add_norm(c, n.residual, n.y, *scale, nullptr, {.rms = true});
                           return add(c, add(c, m.residual, n.residual), add(c, m.y, n.y));
                         }});
  expect_gradients(ctx, {{x}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                           const Var a = add(c, in[0], in[0]);
                           const Var loss = cross_entropy(c, a, labels), other = cross_entropy(c, a, labels);
                           return add(c, loss, other);
                         }});
}

TEST_F(TapeTest, ForwardValuesSurviveAnInPlaceBackward) {
  Tape tape;
  const Tensor labels = Tensor::from(ctx, std::vector<std::int32_t>{1, 4, 0}, {3});
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  const Var logits = add(ctx, x, x);
  const auto before = logits.value().to_floats();
  tape.backward(ctx, cross_entropy(ctx, logits, labels), ones({3}));
  EXPECT_EQ(logits.value().to_floats(), before);
}

TEST_F(TapeTest, RotationLeavesASharedTensorAlone) {
  const ops::RopeTable table = ops::make_rope_table(ctx, 4, 2, {.theta = 100.0});
  SelfAttentionOptions o;
  o.heads = o.kv_heads = 1;
  o.head_dim = 2;
  o.rope = &table;
  o.positions = Tensor::from(ctx, std::vector<std::int32_t>{1, 2, 3}, {3});
  const Tensor qkv = random_tensor(ctx, {3, 1, 6}, 1);
  const auto before = qkv.to_floats();
  self_attention(ctx, qkv, o);
  EXPECT_EQ(qkv.to_floats(), before);
}

TEST_F(TapeTest, PaddedLogitsUsedTwiceAddTheirGradients) {
  const auto weight = make_parameter(ctx, "weight", {7, 5}, 5);
  const Tensor a = Tensor::from(ctx, std::vector<std::int32_t>{1, 4, 0}, {3});
  const Tensor b = Tensor::from(ctx, std::vector<std::int32_t>{6, -100, 0}, {3});
  expect_gradients(
      ctx, {{random_tensor(ctx, {3, 5}, 1)}, {weight.get()}, [&](const ExecCtx& c, std::vector<Var> in) {
              const Var logits = linear(c, in[0], *weight, nullptr, 32);
              return add(c, cross_entropy(c, logits, a), cross_entropy(c, logits, b));
            }});
}

TEST_F(TapeTest, ATiedWeightCollectsAllItsUses) {
  const auto table = make_parameter(ctx, "table", {5, 5}, 9);
  const Tensor tokens = Tensor::from(ctx, std::vector<std::int32_t>{4, 0, 4}, {3});
  expect_gradients(
      ctx, {{random_tensor(ctx, {3, 5}, 1)}, {table.get()}, [&](const ExecCtx& c, std::vector<Var> in) {
              const Var t = in[0].tape() ? in[0].tape()->input(tokens, false) : Var(tokens);
              const Var e = add(c, in[0], embedding(c, t, *table, {}, nullptr, {DType::f32}));
              return linear(c, linear(c, e, *table, nullptr), *table, nullptr);
            }});
}

TEST_F(TapeTest, InputsThatWantNoGradientGetNone) {
  const auto weight = make_parameter(ctx, "weight", {4, 5}, 5);
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), false);
  const Var z = tape.input(random_tensor(ctx, {3, 4}, 2), true);
  const Var y = add(ctx, linear(ctx, x, *weight, nullptr), z);
  EXPECT_TRUE(y.requires_grad());
  tape.backward(ctx, y, ones({3, 4}));
  EXPECT_TRUE(weight->has_grad());
  EXPECT_EQ(tape.grad(z).to_floats(), std::vector<float>(12, 1.0f));
  EXPECT_THROW(tape.grad(x), InvalidArgument);
}

TEST_F(TapeTest, NothingIsRecordedWithoutNeed) {
  const auto weight = make_parameter(ctx, "weight", {4, 5}, 5),
             frozen = make_parameter(ctx, "w", {4, 5}, 5, false);
  const Var plain = linear(ctx, random_tensor(ctx, {3, 5}, 1), *weight, nullptr);
  EXPECT_EQ(plain.tape(), nullptr);
  EXPECT_FALSE(plain.requires_grad());
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), false);
  const Var y = activation(ctx, linear(ctx, x, *frozen, nullptr), ops::ActivationKind::relu);
  EXPECT_EQ(y.tape(), &tape);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(tape.size(), 0u);
  tape.backward(ctx, y, ones({3, 4}));  // nothing to do, and allowed
}

TEST_F(TapeTest, AFrozenWeightStillPassesTheGradientOn) {
  const auto frozen = make_parameter(ctx, "w", {4, 5}, 5, false);
  expect_gradients(ctx, {{random_tensor(ctx, {3, 5}, 1)}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                           return linear(c, in[0], *frozen, nullptr);
                         }});
  EXPECT_FALSE(frozen->has_grad());
}

TEST_F(TapeTest, TheFirstContributionOverwritesLaterOnesAdd) {
  const auto weight = make_parameter(ctx, "weight", {4, 5}, 5);
  std::vector<float> once;
  for (int call = 1; call <= 3; ++call) {
    Tape tape;
    const Var y = linear(ctx, tape.input(random_tensor(ctx, {3, 5}, 1), false), *weight, nullptr);
    tape.backward(ctx, y, ones({3, 4}));
    if (call == 1) once = weight->grad().to_floats();
  }
  std::vector<float> three = once;
  for (float& v : three) v *= 3.0f;
  EXPECT_LE(test::distance(weight->grad().to_floats(), three), 1e-6);
}

/// Two layers and a tied head: gradients by parameter name, and the order in which they became ready.
struct Net {
  explicit Net(const ExecCtx& c) : ctx(c) {}

  void run(Tape::WeightGradients weights, bool finish = true) {
    for (Parameter* p : all()) p->clear_grad();
    Tape tape;
    tape.on_gradient_ready([&](Parameter& p) {
      ready.push_back(p.name());
      at_ready[p.name()] = p.grad().to_floats();
    });
    Var h = tape.input(random_tensor(ctx, {3, 5}, 1), false);
    h = activation(ctx, linear(ctx, h, *a, a_bias.get()), ops::ActivationKind::silu);
    const ResidualNorm n = add_norm(ctx, h, Var(), *scale, shift.get(), {});
    h = linear(ctx, linear(ctx, n.y, *a, nullptr), *b, nullptr);
    tape.backward(ctx, h, random_tensor(ctx, {3, 7}, 2), weights);
    if (weights == Tape::WeightGradients::deferred) {
      EXPECT_TRUE(ready.empty());
      for (Parameter* p : all()) EXPECT_FALSE(p->has_grad()) << p->name();
      if (finish) tape.run_weight_gradients(ctx);
    }
  }
  std::vector<Parameter*> all() const { return {a.get(), a_bias.get(), b.get(), scale.get(), shift.get()}; }

  ExecCtx ctx;
  std::unique_ptr<Parameter> a = make_parameter(ctx, "a", {5, 5}, 5),
                             a_bias = make_parameter(ctx, "a_bias", {5}, 6),
                             b = make_parameter(ctx, "b", {7, 5}, 7),
                             scale = make_parameter(ctx, "scale", {5}, 8),
                             shift = make_parameter(ctx, "shift", {5}, 9);
  std::vector<std::string> ready;
  std::map<std::string, std::vector<float>> at_ready;
};

TEST_F(TapeTest, DeferredWeightGradientsAreTheImmediateOnes) {
  Net now(ctx), later(ctx);
  now.run(Tape::WeightGradients::immediate);
  later.run(Tape::WeightGradients::deferred);
  for (std::size_t i = 0; i < now.all().size(); ++i) {
    EXPECT_EQ(now.all()[i]->grad().to_floats(), later.all()[i]->grad().to_floats()) << now.all()[i]->name();
  }
}

TEST_F(TapeTest, EachParameterIsReportedReadyOnceWithItsFinalGradient) {
  for (const auto weights : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
    Net net(ctx);
    net.run(weights);
    EXPECT_EQ(net.ready, (std::vector<std::string>{"b", "scale", "shift", "a", "a_bias"}));
    for (Parameter* p : net.all()) EXPECT_EQ(net.at_ready[p->name()], p->grad().to_floats()) << p->name();
  }
}

TEST_F(TapeTest, AUseThatLeadsNowhereDoesNotHoldAParameterBack) {
  for (const auto weights : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
    const auto weight = make_parameter(ctx, "weight", {4, 5}, 5),
               unused = make_parameter(ctx, "unused", {4, 5}, 6);
    std::vector<std::string> ready;
    Tape tape;
    tape.on_gradient_ready([&](Parameter& p) { ready.push_back(p.name()); });
    const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), false);
    linear(ctx, x, *weight, nullptr);  // before and after the use that counts
    const Var y = linear(ctx, x, *weight, nullptr);
    linear(ctx, x, *weight, nullptr);
    linear(ctx, x, *unused, nullptr);
    tape.backward(ctx, y, ones({3, 4}), weights);
    tape.run_weight_gradients(ctx);
    std::sort(ready.begin(), ready.end());
    EXPECT_EQ(ready, (std::vector<std::string>{"unused", "weight"}));
    EXPECT_TRUE(weight->has_grad());
    EXPECT_FALSE(unused->has_grad());
  }
}

TEST_F(TapeTest, RefusesMisuse) {
  Tape tape, other;
  const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
  const Var foreign = other.input(random_tensor(ctx, {3, 5}, 1), true);
  expect_refusal([&] { add(ctx, x, foreign); }, "different tapes");
  const Var y = add(ctx, x, x);
  expect_refusal([&] { tape.backward(ctx, foreign, ones({3, 5})); }, "not on this tape");
  expect_refusal([&] { tape.backward(ctx, Var(ones({3, 5})), ones({3, 5})); }, "not on this tape");
  expect_refusal([&] { tape.backward(ctx, y, ones({5, 3})); }, "[5, 3]");
  expect_refusal([&] { tape.grad(y); }, "inputs of the tape only");
  tape.backward(ctx, y, ones({3, 5}));
  expect_refusal([&] { tape.backward(ctx, y, ones({3, 5})); }, "walked backwards already");
  expect_refusal([&] { add(ctx, y, y); }, "walked backwards already");
}

TEST_F(TapeTest, NodesAreFreedAsTheWalkPasses) {
  // A chain of activations keeps one input each; after the walk all but the caller's tensors are gone.
  const auto used = [&] { return ctx.allocator->stats().used_bytes; };
  const Tensor x = random_tensor(ctx, {64, 64}, 1), upstream = ones({64, 64});
  const std::size_t before = used();
  {
    Tape tape;
    Var h = tape.input(x, false);
    const auto weight = make_parameter(ctx, "weight", {64, 64}, 5);
    const std::size_t with_weight = used();
    h = linear(ctx, h, *weight, nullptr);
    for (int i = 0; i < 10; ++i) h = activation(ctx, h, ops::ActivationKind::silu);
    EXPECT_GE(used() - with_weight, 11u * 64 * 64 * 4);
    tape.backward(ctx, h, upstream);
    h = Var();
    EXPECT_EQ(used(), with_weight);
  }
  EXPECT_EQ(used(), before);
}

}  // namespace
}  // namespace tessera
