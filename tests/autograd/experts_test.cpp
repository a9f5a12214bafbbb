/// Routers and experts: gradients against central differences, values against a loop over tokens.

#include <algorithm>
#include <numeric>

#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/experts.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera {
namespace {

using test::expect_gradients;
using test::make_parameter;
using test::random_floats;
using test::random_tensor;

struct Layer {
  std::int64_t experts = 3, hidden = 5, width = 4;
  ops::ActivationKind kind = ops::ActivationKind::swiglu;
  std::vector<std::unique_ptr<Parameter>> owned = {};

  ExpertWeights weights(const ExecCtx& ctx) {
    ExpertWeights result;
    const std::int64_t rows = width * (ops::is_gated(kind) ? 2 : 1);
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto seed = static_cast<unsigned>(100 + 10 * e);
      const std::string name = "expert" + std::to_string(e);
      owned.push_back(make_parameter(ctx, name + ".fc1", {rows, hidden}, seed));
      result.fc1.push_back(owned.back().get());
      owned.push_back(make_parameter(ctx, name + ".fc2", {hidden, width}, seed + 5));
      result.fc2.push_back(owned.back().get());
    }
    return result;
  }
  std::vector<Parameter*> parameters() const {
    std::vector<Parameter*> list;
    for (const auto& each : owned) list.push_back(each.get());
    return list;
  }
};

/// Logits whose order central differences do not change.
Tensor far_apart(const ExecCtx& ctx, const Shape& shape, unsigned seed) {
  const std::int64_t experts = shape[-1];
  std::vector<float> values;
  std::mt19937 generator(seed);
  for (std::int64_t t = 0; t < shape.numel() / experts; ++t) {
    std::vector<float> row(static_cast<std::size_t>(experts));
    for (std::size_t e = 0; e < row.size(); ++e) row[e] = 0.3f * static_cast<float>(e) - 0.4f;
    std::shuffle(row.begin(), row.end(), generator);
    values.insert(values.end(), row.begin(), row.end());
  }
  return Tensor::from(ctx, values, shape);
}

class Experts : public ::testing::TestWithParam<int> {
 protected:
  ExecCtx ctx = test::context(GetParam(), 3);
};
INSTANTIATE_TEST_SUITE_P(Threads, Experts, ::testing::Values(1, 2));

/// What each token's experts say, one token at a time.
std::vector<double> naive_mlp(const Layer& layer, const std::vector<float>& x,
                              const std::vector<float>& weight, const std::vector<std::int32_t>& expert,
                              std::int64_t topk) {
  const std::int64_t h = layer.hidden, w = layer.width, tokens = static_cast<std::int64_t>(x.size()) / h;
  std::vector<double> y(x.size(), 0.0);
  for (std::int64_t slot = 0; slot < tokens * topk; ++slot) {
    const std::int64_t t = slot / topk;
    const auto e = static_cast<std::size_t>(expert[static_cast<std::size_t>(slot)]);
    const auto fc1 = layer.owned[2 * e]->value().to_floats(),
               fc2 = layer.owned[2 * e + 1]->value().to_floats();
    for (std::int64_t i = 0; i < w; ++i) {
      double gate = 0, up = 0;
      for (std::int64_t k = 0; k < h; ++k) {
        gate += double{fc1[static_cast<std::size_t>(i * h + k)]} * x[static_cast<std::size_t>(t * h + k)];
        up += double{fc1[static_cast<std::size_t>((w + i) * h + k)]} * x[static_cast<std::size_t>(t * h + k)];
      }
      const double inner = gate / (1 + std::exp(-gate)) * up * double{weight[static_cast<std::size_t>(slot)]};
      for (std::int64_t k = 0; k < h; ++k)
        y[static_cast<std::size_t>(t * h + k)] += double{fc2[static_cast<std::size_t>(k * w + i)]} * inner;
    }
  }
  return y;
}

TEST_P(Experts, EachTokenGetsWhatItsExpertsSay) {
  for (const std::int64_t topk : {1, 2, 3}) {
    Layer layer;
    const ExpertWeights weights = layer.weights(ctx);
    const Tensor x = random_tensor(ctx, {7, 2, layer.hidden}, 3);
    const Routed routed = route(ctx, random_tensor(ctx, {7, 2, layer.experts}, 4), {.topk = topk});
    const Var y = expert_mlp(ctx, x, routed.weight, routed.expert, weights, layer.kind);
    EXPECT_EQ(y.value().shape(), x.shape());
    const auto expected = naive_mlp(layer, x.to_floats(), routed.weight.value().to_floats(),
                                    routed.expert.to_vector<std::int32_t>(), topk);
    EXPECT_LE(test::distance(y.value().to_floats(), expected), 1e-5) << topk;
  }
}

TEST_P(Experts, GradientsOfRoutersAndExperts) {
  for (const auto kind : {ops::ActivationKind::swiglu, ops::ActivationKind::gelu_erf}) {
    for (const bool normalized : {true, false}) {
      Layer layer{.kind = kind};
      const ExpertWeights weights = layer.weights(ctx);
      const auto build = [&](const ExecCtx& c, std::vector<Var> in) {
        const Routed routed = route(c, in[1], {.topk = 2, .normalized = normalized});
        return expert_mlp(c, in[0], routed.weight, routed.expert, weights, kind);
      };
      expect_gradients(ctx, {{random_tensor(ctx, {3, 2, layer.hidden}, 5), far_apart(ctx, {3, 2, 3}, 6)},
                             layer.parameters(),
                             build});
    }
  }
}

