/// Every differentiable function against central differences, at odd sizes and size 1, on 1 and 2 threads.

#include "tests/support/gradcheck.hpp"

#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_gradients;
using test::make_parameter;
using test::random_tensor;

class Jacobian : public ::testing::TestWithParam<int> {
 protected:
  ExecCtx ctx = test::context(GetParam(), 3);
};
INSTANTIATE_TEST_SUITE_P(Threads, Jacobian, ::testing::Values(1, 2));

DropoutSpec drop(float probability, std::int64_t batch = 1, std::int64_t seq_length = 64) {
  return {.key = {7, site_of("test"), 2},
          .probability = probability,
          .batch = batch,
          .sample0 = 3,
          .position0 = 0,
          .seq_length = seq_length};
}

/// y = 3x whose backward says 2: the check must notice.
class WrongFunction final : public Function {
 public:
  explicit WrongFunction(float factor) : factor_(factor) {}
  const char* name() const override { return "wrong"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dx = ops::contiguous(ctx, grads[0]);
    ops::axpby(ctx, factor_, grads[0], 0.0f, dx);
    return {dx};
  }

 private:
  float factor_;
};

Var three_times(const ExecCtx& ctx, const Var& x, float claimed) {
  Tensor y = ops::contiguous(ctx, x.value());
  ops::axpby(ctx, 3.0f, x.value(), 0.0f, y);
  return record({x}, y, [&] { return std::make_unique<WrongFunction>(claimed); });
}

TEST_P(Jacobian, TheCheckNoticesAWrongGradient) {
  const Tensor x = random_tensor(ctx, {3, 5}, 1);
  const auto errors = [&](float claimed) {
    return test::gradient_errors(ctx, {{x}, {}, [=](const ExecCtx& c, std::vector<Var> in) {
                                         return three_times(c, in[0], claimed);
                                       }});
  };
  EXPECT_LE(errors(3.0f)[0].relative, 1e-4);
  EXPECT_GT(errors(3.02f)[0].relative, 5e-3);
  EXPECT_NEAR(errors(2.0f)[0].relative, 1.0 / 3.0, 1e-3);
}

TEST_P(Jacobian, Linear) {
  struct Case {
    Shape x;
    std::int64_t out;
    bool bias;
    std::int64_t padding;
  };
  for (const Case& s : {Case{{5, 3, 7}, 11, true, 1}, Case{{4, 5}, 3, false, 1}, Case{{1, 1}, 1, true, 1},
                        Case{{3, 2, 5}, 7, true, 32}, Case{{1, 13}, 17, false, 16}}) {
    const auto weight = make_parameter(ctx, "weight", {s.out, s.x[-1]}, 11);
    const auto bias = make_parameter(ctx, "bias", {s.out}, 13);
    std::vector<Parameter*> parameters{weight.get()};
    if (s.bias) parameters.push_back(bias.get());
    expect_gradients(ctx,
                     {{random_tensor(ctx, s.x, 5)}, parameters, [&](const ExecCtx& c, std::vector<Var> in) {
                        return linear(c, in[0], *weight, s.bias ? bias.get() : nullptr, s.padding);
                      }});
  }
}

TEST_P(Jacobian, Activations) {
  using ops::ActivationKind;
  for (const auto kind : {ActivationKind::gelu_tanh, ActivationKind::gelu_erf, ActivationKind::relu,
                          ActivationKind::silu, ActivationKind::tanh}) {
    for (const Shape& shape : {Shape{1}, Shape{3, 37}}) {
      const Tensor x = random_tensor(ctx, shape, 21, 3.0f);
      test::edit(x, [](std::vector<float>& values) {
        for (float& v : values) {
          if (std::abs(v) < 0.05f) v = 0.05f;  // no difference quotient across the corner of ReLU
        }
      });
      expect_gradients(
          ctx, {{x}, {}, [=](const ExecCtx& c, std::vector<Var> in) { return activation(c, in[0], kind); }});
    }
  }
}

TEST_P(Jacobian, Swiglu) {
  for (const Shape& shape : {Shape{1, 2}, Shape{3, 2, 22}, Shape{1, 74}}) {
    expect_gradients(ctx, {{random_tensor(ctx, shape, 31, 2.0f)},
                           {},
                           [](const ExecCtx& c, std::vector<Var> in) { return swiglu(c, in[0]); }});
  }
}

