/// The functions that fuse a linear with its neighbour: against differences, and against the pair they
/// replace.

#include <map>

#include "tessera/ops/reduce.hpp"
#include "tessera/parallel/functions.hpp"
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

constexpr ActivationKind kKinds[] = {ActivationKind::swiglu, ActivationKind::geglu, ActivationKind::gelu_tanh,
                                     ActivationKind::gelu_erf, ActivationKind::silu};

TEST_P(FusedLinear, ActivatedLinearAgainstDifferences) {
  for (const auto kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      for (const Shape& shape : {Shape{1, 1, 2}, Shape{3, 2, 10}}) {
        const std::int64_t in = ops::is_gated(kind) ? shape[-1] / 2 : shape[-1];
        const auto weight = make_parameter(ctx, "weight", {7, in}, 5),
                   bias = make_parameter(ctx, "bias", {7}, 7);
        std::vector<Parameter*> parameters{weight.get()};
        if (with_bias) parameters.push_back(bias.get());
        test::expect_gradients(ctx, {{random_tensor(ctx, shape, 1, 2.0f)},
                                     parameters,
                                     [&](const ExecCtx& c, std::vector<Var> in_vars) {
                                       return activated_row_linear(c, {}, in_vars[0], kind, *weight,
                                                                   with_bias ? bias.get() : nullptr);
                                     }});
      }
    }
  }
}

TEST_P(FusedLinear, ActivatedLinearIsItsTwoParts) {
  for (const auto kind : kKinds) {
    const auto weight = make_parameter(ctx, "weight", {7, ops::is_gated(kind) ? 5 : 10}, 5);
    const Tensor value = random_tensor(ctx, {13, 10}, 1), upstream = random_tensor(ctx, {13, 7}, 2);
    std::vector<std::vector<float>> results[2];
    for (const bool fused : {false, true}) {
      weight->clear_grad();
      Tape tape;
      const Var x = tape.input(value, true);
      const Var y = fused ? activated_row_linear(ctx, {}, x, kind, *weight, nullptr)
                          : linear(ctx, activation(ctx, x, kind), *weight, nullptr);
      tape.backward(ctx, y, upstream, Tape::WeightGradients::deferred);
      tape.run_weight_gradients(ctx);
      results[fused] = {y.value().to_floats(), tape.grad(x).to_floats(), weight->grad().to_floats()};
    }
    // On a GPU the product multiplies by the slope itself.
    if (test::on_cuda()) {
      for (std::size_t i = 0; i < 3; ++i) EXPECT_LE(distance(results[0][i], results[1][i]), 2e-6);
    } else {
      EXPECT_EQ(results[0], results[1]);
    }
  }
}

TEST_P(FusedLinear, AnMlpAgainstDifferences) {
  for (const auto kind : {ActivationKind::gelu_tanh, ActivationKind::gelu_erf, ActivationKind::silu}) {
    const auto up = make_parameter(ctx, "up", {9, 5}, 5), up_bias = make_parameter(ctx, "up bias", {9}, 6),
               down = make_parameter(ctx, "down", {4, 9}, 7);
    test::expect_gradients(ctx, {{random_tensor(ctx, {3, 2, 5}, 1, 2.0f)},
                                 {up.get(), up_bias.get(), down.get()},
                                 [&](const ExecCtx& c, std::vector<Var> in) {
                                   const LinearActivation h =
                                       column_linear_with_activation(c, {}, in[0], *up, up_bias.get(), kind);
                                   return activated_row_linear(c, {}, h.pre, kind, *down, nullptr, h.y);
                                 }});
  }
}

