/// The functions that fuse a linear with its neighbour: against differences, and against the pair they
/// replace.

#include "tessera/autograd/functions.hpp"
#include "tests/support/device.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera {
namespace {

using ops::ActivationKind;
using test::distance;
using test::make_parameter;
using test::random_tensor;

class FusedLinear : public ::testing::TestWithParam<int> {
 protected:
  ExecCtx ctx = test::context(GetParam(), 3);
};
INSTANTIATE_TEST_SUITE_P(Threads, FusedLinear, ::testing::Values(1, 2));

const std::optional<ActivationKind> kKinds[] = {std::nullopt, ActivationKind::gelu_tanh,
                                                ActivationKind::gelu_erf, ActivationKind::silu};

TEST_P(FusedLinear, ActivatedLinearAgainstDifferences) {
  for (const auto kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      for (const Shape& shape : {Shape{1, 1, 2}, Shape{3, 2, 10}}) {
        const std::int64_t in = kind ? shape[-1] : shape[-1] / 2;
        const auto weight = make_parameter(ctx, "weight", {7, in}, 5),
                   bias = make_parameter(ctx, "bias", {7}, 7);
        std::vector<Parameter*> parameters{weight.get()};
        if (with_bias) parameters.push_back(bias.get());
        test::expect_gradients(ctx, {{random_tensor(ctx, shape, 1, 2.0f)},
                                     parameters,
                                     [&](const ExecCtx& c, std::vector<Var> in_vars) {
                                       return activated_linear(c, in_vars[0], kind, *weight,
                                                               with_bias ? bias.get() : nullptr);
                                     }});
      }
    }
  }
}

TEST_P(FusedLinear, ActivatedLinearIsItsTwoParts) {
  for (const auto kind : kKinds) {
    const auto weight = make_parameter(ctx, "weight", {7, kind ? 10 : 5}, 5);
    const Tensor value = random_tensor(ctx, {13, 10}, 1), upstream = random_tensor(ctx, {13, 7}, 2);
    std::vector<std::vector<float>> results[2];
    for (const bool fused : {false, true}) {
      weight->clear_grad();
      Tape tape;
      const Var x = tape.input(value, true);
      const Var y = fused ? activated_linear(ctx, x, kind, *weight, nullptr)
                          : linear(ctx, kind ? activation(ctx, x, *kind) : swiglu(ctx, x), *weight, nullptr);
      tape.backward(ctx, y, upstream, Tape::WeightGradients::deferred);
      tape.run_weight_gradients(ctx);
      results[fused] = {y.value().to_floats(), tape.grad(x).to_floats(), weight->grad().to_floats()};
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

/// Loss, gradient of x and gradient of the weight by the fused function and by linear and cross_entropy.
struct Head {
  Head(const ExecCtx& c, std::int64_t rows, std::int64_t width, std::int64_t vocab)
      : ctx(c),
        weight(make_parameter(c, "weight", {vocab, width}, 5)),
        x(random_tensor(c, {rows, width}, 1)),
        upstream(random_tensor(c, {rows}, 2)) {
    std::vector<std::int32_t> values;
    for (std::int64_t i = 0; i < rows; ++i)
      values.push_back(i % 5 == 3 ? -100 : static_cast<std::int32_t>(i * 7 % vocab));
    labels = Tensor::from(c, values, {rows});
  }
  std::vector<std::vector<float>> run(bool fused, bool wanted = true) {
    weight->clear_grad();
    Tape tape;
    const Var in = tape.input(x, wanted);
    const Var loss = fused ? linear_cross_entropy(ctx, in, *weight, labels, upstream)
                           : cross_entropy(ctx, linear(ctx, in, *weight, nullptr), labels);
    tape.backward(ctx, loss, upstream);
    return {loss.value().to_floats(), wanted ? tape.grad(in).to_floats() : std::vector<float>{},
            weight->trained() ? weight->grad().to_floats() : std::vector<float>{}};
  }

  ExecCtx ctx;
  std::unique_ptr<Parameter> weight;
  Tensor x, upstream, labels;
};

TEST_P(FusedLinear, LinearCrossEntropyIsItsTwoParts) {
  for (const std::int64_t rows : {1, 7, 512, 1029}) {  // less than a chunk, one, several and a rest
    Head head(ctx, rows, 5, 11);
    for (const bool wanted : {true, false}) {
      const auto expected = head.run(false, wanted), got = head.run(true, wanted);
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_LE(distance(got[i], expected[i]), 2e-6) << rows << " rows, " << i;
    }
    const Var plain = linear_cross_entropy(ctx, head.x, *head.weight, head.labels, {});
    EXPECT_EQ(plain.tape(), nullptr);
    EXPECT_LE(distance(plain.value().to_floats(), head.run(false)[0]), 1e-6);
  }
}

TEST_P(FusedLinear, LinearCrossEntropyAddsToWhatIsThere) {
  Head head(ctx, 600, 5, 11);
  std::vector<float> expected = head.run(true)[2];
  for (float& v : expected) v *= 2.0f;
  Tape tape;  // without clear_grad: the second micro-batch of a call
  const Var loss =
      linear_cross_entropy(ctx, tape.input(head.x, false), *head.weight, head.labels, head.upstream);
  tape.backward(ctx, loss, head.upstream);
  EXPECT_LE(distance(head.weight->grad().to_floats(), expected), 2e-6);
}

TEST_P(FusedLinear, LinearCrossEntropyWithAFrozenHead) {
  Head head(ctx, 9, 5, 11);
  const auto expected = head.run(false);
  head.weight->bind(head.weight->value(), Tensor());
  const auto got = head.run(true);
  EXPECT_LE(distance(got[1], expected[1]), 2e-6);
  EXPECT_FALSE(head.weight->has_grad());
}

TEST_P(FusedLinear, LinearCrossEntropyRefuses) {
  Head head(ctx, 4, 5, 11);
  const auto refused = [](auto&& fn) { EXPECT_THROW(fn(), InvalidArgument); };
  Tape tape;
  const Var in = tape.input(head.x, true);
  refused([&] { linear_cross_entropy(ctx, in, *head.weight, head.labels.narrow(0, 0, 3), head.upstream); });
  refused([&] { linear_cross_entropy(ctx, in, *head.weight, head.labels, head.upstream.narrow(0, 0, 3)); });
  refused([&] { linear_cross_entropy(ctx, in, *head.weight, head.labels, {}); });
  const Var loss = linear_cross_entropy(ctx, in, *head.weight, head.labels, head.upstream);
  refused([&] { tape.backward(ctx, loss, random_tensor(ctx, {4}, 9)); });  // not the upstream it was told
}

}  // namespace
}  // namespace tessera
