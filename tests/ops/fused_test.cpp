/// Each fused op against the same thing put together from plain ones, in every dtype, on 1 and 2 threads.

#include "tests/support/gradcheck.hpp"

#include "tessera/ops/activation.hpp"
#include "tessera/ops/attention.hpp"
#include "tessera/ops/cross_entropy.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/embedding.hpp"
#include "tessera/ops/gemm.hpp"
#include "tessera/ops/norm.hpp"
#include "tessera/ops/reduce.hpp"
#include "tessera/ops/rope.hpp"
#include "tests/ops/fused_linear.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::distance;
using test::random_tensor;

class Fused : public ::testing::TestWithParam<std::tuple<DType, int>> {
 protected:
  DType dtype = std::get<0>(GetParam());
  ExecCtx ctx = test::context(std::get<1>(GetParam()), 3);
  /// Rounding of one result in `dtype`, and of a sum of several steps.
  double tolerance = dtype == DType::f32 ? 2e-6 : dtype == DType::bf16 ? 1e-2 : 1.25e-3;

  Tensor values(const Shape& shape, unsigned seed, float scale = 1.0f) const {
    const Tensor x = random_tensor(ctx, shape, seed, scale);
    return dtype == DType::f32 ? x : ops::cast(ctx, x, dtype);
  }
  Tensor f32(const Tensor& x) const {
    return x.dtype() == DType::f32 ? ops::contiguous(ctx, x)
                                   : ops::cast(ctx, ops::contiguous(ctx, x), DType::f32);
  }
  static DropoutSpec drop(float probability) {
    return {.key = {7, 9, 2},
            .probability = probability,
            .batch = 3,
            .sample0 = 2,
            .position0 = 0,
            .seq_length = 16};
  }
};
INSTANTIATE_TEST_SUITE_P(All, Fused,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16, DType::f16),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(Fused, LinearIsAProductAndABias) {
  for (const std::int64_t rows : {1, 5, 129}) {
    const Tensor x = values({rows, 37}, 1), w = values({23, 37}, 2), b = values({23}, 3);
    const Tensor product = ops::matmul(ctx, x, w, {.trans_b = true});  // fp32
    std::vector<float> expected = product.to_floats();
    const auto bias = b.to_floats();
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += bias[i % 23];
    EXPECT_LE(distance(ops::linear(ctx, x, w, b).to_floats(), expected), tolerance);
  }
}

TEST_P(Fused, AWeightGradientIsAProductAddedToWhatIsThere) {
  const Tensor x = values({29, 11}, 1), dy = values({29, 13}, 3);
  const Tensor dw = random_tensor(ctx, {13, 11}, 5);
  const auto before = dw.to_floats();
  ops::linear_backward_weight(ctx, dy, x, dw, 1.0f);
  std::vector<float> expected = ops::matmul(ctx, dy, x, {.trans_a = true}).to_floats();
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
  EXPECT_LE(distance(dw.to_floats(), expected), 2e-6);
}

// Twice: the second call adds to the first.
TEST_P(Fused, WeightAndBiasGradientsInOneCall) {
  const Tensor x = values({29, 11}, 1), dy = values({29, 13}, 3);
  for (const float bias_beta : {0.0f, 1.0f}) {
    std::vector<std::vector<float>> results[2];
    for (const bool together : {false, true}) {
      const Tensor dw = random_tensor(ctx, {13, 11}, 5), db = random_tensor(ctx, {13}, 7);
      for (const float more : {bias_beta, 1.0f}) {
        if (together) {
          ops::linear_backward_weight(ctx, dy, x, dw, 1.0f, db, more);
        } else {
          ops::linear_backward_weight(ctx, dy, x, dw, 1.0f);
          ops::column_sum(ctx, dy, db, more);
        }
      }
      results[together] = {dw.to_floats(), db.to_floats()};
    }
    for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(distance(results[1][i], results[0][i]), 2e-6);
    if (!test::on_cuda()) {
      EXPECT_EQ(results[1], results[0]);
    }
  }
}