TEST_P(FusedLinear, AnMlpIsItsParts) {
  for (const auto kind : {ActivationKind::gelu_tanh, ActivationKind::gelu_erf, ActivationKind::relu}) {
    const auto up = make_parameter(ctx, "up", {9, 10}, 5), down = make_parameter(ctx, "down", {7, 9}, 7);
    const Tensor value = random_tensor(ctx, {13, 10}, 1), upstream = random_tensor(ctx, {13, 7}, 2);
    std::vector<std::vector<float>> results[2];
    for (const bool fused : {false, true}) {
      up->clear_grad(), down->clear_grad();
      Tape tape;
      const Var x = tape.input(value, true);
      const LinearActivation h = fused ? column_linear_with_activation(ctx, {}, x, *up, nullptr, kind)
                                       : LinearActivation{linear(ctx, x, *up, nullptr), {}};
      const Var y = activated_row_linear(ctx, {}, h.pre, kind, *down, nullptr, h.y);
      EXPECT_EQ(tape.size(), 3u);  // the activation is no node
      tape.backward(ctx, y, upstream);
      results[fused] = {y.value().to_floats(), tape.grad(x).to_floats(), up->grad().to_floats(),
                        down->grad().to_floats()};
    }
    for (std::size_t i = 0; i < 4; ++i) EXPECT_LE(distance(results[0][i], results[1][i]), 2e-6);
    if (!test::on_cuda()) {
      EXPECT_EQ(results[0], results[1]);
    }
  }
}

// Nobody will ask for it.
TEST_P(FusedLinear, WithoutATapeAnMlpDoesNotKeepWhatIsActivated) {
  for (const auto kind : {ActivationKind::gelu_tanh, ActivationKind::silu}) {
    const auto up = make_parameter(ctx, "up", {9, 10}, 5), down = make_parameter(ctx, "down", {7, 9}, 7);
    const Tensor x = random_tensor(ctx, {13, 10}, 1);
    const auto mlp = [&](const Var& in) {
      const LinearActivation h = column_linear_with_activation(ctx, {}, in, *up, nullptr, kind);
      EXPECT_EQ(static_cast<bool>(h.pre), in.tape() != nullptr);
      return activated_row_linear(ctx, {}, h.pre, kind, *down, nullptr, h.y);
    };
    Tape tape;
    const Var y = mlp(x);
    EXPECT_EQ(y.tape(), nullptr);
    EXPECT_LE(distance(y.value().to_floats(), mlp(tape.input(x, true)).value().to_floats()), 2e-6);
  }
}

/// Gradients of weight and bias after two micro-batches; empty where frozen.
std::vector<std::vector<float>> linear_gradients(const ExecCtx& ctx, bool weight_trained, bool bias_trained,
                                                 bool activated) {
  const auto weight = make_parameter(ctx, "weight", {7, 10}, 5, weight_trained),
             bias = make_parameter(ctx, "bias", {7}, 7, bias_trained);
  for (unsigned micro_batch = 0; micro_batch < 2; ++micro_batch) {
    Tape tape;
    const Var x = tape.input(random_tensor(ctx, {13, 10}, 11 + micro_batch), true);
    const Var y = activated ? activated_row_linear(ctx, {}, x, ActivationKind::silu, *weight, bias.get())
                            : linear(ctx, x, *weight, bias.get());
    tape.backward(ctx, y, random_tensor(ctx, {13, 7}, 21 + micro_batch));
  }
  const auto values = [](Parameter& p) { return p.trained() ? p.grad().to_floats() : std::vector<float>{}; };
  return {values(*weight), values(*bias)};
}

TEST_P(FusedLinear, WeightAndBiasAreFrozenEachForItself) {
  for (const bool activated : {false, true}) {
    const auto both = linear_gradients(ctx, true, true, activated);
    // The sums of both micro-batches, apart from the product.
    const Tensor sums = Tensor::empty(ctx, {7}, DType::f32);
    for (unsigned micro_batch = 0; micro_batch < 2; ++micro_batch)
      ops::column_sum(ctx, random_tensor(ctx, {13, 7}, 21 + micro_batch), sums,
                      micro_batch == 0 ? 0.0f : 1.0f);
    EXPECT_EQ(both[1], sums.to_floats());
    using Both = std::vector<std::vector<float>>;
    EXPECT_EQ(linear_gradients(ctx, true, false, activated), (Both{both[0], {}}));
    EXPECT_EQ(linear_gradients(ctx, false, true, activated), (Both{{}, both[1]}));
    EXPECT_EQ(linear_gradients(ctx, false, false, activated), (Both{{}, {}}));
  }
}

