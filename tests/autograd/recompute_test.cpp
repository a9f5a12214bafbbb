/// Recomputation changes no bit: selective, full, nested, deferred.

#include "tessera/autograd/recompute.hpp"

#include "tests/autograd/chain.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/memory.hpp"

namespace tessera {
namespace {

using test::BlockSizes;
using test::Chain;
using test::expect_refusal;
using test::expect_same;
using test::Plan;
using test::random_tensor;
using test::Values;
using test::Weights;

struct RecomputeTest : ::testing::Test {
  ExecCtx ctx = test::context(1, 3);
};

TEST_F(RecomputeTest, ChangesNoBit) {
  for (const DType compute : {DType::f32, DType::bf16, DType::f16}) {
    const BlockSizes sizes{.compute = compute};
    Values expected = Chain(ctx, sizes, 3, {}).run();
    for (const Weights weights : {Weights::immediate, Weights::deferred}) {
      // A norm's sums have another order on CUDA when its two gradients are computed apart.
      if (test::on_cuda()) expected = Chain(ctx, sizes, 3, {.weights = weights}).run();
      for (const bool forget : {false, true}) {
        for (const std::size_t group : {0, 1, 2, 3}) {
          for (const bool nested : {false, true}) {
            const Plan plan{.forget = forget, .group = group, .nested = nested, .weights = weights};
            Chain chain(ctx, sizes, 3, plan);
            SCOPED_TRACE(::testing::Message()
                         << compute << (forget ? ", selective" : "") << ", " << group << " per group"
                         << (nested ? ", nested" : "") << (weights == Weights::deferred ? ", deferred" : ""));
            expect_same(chain.run(), expected);
            for (Parameter* p : chain.parameters())
              EXPECT_EQ(expected.at("at ready " + p->name()), expected.at(p->name())) << p->name();
          }
        }
      }
    }
    // Another mask must show: the comparison above is not of constants.
    BlockSizes other = sizes;
    other.dropout = 0.31f;
    EXPECT_NE(Chain(ctx, other, 3, {.group = 1}).run()["x"], expected["x"]);
  }
}

TEST_F(RecomputeTest, ReportsEachParameterOnceAfterItsLastUse) {
  for (const Weights weights : {Weights::immediate, Weights::deferred}) {
    Chain chain(ctx, {}, 2, {.group = 1, .weights = weights});
    chain.run();
    std::vector<std::string> expected{"norm.weight"};
    for (const std::string block : {"block1.", "block0."}) {
      // In the order they were named; the shared weight waits for its use in the first block.
      for (const char* part : {"norm1.weight", "norm1.bias", "qkv.weight", "qkv.bias", "proj.weight",
                               "norm2.weight", "norm2.bias", "fc1.weight", "fc2.weight", "fc2.bias"})
        expected.push_back(block + part);
    }
    EXPECT_EQ(chain.ready, expected);
  }
}

TEST_F(RecomputeTest, WithoutATapeItOnlyComputes) {
  Chain plain(ctx, {}, 2, {}), again(ctx, {}, 2, {.group = 2});
  const Tensor x = random_tensor(ctx, BlockSizes{}.stream(), 5);
  const Var y = again.forward(x);
  EXPECT_EQ(y.tape(), nullptr);
  EXPECT_EQ(y.value().to_floats(), plain.forward(x).value().to_floats());
}

/// Two results of two inputs, one of which wants no gradient and is passed through, too.
std::vector<Var> two_results(const ExecCtx& ctx, const std::vector<Var>& in, Parameter& weight) {
  const Var h = linear(ctx, in[0], weight, nullptr);
  return {activation(ctx, h, ops::ActivationKind::silu), add(ctx, h, in[1]), in[1], Var()};
}

TEST_F(RecomputeTest, ResultsThatNobodyUsesAndInputsThatWantNoGradient) {
  const auto weight = test::make_parameter(ctx, "weight", {5, 5}, 5);
  const Tensor a = random_tensor(ctx, {3, 5}, 1), b = random_tensor(ctx, {3, 5}, 2);
  for (const bool wanted : {true, false}) {
    for (int used = 1; used < 8; ++used) {  // bits: which results
      std::vector<std::vector<float>> results[2];
      for (const bool again : {false, true}) {
        weight->clear_grad();
        Tape tape;
        const std::vector<Var> in{tape.input(a, true), tape.input(b, wanted)};
        const auto part = [&](const std::vector<Var>& v) { return two_results(ctx, v, *weight); };
        const std::vector<Var> out = again ? recompute(ctx, in, {weight.get()}, part) : part(in);
        ASSERT_EQ(out.size(), 4u);
        EXPECT_FALSE(out[3]);
        std::vector<Var> roots;
        Tensors grads;
        for (int i = 0; i < 3; ++i) {
          roots.push_back(out[static_cast<std::size_t>(i)]);
          grads.push_back((used >> i & 1) != 0 ? random_tensor(ctx, {3, 5}, 9) : Tensor());
        }
        tape.backward(ctx, roots, std::move(grads));
        for (const Var& v : in) {
          if (v.requires_grad() && tape.grad(v)) results[again].push_back(tape.grad(v).to_floats());
        }
        if (weight->has_grad()) results[again].push_back(weight->grad().to_floats());
      }
      EXPECT_EQ(results[0], results[1]) << "results " << used << ", gradient wanted " << wanted;
      if (used != 4 || wanted) {
        EXPECT_FALSE(results[0].empty());
      }
    }
  }
}

TEST_F(RecomputeTest, APartThatLeadsNowhereHoldsNoParameterBack) {
  const auto weight = test::make_parameter(ctx, "weight", {5, 5}, 5);
  for (const Weights weights : {Weights::immediate, Weights::deferred}) {
    weight->clear_grad();
    std::vector<std::string> ready;
    Tape tape;
    tape.on_gradient_ready([&](Parameter& p) { ready.push_back(p.name()); });
    const Var x = tape.input(random_tensor(ctx, {3, 5}, 1), true);
    recompute(ctx, {x}, {weight.get()}, [&](const std::vector<Var>& in) {
      return std::vector<Var>{linear(ctx, in[0], *weight, nullptr)};
    });
    tape.backward(ctx, add(ctx, x, x), random_tensor(ctx, {3, 5}, 2), weights);
    tape.run_weight_gradients(ctx);
    EXPECT_EQ(ready, std::vector<std::string>{"weight"});
    EXPECT_FALSE(weight->has_grad());
  }
}

TEST_F(RecomputeTest, FrozenParametersMayBeNamed) {
  const auto frozen = test::make_parameter(ctx, "frozen", {5, 5}, 5, false);
  test::expect_gradients(ctx,
                         {{random_tensor(ctx, {3, 5}, 1)}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                            return recompute(c, in, {frozen.get()}, [&](const std::vector<Var>& v) {
                              return std::vector<Var>{linear(c, v[0], *frozen, nullptr)};
                            })[0];
                          }});
}

TEST_F(RecomputeTest, RefusesWhatItWouldGetWrong) {
  const auto weight = test::make_parameter(ctx, "the_weight", {5, 5}, 5);
  const Tensor value = random_tensor(ctx, {3, 5}, 1);
  const auto backward = [&](RecomputedPart part, std::vector<Parameter*> named) {
    Tape tape;
    const Var x = tape.input(value, true);
    const auto out = recompute(ctx, {x}, std::move(named), std::move(part));
    tape.backward(ctx, out[0], random_tensor(ctx, {3, 5}, 2));
  };
  expect_refusal(
      [&] {
        backward(
            [&](const std::vector<Var>& in) {
              return std::vector<Var>{linear(ctx, in[0], *weight, nullptr)};
            },
            {});
      },
      "the_weight");
  int calls = 0;
  expect_refusal(
      [&] {
        backward([&](const std::vector<Var>& in) { return std::vector<Var>(++calls == 1 ? 1 : 2, in[0]); },
                 {});
      },
      "values that a recomputed part gave again");
  Tape tape;
  const Var x = tape.input(value, true), y = add(ctx, x, x);
  expect_refusal(
      [&] {
        recompute(ctx, {x}, {},
                  [&](const std::vector<Var>& in) { return std::vector<Var>{add(ctx, in[0], y)}; });
      },
      "not among its inputs");
}

TEST_F(RecomputeTest, ARecipeOutlivesItsNorm) {
  const auto scale =
      test::make_parameter(ctx, "scale", {115}, 5, false);  // frozen: the norm's node goes with B
  const auto weight = test::make_parameter(ctx, "weight", {5, 115}, 7);
  const DropoutSpec drop{.key = {7, site_of("test"), 2}, .probability = 0.3f, .batch = 3};
  std::vector<float> results[2];
  for (const bool forget : {false, true}) {
    weight->clear_grad();
    Tape tape;
    const Var x = tape.input(random_tensor(ctx, {9, 115}, 1), true);
    Var branch = tape.input(random_tensor(ctx, {9, 115}, 2), true);
    const Var y = add_norm(ctx, x, branch, *scale, nullptr, {.rms = true}, drop, forget).y;
    EXPECT_EQ(static_cast<bool>(y.recipe()), forget);
    if (forget) {
      EXPECT_EQ(y.recipe()(ctx).to_floats(), y.value().to_floats());
    }
    tape.backward(ctx, linear(ctx, y, *weight, nullptr), random_tensor(ctx, {9, 5}, 3), Weights::deferred);
    tape.run_weight_gradients(ctx);
    results[forget] = weight->grad().to_floats();
  }
  EXPECT_EQ(results[0], results[1]);
  // Where nothing is recorded, a recipe would keep what is otherwise let go.
  Tape tape;
  const Var constant = tape.input(random_tensor(ctx, {9, 115}, 1), false);
  EXPECT_FALSE(add_norm(ctx, constant, {}, *scale, nullptr, {.rms = true}, {}, true).y.recipe());
}

TEST_F(RecomputeTest, NothingIsKeptButTheInputs) {
  const BlockSizes sizes{.seq = 16, .batch = 4, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 128};
  const auto stream = static_cast<std::size_t>(sizes.stream().numel()) * 4;
  for (const std::size_t group : {1, 2, 3}) {
    const Chain chain(ctx, sizes, 6, {.group = group});
    const Tensor x = random_tensor(ctx, sizes.stream(), 5);
    Tape tape;
    Var y;
    const std::size_t held = test::held_bytes(ctx, [&] {
      y = chain.forward(tape.input(x, true));
      return 0;
    });
    // Residual and branch into each group (the first has x, which is there already), then what the final norm
    // keeps (the sum and rstd), what the head keeps, and y.
    EXPECT_EQ(held, 2 * (6 / group - 1) * stream + 3 * stream + 64 * 4) << group;
    tape.backward(ctx, y, random_tensor(ctx, sizes.stream(), 6));
  }
}

TEST_F(RecomputeTest, DeferredItKeepsWhatWNeedsAndNoMore) {
  const BlockSizes sizes{.seq = 16, .batch = 4, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 128};
  std::map<std::size_t, std::size_t> after_b;
  for (const std::size_t group : {0, 1, 2}) {
    const Chain chain(ctx, sizes, 2, {.group = group});
    const Tensor x = random_tensor(ctx, sizes.stream(), 5);
    const std::size_t before = ctx.allocator->stats().used_bytes;
    Tape tape;
    const Var in = tape.input(x, true);
    tape.backward(ctx, chain.forward(in), random_tensor(ctx, sizes.stream(), 6), Weights::deferred);
    after_b[group] = ctx.allocator->stats().used_bytes - before;
    tape.run_weight_gradients(ctx);
    EXPECT_EQ(ctx.allocator->stats().used_bytes - before, tape.grad(in).nbytes());
  }
  EXPECT_EQ(after_b[1], after_b[0]);
  EXPECT_EQ(after_b[2], after_b[0]);
}

}  // namespace
}  // namespace tessera