TEST_P(Fused, WeightAndBiasGradientsOfNothing) {
  const Tensor x = values({0, 11}, 1), dy = values({0, 13}, 3), dw = random_tensor(ctx, {13, 11}, 5),
               db = random_tensor(ctx, {13}, 7);
  const std::vector<float> weights = dw.to_floats(), biases = db.to_floats();
  ops::linear_backward_weight(ctx, dy, x, dw, 1.0f, db, 1.0f);
  EXPECT_EQ(dw.to_floats(), weights);
  EXPECT_EQ(db.to_floats(), biases);
  ops::linear_backward_weight(ctx, dy, x, dw, 0.0f, db, 0.0f);
  EXPECT_EQ(db.to_floats(), std::vector<float>(13, 0.0f));
}

constexpr ops::ActivationKind kActivations[] = {ops::ActivationKind::gelu_tanh, ops::ActivationKind::gelu_erf,
                                                ops::ActivationKind::relu, ops::ActivationKind::silu,
                                                ops::ActivationKind::tanh};

TEST_P(Fused, LinearWithActivationIsItsTwoParts) {
  for (const ops::ActivationKind kind : kActivations) {
    for (const std::int64_t rows : {1, 5, 129}) {
      const Tensor x = values({rows, 3, 37}, 1), w = values({23, 37}, 2), b = values({23}, 3);
      for (const Tensor& bias : {b, Tensor()}) {
        const Tensor pre = ops::linear(ctx, x, w, bias), y = ops::activation(ctx, pre, kind);
        const ops::LinearActivation fused = test::linear_with_activation(ctx, x, w, bias, kind);
        EXPECT_EQ(fused.pre.shape(), pre.shape());
        EXPECT_EQ(fused.y.dtype(), dtype);
        EXPECT_LE(distance(fused.pre.to_floats(), pre.to_floats()), tolerance);
        EXPECT_LE(distance(fused.y.to_floats(), y.to_floats()), tolerance);
        const ops::LinearActivation alone = test::linear_with_activation(ctx, x, w, bias, kind, false);
        EXPECT_FALSE(alone.pre);
        EXPECT_LE(distance(alone.y.to_floats(), y.to_floats()), tolerance);
        if (test::on_cuda()) continue;  // there the product's own epilogue rounds less often
        EXPECT_EQ(alone.y.to_floats(), y.to_floats());
        EXPECT_EQ(fused.pre.to_floats(), pre.to_floats());
        EXPECT_EQ(fused.y.to_floats(), y.to_floats());
      }
    }
  }
}

TEST_P(Fused, ActivatedLinearsInputGradientIsItsTwoParts) {
  for (const ops::ActivationKind kind : kActivations) {
    for (const std::int64_t rows : {1, 5, 129}) {
      const Tensor dy = values({rows, 3, 23}, 1), w = values({23, 37}, 2),
                   pre = values({rows, 3, 37}, 3, 3.0f);
      const Tensor product = ops::matmul(ctx, dy.view({rows * 3, 23}), w, {.out = dtype});
      const Tensor expected = ops::activation_backward(ctx, pre, product.view(pre.shape()), kind);
      const Tensor fused = test::linear_backward_input(ctx, dy, w, pre, kind);
      EXPECT_EQ(fused.shape(), pre.shape());
      EXPECT_LE(distance(fused.to_floats(), expected.to_floats()), tolerance);
      if (!test::on_cuda()) {
        EXPECT_EQ(fused.to_floats(), expected.to_floats());
      }
      EXPECT_EQ(pre.to_floats(), values({rows, 3, 37}, 3, 3.0f).to_floats());
    }
  }
}

TEST_P(Fused, SwigluIsSiluTimesUp) {
  const Tensor gate_up = values({7, 2 * 19}, 1, 3.0f);
  const auto gate =
      ops::activation(ctx, f32(gate_up.narrow(1, 0, 19)), ops::ActivationKind::silu).to_floats();
  const auto up = f32(gate_up.narrow(1, 19, 19)).to_floats();
  std::vector<float> expected(gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) expected[i] = gate[i] * up[i];
  EXPECT_LE(distance(ops::swiglu(ctx, gate_up).to_floats(), expected), tolerance);
}