TEST_P(Experts, GradientsOfBalanceAndZ) {
  const Tensor counted = Tensor::from(ctx, std::vector<std::int32_t>{1, 0, 1, 1, 1, 1, 1, 0, 1, 1}, {10});
  for (const Tensor& mask : {Tensor(), counted}) {
    for (const bool balance : {true, false}) {
      const RouterOptions options{.topk = 2, .balance = balance, .z = !balance, .counted = mask};
      expect_gradients(ctx, {{far_apart(ctx, {5, 2, 7}, 8)}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                               const Routed routed = route(c, in[0], options);
                               return balance ? routed.balance : routed.z;
                             }});
    }
  }
}

TEST_P(Experts, AnEvenChoiceHasTheBalanceOne) {
  // Four experts, each the first and the second choice of as many tokens; no preference: every logit is 0.
  const Routed none =
      route(ctx, Tensor::from(ctx, std::vector<float>(4 * 4, 0.0f), {4, 1, 4}), {.topk = 4, .balance = true});
  EXPECT_NEAR(none.balance.value().to_floats()[0], 1.0f, 1e-6f);
  // All tokens of sample 1 want expert 0 alone: balance is as far from even as there are experts.
  std::vector<float> logits(4 * 2 * 4, 0.0f);
  for (std::size_t t = 1; t < 8; t += 2) logits[4 * t] = 40.0f;
  const Routed one = route(ctx, Tensor::from(ctx, logits, {4, 2, 4}), {.topk = 1, .balance = true});
  EXPECT_NEAR(one.balance.value().to_floats()[1], 4.0f, 1e-5f);
}

TEST_P(Experts, AnExpertNobodyChoosesHasAZeroGradient) {
  Layer layer{.experts = 4};
  const ExpertWeights weights = layer.weights(ctx);
  std::vector<float> logits(6 * 4, 0.0f);
  for (std::size_t t = 0; t < 6; ++t)
    logits[4 * t + 2] = -50.0f, logits[4 * t] = 1.0f, logits[4 * t + 3] = 2.0f;
  Tape tape;
  const Var x = tape.input(random_tensor(ctx, {6, 1, layer.hidden}, 9), true);
  const Routed routed = route(ctx, Tensor::from(ctx, logits, {6, 1, 4}), {.topk = 2});
  const Var y = expert_mlp(ctx, x, routed.weight, routed.expert, weights, layer.kind);
  for (Parameter* p : layer.parameters()) p->clear_grad();
  tape.backward(ctx, y, random_tensor(ctx, y.value().shape(), 10));
  for (const std::size_t e : {0u, 1u, 2u, 3u}) {
    for (const Parameter* p : {weights.fc1[e], weights.fc2[e]}) {
      const auto grad = p->grad().to_floats();
      const bool zero = std::ranges::all_of(grad, [](float v) { return v == 0.0f; });
      EXPECT_EQ(zero, e == 1 || e == 2) << p->name();
    }
  }
}

TEST_P(Experts, PutOffWeightGradientsAreTheSame) {
  const auto gradients = [&](Tape::WeightGradients when) {
    Layer layer;
    const ExpertWeights weights = layer.weights(ctx);
    Tape tape;
    const Var x = tape.input(random_tensor(ctx, {5, 2, layer.hidden}, 11), true);
    const Routed routed = route(ctx, tape.input(random_tensor(ctx, {5, 2, 3}, 12), true), {.topk = 2});
    const Var y = expert_mlp(ctx, x, routed.weight, routed.expert, weights, layer.kind);
    for (Parameter* p : layer.parameters()) p->clear_grad();
    tape.backward(ctx, y, random_tensor(ctx, y.value().shape(), 13), when);
    tape.run_weight_gradients(ctx);
    std::vector<std::vector<float>> all;
    for (const Parameter* p : layer.parameters()) all.push_back(p->grad().to_floats());
    return all;
  };
  EXPECT_EQ(gradients(Tape::WeightGradients::immediate), gradients(Tape::WeightGradients::deferred));
}

TEST_P(Experts, WhatDoesNotFitIsRefused) {
  Layer layer;
  const ExpertWeights weights = layer.weights(ctx);
  test::expect_error<InvalidArgument>(
      [&] {
        route(ctx, random_tensor(ctx, {4, 3}, 1), {.topk = 2});
      },
      "[seq, batch, experts]");
  test::expect_error<InvalidArgument>(
      [&] {
        route(ctx, random_tensor(ctx, {4, 1, 3}, 1), {.topk = 4});
      },
      "topk");
  const Routed routed = route(ctx, random_tensor(ctx, {4, 1, 3}, 1), {.topk = 2});
  test::expect_error<InvalidArgument>(
      [&] {
        expert_mlp(ctx, random_tensor(ctx, {5, 1, layer.hidden}, 2), routed.weight, routed.expert, weights,
                   layer.kind);
      },
      "5 tokens");
}

}  // namespace
}  // namespace tessera