TEST_P(FusedLinear, ActivatedLinearTakesWhatIsThere) {
  const auto weight = make_parameter(ctx, "weight", {7, 10}, 5);
  const Tensor x = random_tensor(ctx, {3, 10}, 1), other = random_tensor(ctx, {3, 10}, 2);
  const Var y = activated_row_linear(ctx, {}, x, ActivationKind::gelu_tanh, *weight, nullptr, other);
  EXPECT_EQ(y.value().to_floats(), linear(ctx, other, *weight, nullptr).value().to_floats());
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
  constexpr std::int64_t kVocab = 11;
  // Less than a part, one, several and a rest.
  const std::map<std::int64_t, std::vector<std::int64_t>> rows_by_part = {{512, {1, 7, 512, 1029}},
                                                                          {1024, {2100}}};
  for (const auto& [at_once, counts] : rows_by_part) {
    ctx.logit_bytes = at_once * kVocab * 4 + 1;
    for (const std::int64_t rows : counts) {
      Head head(ctx, rows, 5, kVocab);
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
}

/// Logits of as many rows as have room, in whole 512s.
TEST(HeadMemory, LogitsTakeTheMemoryThatTheyAreGiven) {
  constexpr std::int64_t kVocab = 1000;
  const auto peak = [](std::int64_t logit_bytes) {
    ExecCtx ctx = ExecCtx::meta();
    ctx.logit_bytes = logit_bytes;
    const auto weight = make_parameter(ctx, "weight", {kVocab, 8}, 5);
    const Tensor x = Tensor::empty(ctx, {4096, 8}, DType::f32);
    const Tensor labels = Tensor::empty(ctx, {4096}, DType::i32);
    ctx.allocator->reset_peak();
    const auto before = ctx.allocator->stats().used_bytes;
    linear_cross_entropy(ctx, x, *weight, labels, {});
    return static_cast<std::int64_t>(ctx.allocator->stats().peak_used_bytes - before);
  };
  const std::int64_t part = 512 * kVocab * 4;
  const auto expect_parts = [&](std::int64_t logit_bytes, std::int64_t parts) {
    EXPECT_GE(peak(logit_bytes), parts * part) << logit_bytes;
    EXPECT_LT(peak(logit_bytes), (parts + 1) * part) << logit_bytes;
  };
  expect_parts(0, 1);
  expect_parts(2 * part - 1, 1);
  expect_parts(3 * part + 5, 3);
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

/// A gradient that comes later can be any.
TEST_P(FusedLinear, LinearCrossEntropyWithoutItsGradientKeepsLogits) {
  Head head(ctx, 9, 5, 11);
  const auto expected = head.run(false);
  head.weight->clear_grad();
  Tape tape;
  const Var in = tape.input(head.x, true);
  const Var loss = linear_cross_entropy(ctx, in, *head.weight, head.labels, {});
  EXPECT_FALSE(head.weight->has_grad());
  tape.backward(ctx, loss, head.upstream);
  EXPECT_LE(distance(loss.value().to_floats(), expected[0]), 1e-6);
  EXPECT_LE(distance(tape.grad(in).to_floats(), expected[1]), 2e-6);
  EXPECT_LE(distance(head.weight->grad().to_floats(), expected[2]), 2e-6);
}

TEST_P(FusedLinear, LinearCrossEntropyRefuses) {
  Head head(ctx, 4, 5, 11);
  const auto refused = [](auto&& fn) { EXPECT_THROW(fn(), InvalidArgument); };
  Tape tape;
  const Var in = tape.input(head.x, true);
  refused([&] { linear_cross_entropy(ctx, in, *head.weight, head.labels.narrow(0, 0, 3), head.upstream); });
  refused([&] { linear_cross_entropy(ctx, in, *head.weight, head.labels, head.upstream.narrow(0, 0, 3)); });
  const Var loss = linear_cross_entropy(ctx, in, *head.weight, head.labels, head.upstream);
  refused([&] { tape.backward(ctx, loss, random_tensor(ctx, {4}, 9)); });  // not the upstream it was told
}

}  // namespace
}  // namespace tessera