TEST_P(Fused, AddNormIsDropoutAddAndNorm) {
  // The residual stream stays in fp32, also beside bf16.
  for (const bool rms : {false, true}) {
    for (const float probability : {0.0f, 0.3f}) {
      const Tensor residual = random_tensor(ctx, {5, 3, 17}, 1), branch = values({5, 3, 17}, 2);
      const Tensor weight = random_tensor(ctx, {17}, 3), bias = rms ? Tensor() : random_tensor(ctx, {17}, 4);
      const ops::NormOptions options{.rms = rms, .eps = 1e-5f, .out = dtype};
      const auto fused = ops::add_norm(ctx, residual, branch, weight, bias, options, drop(probability));
      const Tensor sum =
          ops::add(ctx, residual, ops::dropout(ctx, f32(branch), drop(probability)), DType::f32);
      EXPECT_LE(distance(fused.residual.to_floats(), sum.to_floats()),
                probability > 0.0f && dtype != DType::f32 ? 4e-3 : 1e-6);

      const auto x = fused.residual.to_floats(), w = weight.to_floats(), y = fused.y.to_floats();
      std::vector<double> expected;
      for (std::size_t row = 0; row < 15; ++row) {
        double mean = 0.0, square = 0.0;
        for (std::size_t i = 0; i < 17; ++i) mean += static_cast<double>(x[row * 17 + i]) / 17.0;
        if (rms) mean = 0.0;
        for (std::size_t i = 0; i < 17; ++i)
          square += std::pow(static_cast<double>(x[row * 17 + i]) - mean, 2.0) / 17.0;
        for (std::size_t i = 0; i < 17; ++i) {
          expected.push_back((static_cast<double>(x[row * 17 + i]) - mean) / std::sqrt(square + 1e-5) *
                                 static_cast<double>(w[i]) +
                             (bias ? static_cast<double>(bias.to_floats()[i]) : 0.0));
        }
      }
      EXPECT_LE(distance(y, expected), tolerance);
    }
  }
}

TEST_P(Fused, EmbeddingIsRowsAddedAndDropped) {
  const Tensor tokens = Tensor::from(ctx, std::vector<std::int32_t>{3, 0, 6, 3, 5, 1}, {2, 3});
  const Tensor positions = Tensor::from(ctx, std::vector<std::int32_t>{0, 0, 0, 1, 1, 1}, {6});
  const Tensor table = values({7, 13}, 1), places = values({2, 13}, 2);
  for (const float probability : {0.0f, 0.4f}) {
    const Tensor fused =
        ops::embedding(ctx, tokens, table, positions, places, {DType::f32, drop(probability)});
    const auto t = tokens.to_vector<std::int32_t>(), p = positions.to_vector<std::int32_t>();
    const auto tv = table.to_floats(), pv = places.to_floats();
    std::vector<float> rows;
    for (std::size_t r = 0; r < 6; ++r) {
      for (std::size_t i = 0; i < 13; ++i)
        rows.push_back(tv[static_cast<std::size_t>(t[r]) * 13 + i] +
                       pv[static_cast<std::size_t>(p[r]) * 13 + i]);
    }
    const Tensor expected = ops::dropout(ctx, Tensor::from(ctx, rows, {2, 3, 13}), drop(probability));
    EXPECT_LE(distance(fused.to_floats(), expected.to_floats()), 1e-6);
  }
}

TEST_P(Fused, CrossEntropyIsLogSumExpMinusTheLabel) {
  const Tensor logits = values({5, 37}, 1, 5.0f);
  const std::vector<std::int32_t> labels = {0, 36, -100, 17, 5};
  const Tensor label_tensor = Tensor::from(ctx, labels, {5}), upstream = random_tensor(ctx, {5}, 2);
  const auto x = logits.to_floats(), u = upstream.to_floats();
  std::vector<double> loss, gradient;
  for (std::size_t r = 0; r < 5; ++r) {
    double sum = 0.0;
    for (std::size_t i = 0; i < 37; ++i) sum += std::exp(static_cast<double>(x[r * 37 + i]));
    const bool ignored = labels[r] < 0;
    loss.push_back(
        ignored ? 0.0 : std::log(sum) - static_cast<double>(x[r * 37 + static_cast<std::size_t>(labels[r])]));
    for (std::size_t i = 0; i < 37; ++i) {
      const double p = std::exp(static_cast<double>(x[r * 37 + i])) / sum -
                       (static_cast<std::int32_t>(i) == labels[r] ? 1.0 : 0.0);
      gradient.push_back(ignored ? 0.0 : static_cast<double>(u[r]) * p);
    }
  }
  const ops::CrossEntropy got = ops::cross_entropy(ctx, logits, label_tensor);
  EXPECT_LE(distance(got.loss.to_floats(), loss), 2e-6);
  ops::cross_entropy_backward_in_place(ctx, logits, label_tensor, got.lse, upstream);
  EXPECT_LE(distance(logits.to_floats(), gradient), tolerance);
}