TEST_P(Jacobian, Geglu) {
  for (const Shape& shape : {Shape{1, 2}, Shape{3, 2, 22}}) {
    expect_gradients(ctx,
                     {{random_tensor(ctx, shape, 31, 2.0f)}, {}, [](const ExecCtx& c, std::vector<Var> in) {
                        return activation(c, in[0], ops::ActivationKind::geglu);
                      }});
  }
}

TEST_P(Jacobian, ScaleAndSoftcap) {
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 2, 7}}) {
    expect_gradients(ctx, {{random_tensor(ctx, shape, 33, 2.0f)},
                           {},
                           [](const ExecCtx& c, std::vector<Var> in) { return scale(c, in[0], -2.5f); }});
    expect_gradients(ctx, {{random_tensor(ctx, shape, 35, 2.0f)},
                           {},
                           [](const ExecCtx& c, std::vector<Var> in) { return softcap(c, in[0], 1.5f); }});
  }
}

TEST_P(Jacobian, HeadNorm) {
  for (const bool centred : {false, true}) {
    for (const std::int64_t d : {1, 7}) {
      const auto query = make_parameter(ctx, "query", {d}, 61), key = make_parameter(ctx, "key", {d}, 63);
      expect_gradients(ctx,
                       {{random_tensor(ctx, {3, 2, (4 + 2 * 2) * d}, 65, 2.0f)},
                        {query.get(), key.get()},
                        [&](const ExecCtx& c, std::vector<Var> in) {
                          return head_norm(c, in[0],
                                           {.heads = 4,
                                            .kv_heads = 2,
                                            .head_dim = d,
                                            .query_weight = *query,
                                            .key_weight = *key,
                                            .eps = 0.1f,
                                            .zero_centered = centred});
                        }},
                       3e-3, 5e-3f);
    }
  }
}

TEST_P(Jacobian, AddAndDropout) {
  for (const Shape& shape : {Shape{1, 1}, Shape{5, 3, 7}}) {
    expect_gradients(ctx, {{random_tensor(ctx, shape, 41), random_tensor(ctx, shape, 43)},
                           {},
                           [](const ExecCtx& c, std::vector<Var> in) { return add(c, in[0], in[1]); }});
    for (const float probability : {0.0f, 0.4f}) {
      expect_gradients(ctx, {{random_tensor(ctx, shape, 45)}, {}, [=](const ExecCtx& c, std::vector<Var> in) {
                               return dropout(c, in[0], drop(probability, 3));
                             }});
    }
  }
}

struct NormCase {
  bool rms, branch;
  float dropout;
};

/// How the two results of add_norm reach the scalar.
enum class Used { both, norm_only, residual_only };

void check_add_norm(const ExecCtx& ctx, const NormCase& n, const Shape& shape, Used used) {
  const auto weight = make_parameter(ctx, "weight", {shape[-1]}, 51);
  const auto bias = make_parameter(ctx, "bias", {shape[-1]}, 53);
  Parameter* const b = n.rms ? nullptr : bias.get();
  std::vector<Parameter*> parameters{weight.get()};
  if (b != nullptr) parameters.push_back(b);
  std::vector<Tensor> inputs{random_tensor(ctx, shape, 55, 2.0f)};
  if (n.branch) inputs.push_back(random_tensor(ctx, shape, 57, 2.0f));
  const auto build = [&](const ExecCtx& c, std::vector<Var> in) {
    const ResidualNorm out = add_norm(c, in[0], n.branch ? in[1] : Var(), *weight, b, {n.rms, 1e-5f},
                                      drop(n.dropout, shape[1], shape[0]));
    if (used == Used::norm_only) return out.y;
    if (used == Used::residual_only) return activation(c, out.residual, ops::ActivationKind::silu);
    return add(c, activation(c, out.residual, ops::ActivationKind::silu), out.y);
  };
  SCOPED_TRACE(::testing::Message() << "rms " << n.rms << ", branch " << n.branch << ", dropout " << n.dropout
                                    << ", shape " << shape << ", used " << static_cast<int>(used));
  expect_gradients(ctx, {inputs, parameters, build}, 3e-3, 5e-3f);
}