TEST_P(Fused, EmbeddingFromPartsOfTheTable) {
  const Tensor tokens = Tensor::from(ctx, std::vector<std::int32_t>{4, 0, 4, 2, 6, 4}, {2, 3});
  const Tensor positions = Tensor::from(ctx, std::vector<std::int32_t>{0, 0, 0, 1, 1, 1}, {6});
  const Tensor table = values({7, 13}, 1), places = values({2, 13}, 2);
  const Tensor whole = ops::embedding(ctx, tokens, table, positions, places, {DType::f32, drop(0.4f)});
  const Tensor sum = Tensor::empty(ctx, whole.shape(), DType::f32);
  const Tensor dtable = Tensor::empty(ctx, {7, 13}, DType::f32),
               dparts = Tensor::empty(ctx, {7, 13}, DType::f32);
  ops::embedding_backward(ctx, tokens, whole, dtable, 0.0f, drop(0.4f));
  for (const auto& [first, count] : {std::pair{0, 4}, std::pair{4, 3}}) {
    const Tensor part = ops::embedding(ctx, tokens, table.narrow(0, first, count), positions, places,
                                       {DType::f32, drop(0.4f), first});
    ops::axpby(ctx, 1.0f, part, first == 0 ? 0.0f : 1.0f, sum);
    ops::embedding_backward(ctx, tokens, whole, dparts.narrow(0, first, count), 0.0f, drop(0.4f), first);
  }
  EXPECT_EQ(sum.to_floats(), whole.to_floats());
  EXPECT_EQ(dparts.to_floats(), dtable.to_floats());
}

TEST_P(Fused, CrossEntropyOfPartsIsThatOfTheWhole) {
  const Tensor logits = values({5, 37}, 1, 5.0f), loss = random_tensor(ctx, {5}, 3);
  const Tensor labels = Tensor::from(ctx, std::vector<std::int32_t>{0, 36, -100, 17, 5}, {5});
  const Tensor upstream = random_tensor(ctx, {5}, 2), parts = random_tensor(ctx, {2, 2, 5}, 4);
  for (const auto& [rank, first, count] : {std::tuple{0, 0, 18}, std::tuple{1, 18, 19}}) {
    const Tensor part = ops::cross_entropy_part(ctx, logits.narrow(1, first, count), labels, first);
    ops::copy(ctx, part.view({1, 2, 5}), parts.narrow(0, rank, 1));
  }
  const Tensor lse = ops::combine_cross_entropy_into(ctx, parts, labels, loss);
  const ops::CrossEntropy expected = ops::cross_entropy(ctx, logits, labels);
  EXPECT_LE(distance(loss.to_floats(), expected.loss.to_floats()), 1e-6);
  EXPECT_LE(distance(lse.to_floats(), expected.lse.to_floats()), 1e-6);
}

// Half of the heads, told where they stand, drop what the whole drops there.
TEST_P(Fused, AttentionDropoutIsKeyedByTheGlobalHead) {
  const std::int64_t seq = 9, heads = 4, kv = 2, d = 5;
  const Tensor q = values({seq, 2, heads, d}, 1), k = values({seq, 2, kv, d}, 2),
               v = values({seq, 2, kv, d}, 3);
  ops::AttentionOptions options;
  options.dropout = 0.3f;
  options.dropout_key = {7, 1, 2};
  const Tensor whole = ops::attention(ctx, q, k, v, options).o;
  options.total_heads = heads;
  for (const std::int64_t half : {0, 1}) {
    options.head0 = 2 * half;
    const Tensor part =
        ops::attention(ctx, q.narrow(2, 2 * half, 2), k.narrow(2, half, 1), v.narrow(2, half, 1), options).o;
    EXPECT_EQ(part.to_floats(), ops::contiguous(ctx, whole.narrow(2, 2 * half, 2)).to_floats());
  }
  options.head0 = 3;
  EXPECT_THROW(ops::attention(ctx, q.narrow(2, 0, 2), k, v, options), InvalidArgument);
}

TEST_P(Fused, AttentionIsProductSoftmaxProduct) {
  // Head by head: scores by a plain product, softmax in doubles, values by a plain product.
  const std::int64_t seq = 9, heads = 4, kv = 2, d = 5;
  const Tensor q = values({seq, 1, heads, d}, 1, 2.0f), k = values({seq, 1, kv, d}, 2, 2.0f),
               v = values({seq, 1, kv, d}, 3);
  const auto o = ops::attention(ctx, q, k, v, {}).o.to_floats();
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto head = [&](const Tensor& t, std::int64_t i) { return f32(t.narrow(2, i, 1)).view({seq, d}); };
    const Tensor scores = ops::matmul(ctx, head(q, h), head(k, h / 2), {.trans_b = true});
    auto p = scores.to_vector<float>();
    for (std::int64_t i = 0; i < seq; ++i) {
      double sum = 0.0;
      for (std::int64_t j = 0; j <= i; ++j)
        sum += std::exp(static_cast<double>(p[i * seq + j]) / std::sqrt(5.0));
      for (std::int64_t j = 0; j < seq; ++j) {
        const double e = j <= i ? std::exp(static_cast<double>(p[i * seq + j]) / std::sqrt(5.0)) / sum : 0.0;
        p[i * seq + j] = static_cast<float>(e);
      }
    }
    scores.copy_from_host(p.data());
    const auto expected = ops::matmul(ctx, scores, head(v, h / 2)).to_floats();
    std::vector<float> got;
    for (std::int64_t i = 0; i < seq; ++i) {
      for (std::int64_t f = 0; f < d; ++f)
        got.push_back(o[static_cast<std::size_t>((i * heads + h) * d + f)]);
    }
    EXPECT_LE(distance(got, expected), tolerance) << "head " << h;
  }
}

/// Frequencies of 16 rotated features, and what cos and sin are multiplied by.
struct Stretched {
  std::vector<double> frequencies;
  double magnitude;
};
Stretched stretched(const ExecCtx& ctx, const ops::RopeRule& rule, std::int64_t length) {
  const ops::RopeTable table = ops::make_rope_table(ctx, 2, 16, rule, length);
  const std::vector<float> cos = table.cos.to_floats(), sin = table.sin.to_floats();
  Stretched result{{}, static_cast<double>(cos[0])};
  for (std::size_t i = 8; i < 16; ++i)  // of position 1
    result.frequencies.push_back(std::atan2(static_cast<double>(sin[i]), static_cast<double>(cos[i])));
  return result;
}