/// Through 16 bits and back: the gradient is that of the rounded values.
TEST_P(Jacobian, Cast) {
  const Tensor x = random_tensor(ctx, {3, 7}, 11);
  Tape tape;
  const Var in = tape.input(x, true);
  const Var y = cast(ctx, cast(ctx, in, DType::bf16), DType::f32);
  const Tensor upstream = random_tensor(ctx, {3, 7}, 12);
  tape.backward(ctx, y, upstream);
  EXPECT_EQ(y.value().to_floats(), ops::cast(ctx, ops::cast(ctx, x, DType::bf16), DType::f32).to_floats());
  EXPECT_EQ(tape.grad(in).to_floats(),
            ops::cast(ctx, ops::cast(ctx, upstream, DType::bf16), DType::f32).to_floats());
  EXPECT_EQ(cast(ctx, in, DType::f32).value().raw(), x.raw());
}

TEST_P(Jacobian, AddNorm) {
  for (const bool rms : {false, true}) {
    for (const NormCase& n :
         {NormCase{rms, false, 0.0f}, NormCase{rms, true, 0.0f}, NormCase{rms, true, 0.3f}}) {
      for (const Used used : {Used::both, Used::norm_only, Used::residual_only}) {
        check_add_norm(ctx, n, {3, 2, 17}, used);
      }
      check_add_norm(ctx, n, {1, 1, 5}, Used::both);
    }
  }
  check_add_norm(ctx, {true, true, 0.0f}, {2, 1, 1}, Used::both);
}

Var on_tape_of(const Var& other, const Tensor& tokens) {
  return other.tape() != nullptr ? other.tape()->input(tokens, false) : Var(tokens);
}

TEST_P(Jacobian, Embedding) {
  const Tensor tokens = Tensor::from(ctx, std::vector<std::int32_t>{4, 0, 4, 2, 6, 4}, {3, 2});
  const Tensor positions = Tensor::from(ctx, std::vector<std::int32_t>{0, 0, 1, 1, 2, 0}, {6});
  const auto table = make_parameter(ctx, "table", {7, 5}, 61);
  const auto places = make_parameter(ctx, "positions", {4, 5}, 63);
  for (const bool learned : {false, true}) {
    for (const float probability : {0.0f, 0.4f}) {
      std::vector<Parameter*> parameters{table.get()};
      if (learned) parameters.push_back(places.get());
      expect_gradients(
          ctx, {{random_tensor(ctx, {3, 2, 5}, 65)}, parameters, [&](const ExecCtx& c, std::vector<Var> in) {
                  const Var e =
                      embedding(c, on_tape_of(in[0], tokens), *table, learned ? positions : Tensor(),
                                learned ? places.get() : nullptr, {DType::f32, drop(probability, 2, 3)});
                  return add(c, in[0], e);
                }});
    }
  }
}

TEST_P(Jacobian, CrossEntropy) {
  struct Case {
    Shape logits;
    std::vector<std::int32_t> labels;
  };
  for (const Case& s : {Case{{1, 1}, {0}}, Case{{1, 5}, {3}}, Case{{7, 13}, {0, 12, -100, 5, 5, -100, 7}},
                        Case{{2, 211}, {210, 0}}}) {
    const Tensor labels = Tensor::from(ctx, s.labels, {s.logits[0]});
    // The check's random upstream differs from row to row: a gradient per token.
    expect_gradients(
        ctx, {{random_tensor(ctx, s.logits, 71, 2.0f)}, {}, [&](const ExecCtx& c, std::vector<Var> in) {
                return cross_entropy(c, in[0], labels);
              }});
  }
}

TEST_P(Jacobian, CrossEntropyOfLinearWithPaddedRows) {
  const Tensor labels = Tensor::from(ctx, std::vector<std::int32_t>{2, -100, 10}, {3});
  const auto weight = make_parameter(ctx, "weight", {11, 5}, 73);
  expect_gradients(
      ctx, {{random_tensor(ctx, {3, 5}, 75)}, {weight.get()}, [&](const ExecCtx& c, std::vector<Var> in) {
              return cross_entropy(c, linear(c, in[0], *weight, nullptr, 32), labels);
            }});
}

}  // namespace
}  // namespace tessera