TEST_P(Fused, RopeIsStretchedByTheRules) {
  const auto expect = [&](const Stretched& got, const std::vector<double>& frequencies, double magnitude) {
    EXPECT_NEAR(got.magnitude, magnitude, 1e-6);
    for (std::size_t i = 0; i < frequencies.size(); ++i)
      EXPECT_NEAR(got.frequencies[i] / frequencies[i], 1.0, 3e-6) << i;
  };
  ops::RopeRule rule{.theta = 5e5, .scaling = {8.0, 1.0, 4.0, 8192}};
  expect(stretched(ctx, rule, 0),
         {1.0, .193923, .037606, .00729266, .000524846, 3.4281e-5, 6.64787e-6, 1.28917e-6}, 1.0);
  rule = {.theta = 1e4, .scaling = {.factor = 4.0, .original_max_positions = 4096, .type = RopeType::yarn}};
  expect(stretched(ctx, rule, 0), {1.0, .316228, .1, .0256935, .00625, .0013835, .00025, 7.90569e-5},
         1.1386294);
  rule.scaling.attention_factor = 0.5;
  EXPECT_NEAR(stretched(ctx, rule, 0).magnitude, 0.5, 1e-7);
  rule = {.theta = 1e4, .scaling = {.factor = 2.0, .type = RopeType::dynamic}, .trained = 2048};
  std::vector<double> plain, grown, halved, quick, slow;
  for (int i = 0; i < 8; ++i) {
    plain.push_back(std::pow(1e4, -i / 8.0));
    grown.push_back(std::pow(35097.92, -i / 8.0));
    halved.push_back(plain.back() / 2.0);
    quick.push_back(plain.back() / (1.0 + i));
    slow.push_back(plain.back() / (2.0 + i));
  }
  expect(stretched(ctx, rule, 2048), plain, 1.0);
  expect(stretched(ctx, rule, 4096), grown, 1.0);
  EXPECT_EQ(ops::longest_usual(rule), 2048);
  rule.scaling.type = RopeType::linear;
  expect(stretched(ctx, rule, 4096), halved, 1.0);
  EXPECT_EQ(ops::longest_usual(rule), 0);
  rule.scaling = {.factor = 32.0,
                  .original_max_positions = 4096,
                  .type = RopeType::longrope,
                  .short_factor = {1, 2, 3, 4, 5, 6, 7, 8},
                  .long_factor = {2, 3, 4, 5, 6, 7, 8, 9}};
  expect(stretched(ctx, rule, 4096), quick, 1.1902381);
  expect(stretched(ctx, rule, 4097), slow, 1.1902381);
  rule.scaling.long_factor = {1.0};
  test::expect_error<InvalidArgument>([&] { stretched(ctx, rule, 1); }, "longrope needs 8 factors");
}

TEST_P(Fused, RopeTurnsPairsAndBack) {
  const Tensor x = values({3, 2, 4, 6}, 1);
  const auto before = x.to_floats();
  const Tensor positions = Tensor::from(ctx, std::vector<std::int32_t>{0, 5, 1, 6, 2, 7}, {6});
  for (const bool interleaved : {false, true}) {
    const ops::RopeTable table =
        ops::make_rope_table(ctx, 8, 4, {.theta = 100.0, .interleaved = interleaved});
    const Tensor turned = ops::contiguous(ctx, x);
    ops::rope_in_place(ctx, turned, positions, table, false);
    std::vector<double> expected(before.begin(), before.end());
    const std::vector<std::int32_t> p = positions.to_vector<std::int32_t>();
    for (std::size_t row = 0; row < 6; ++row) {
      for (std::size_t h = 0; h < 4; ++h) {
        for (std::size_t i = 0; i < 2; ++i) {
          const double angle = p[row] * std::pow(100.0, -static_cast<double>(i) / 2.0);
          const std::size_t base = (row * 4 + h) * 6;
          const std::size_t a = base + (interleaved ? 2 * i : i),
                            b = base + (interleaved ? 2 * i + 1 : i + 2);
          const double u = static_cast<double>(before[a]), w = static_cast<double>(before[b]);
          expected[a] = u * std::cos(angle) - w * std::sin(angle);
          expected[b] = u * std::sin(angle) + w * std::cos(angle);
        }
      }
    }
    EXPECT_LE(distance(turned.to_floats(), expected), tolerance);
    ops::rope_in_place(ctx, turned, positions, table, true);
    EXPECT_LE(distance(turned.to_floats(), before), tolerance);
  }
}

TEST_P(Fused, ColumnSumsAreProductsWithOnes) {
  const Tensor x = values({131, 7}, 1), ones = Tensor::empty(ctx, {1, 131}, DType::f32),
               out = random_tensor(ctx, {7}, 2);
  ops::fill_constant(ctx, ones, 1.0f);
  std::vector<float> expected = ops::matmul(ctx, ones, f32(x)).to_floats();
  const auto before = out.to_floats();
  for (std::size_t i = 0; i < 7; ++i) expected[i] += before[i];
  ops::column_sum(ctx, x, out, 1.0f);
  EXPECT_LE(distance(out.to_floats(), expected), 1e-6);
}

}  // namespace
}  // namespace tessera
