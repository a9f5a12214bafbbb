/// Fused residual + dropout + norm against the three written out one after the other in double, its gradients
/// against central differences of that.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <vector>

#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/vector/norm.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;
using Values = std::vector<double>;

struct Case {
  std::int64_t rows, cols;
  NormKind kind = NormKind::layer;
  DType residual = DType::f32, compute = DType::f32;
  bool branch = true, bias = true;
  float dropout = 0.0f;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.cols << (c.kind == NormKind::rms ? " rms " : " layer ") << c.residual
             << "/" << c.compute << (c.branch ? " branch" : "") << (c.bias ? " bias" : "")
             << " p=" << c.dropout;
}

DropoutSpec spec_of(const Case& c) {
  return {.key = {.seed = 11, .site = 22, .step = 33},
          .probability = c.dropout,
          .batch = 3,
          .sample0 = 5,
          .position0 = 7,
          .seq_length = 40};
}

/// 0 or 1/(1-p) for element (r, f), read off the definition of DropoutSpec.
double mask(const Case& c, std::int64_t r, std::int64_t f) {
  if (c.dropout == 0.0f) return 1.0;
  const DropoutSpec spec = spec_of(c);
  const std::uint64_t row = static_cast<std::uint64_t>((5 + r % 3) * 40 + 7 + r / 3);
  const std::uint64_t blocks = static_cast<std::uint64_t>((c.cols + 3) / 4);
  const auto word = random_block(spec.key, row * blocks + static_cast<std::uint64_t>(f / 4)).word[f % 4];
  return static_cast<double>(word) < static_cast<double>(c.dropout) * 4294967296.0 - 1
             ? 0.0
             : 1.0 / (1.0 - static_cast<double>(c.dropout));
}

struct Tensors {
  explicit Tensors(const Case& c)
      : residual(Buffer::random(c.residual, c.rows * c.cols, 1, 2.0, 0.5)),
        branch(Buffer::random(c.compute, c.rows * c.cols, 2)),
        weight(Buffer::random(DType::f32, c.cols, 3, 0.5, 1.0)),
        bias(Buffer::random(DType::f32, c.cols, 4)),
        residual_out(c.residual, c.rows * c.cols, 77.0),
        y(c.compute, c.rows * c.cols, 77.0),
        mean(DType::f32, c.rows),
        rstd(DType::f32, c.rows),
        dy(Buffer::random(c.compute, c.rows * c.cols, 5)),
        dresidual(Buffer::random(c.residual, c.rows * c.cols, 6)),
        dresidual_in(c.residual, c.rows * c.cols, 77.0),
        dbranch(c.compute, c.rows * c.cols, 77.0),
        dweight(Buffer::random(DType::f32, c.cols, 7)),
        dbias(Buffer::random(DType::f32, c.cols, 8)),
        scratch(DType::f32, std::int64_t{kNormGradParts} * 2 * c.cols, std::nan("")) {}

  Buffer residual, branch, weight, bias, residual_out, y, mean, rstd;
  Buffer dy, dresidual, dresidual_in, dbranch, dweight, dbias, scratch;
};

AddNormForward forward_params(const Case& c, Tensors& t) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .eps = 1e-3f,
          .residual_dtype = c.residual,
          .dtype = c.compute,
          .residual = t.residual.data(),
          .branch = c.branch ? t.branch.data() : nullptr,
          .dropout = spec_of(c),
          .weight = t.weight.floats(),
          .bias = c.bias ? t.bias.floats() : nullptr,
          .residual_out = c.branch ? t.residual_out.data() : nullptr,
          .y = t.y.data(),
          .mean = c.kind == NormKind::layer ? t.mean.floats() : nullptr,
          .rstd = t.rstd.floats()};
}

AddNormBackward backward_params(const Case& c, Tensors& t) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .residual_dtype = c.residual,
          .dtype = c.compute,
          .residual_out = c.branch ? t.residual_out.data() : t.residual.data(),
          .mean = c.kind == NormKind::layer ? t.mean.floats() : nullptr,
          .rstd = t.rstd.floats(),
          .weight = t.weight.floats(),
          .dy = t.dy.data(),
          .dresidual = t.dresidual.data(),
          .dresidual_in = t.dresidual_in.data(),
          .dbranch = c.branch ? t.dbranch.data() : nullptr,
          .dropout = spec_of(c)};
}

NormWeightGrad weight_params(const Case& c, Tensors& t, float beta) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .residual_dtype = c.residual,
          .dtype = c.compute,
          .residual_out = c.branch ? t.residual_out.data() : t.residual.data(),
          .mean = c.kind == NormKind::layer ? t.mean.floats() : nullptr,
          .rstd = t.rstd.floats(),
          .dy = t.dy.data(),
          .dweight = t.dweight.floats(),
          .dbias = c.bias ? t.dbias.floats() : nullptr,
          .beta = beta,
          .scratch = t.scratch.floats()};
}

Values plain_add(const Case& c, const Tensors& t) {
  Buffer sum(c.residual, c.rows * c.cols);
  for (std::int64_t i = 0; i < sum.size(); ++i) {
    sum.set(i, t.residual[i] + (c.branch ? mask(c, i / c.cols, i % c.cols) * t.branch[i] : 0.0));
  }
  return sum.values();
}

/// One row, normalised without weight.
Values plain_norm(NormKind kind, const double* x, std::int64_t cols, double* mean, double* rstd) {
  double m = 0.0, square = 0.0;
  if (kind == NormKind::layer) {
    for (std::int64_t i = 0; i < cols; ++i) m += x[i] / static_cast<double>(cols);
  }
  for (std::int64_t i = 0; i < cols; ++i) square += (x[i] - m) * (x[i] - m) / static_cast<double>(cols);
  *mean = m;
  *rstd = 1.0 / std::sqrt(square + static_cast<double>(1e-3f));
  Values y(static_cast<std::size_t>(cols));
  for (std::int64_t i = 0; i < cols; ++i) y[static_cast<std::size_t>(i)] = (x[i] - m) * *rstd;
  return y;
}

void check_forward(const Case& c, const Tensors& t) {
  const Values x = plain_add(c, t);
  if (c.branch) expect_close(t.residual_out, x, 2e-7);
  // What the fused kernel normalises is the sum as it stored it (one 16-bit rounding may fall the other way).
  const Values stored = c.branch ? t.residual_out.values() : t.residual.values();
  Values y;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    double mean = 0, rstd = 0;
    const Values row = plain_norm(c.kind, stored.data() + r * c.cols, c.cols, &mean, &rstd);
    if (c.kind == NormKind::layer) {
      ASSERT_NEAR(t.mean[r], mean, 1e-6);
    }
    ASSERT_NEAR(t.rstd[r] / rstd, 1.0, 2e-6);
    for (std::int64_t i = 0; i < c.cols; ++i) {
      y.push_back(row[static_cast<std::size_t>(i)] * t.weight[i] + (c.bias ? t.bias[i] : 0.0));
    }
  }
  expect_close(t.y, y, 3e-6);
}

/// Gradient of sum(dy * y) + sum(dresidual * residual_out) at the stored sum, by central differences.
void check_backward(const Case& c, const Tensors& t) {
  Values x = c.branch ? t.residual_out.values() : t.residual.values();
  Values dx, dbranch;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    double* row = x.data() + r * c.cols;
    auto loss = [&] {
      double mean = 0, rstd = 0, total = 0;
      const Values y = plain_norm(c.kind, row, c.cols, &mean, &rstd);
      for (std::int64_t i = 0; i < c.cols; ++i) {
        total += t.dy[r * c.cols + i] * t.weight[i] * y[static_cast<std::size_t>(i)];
      }
      return total;
    };
    for (std::int64_t i = 0; i < c.cols; ++i) {
      const double at = row[i], h = 1e-5;
      row[i] = at + h;
      const double above = loss();
      row[i] = at - h;
      const double below = loss();
      row[i] = at;
      dx.push_back((above - below) / (2 * h) + t.dresidual[r * c.cols + i]);
      dbranch.push_back(dx.back() * mask(c, r, i));
    }
  }
  // One column: (x - mean) * 30 is pure rounding error in either.
  expect_close(t.dresidual_in, dx, 2e-5);
  if (c.branch) expect_close(t.dbranch, dbranch, 2e-5);
}

void check_weight_grad(const Case& c, const Tensors& t, const Tensors& before, float beta) {
  const Values x = c.branch ? t.residual_out.values() : t.residual.values();
  Values dweight = before.dweight.values(), dbias = before.dbias.values();
  for (double& d : dweight) d *= beta;
  for (double& d : dbias) d *= beta;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    double mean = 0, rstd = 0;
    const Values row = plain_norm(c.kind, x.data() + r * c.cols, c.cols, &mean, &rstd);
    for (std::int64_t i = 0; i < c.cols; ++i) {
      dweight[static_cast<std::size_t>(i)] += t.dy[r * c.cols + i] * row[static_cast<std::size_t>(i)];
      dbias[static_cast<std::size_t>(i)] += t.dy[r * c.cols + i];
    }
  }
  expect_close(t.dweight, dweight, 1e-5);
  expect_close(t.dbias, c.bias ? dbias : before.dbias.values(), 1e-5);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (auto [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 2}, {3, 5}, {7, 61}, {33, 67}, {2, 131}, {70, 16}}) {
    for (NormKind kind : {NormKind::layer, NormKind::rms}) {
      for (DType compute : {DType::f32, DType::bf16, DType::f16}) {
        for (DType residual : {DType::f32, DType::bf16, DType::f16}) {
          if (compute != residual && compute != DType::f32 && residual != DType::f32) continue;
          all.push_back({rows, cols, kind, residual, compute, true, kind == NormKind::layer, 0.3f});
          all.push_back({rows, cols, kind, residual, compute, true, true, 0.0f});
          all.push_back({rows, cols, kind, residual, compute, false, false, 0.0f});
        }
      }
    }
  }
  all.push_back({3, 768, NormKind::layer, DType::f32, DType::f32, true, true, 0.1f});
  return all;
}

TEST(Norm, EveryCopyAgreesWithThePlainComposition) {
  const auto forward = TESSERA_COPIES(add_norm_forward_rows);
  const auto backward = TESSERA_COPIES(add_norm_backward_rows);
  const auto part = TESSERA_COPIES(norm_weight_grad_part);
  const auto columns = TESSERA_COPIES(norm_weight_grad_columns);
  for (const Case& c : cases()) {
    for (std::size_t k = 0; k < forward.size(); ++k) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(forward[k].isa) << " " << c);
      Tensors t(c);
      const Tensors before(t);
      forward[k].function(forward_params(c, t), 0, c.rows);
      check_forward(c, t);
      backward[k].function(backward_params(c, t), 0, c.rows);
      check_backward(c, t);
      const float beta = c.bias ? 1.0f : 0.0f;
      const NormWeightGrad params = weight_params(c, t, beta);
      const int parts = static_cast<int>(std::min<std::int64_t>(c.rows, 5));
      for (int i = 0; i < parts; ++i) part[k].function(params, i, parts);
      columns[k].function(params, parts, 0, c.cols);
      check_weight_grad(c, t, before, beta);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Norm, BothGradientsInOnePassGiveTheSameBits) {
  const auto forward = TESSERA_COPIES(add_norm_forward_rows);
  const auto backward = TESSERA_COPIES(add_norm_backward_rows);
  const auto part = TESSERA_COPIES(norm_weight_grad_part);
  const auto both = TESSERA_COPIES(add_norm_gradients_part);
  for (const Case& c : cases()) {
    for (std::size_t k = 0; k < forward.size(); ++k) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(forward[k].isa) << " " << c);
      Tensors apart(c);
      forward[k].function(forward_params(c, apart), 0, c.rows);
      Tensors together(apart);
      backward[k].function(backward_params(c, apart), 0, c.rows);
      const int parts = static_cast<int>(std::min<std::int64_t>(c.rows, 3));
      for (int i = 0; i < parts; ++i) {
        part[k].function(weight_params(c, apart, 0.0f), i, parts);
        both[k].function({backward_params(c, together), weight_params(c, together, 0.0f)}, i, parts);
      }
      expect_same(together.dresidual_in, apart.dresidual_in);
      expect_same(together.dbranch, apart.dbranch);
      for (std::int64_t i = 0; i < 2 * parts * c.cols; ++i) {
        ASSERT_EQ(together.scratch.floats()[i], apart.scratch.floats()[i]) << "sum " << i;
      }
    }
  }
  for (const Case& c : {Case{37, 67}, Case{301, 130, NormKind::rms}}) {
    for (const int threads : {1, 2}) {
      Tensors apart(c);
      cpu::add_norm_forward(forward_params(c, apart), {});
      Tensors together(apart);
      cpu::add_norm_backward(backward_params(c, apart), {});
      cpu::norm_weight_grad(weight_params(c, apart, 1.0f), {});
      ASSERT_LE(cpu::norm_gradient_parts(c.rows, c.cols), kNormGradParts) << "parts of this test's scratch";
      cpu::add_norm_gradients({backward_params(c, together), weight_params(c, together, 1.0f)},
                              {.threads = threads});
      expect_same(together.dresidual_in, apart.dresidual_in);
      expect_same(together.dweight, apart.dweight);
      expect_same(together.dbias, apart.dbias);
    }
  }
}

TEST(Norm, KnownStatisticsGiveTheSameBits) {
  const auto forward = TESSERA_COPIES(add_norm_forward_rows);
  for (const Case& c : cases()) {
    for (const auto& copy : forward) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(copy.isa) << " " << c);
      Tensors first(c);
      copy.function(forward_params(c, first), 0, c.rows);
      Tensors again(first);
      again.y = Buffer(c.compute, c.rows * c.cols, 77.0);
      AddNormForward params = forward_params(c, again);
      params.known_statistics = true;
      params.residual = c.branch ? again.residual_out.data() : again.residual.data();
      params.branch = nullptr;
      params.residual_out = nullptr;
      copy.function(params, 0, c.rows);
      expect_same(again.y, first.y);
      expect_same(again.mean, first.mean);
      expect_same(again.rstd, first.rstd);
    }
  }
}

TEST(Norm, ThreadsDoNotChangeABit) {
  for (Case c : {Case{37, 67}, Case{37, 67, NormKind::rms, DType::f32, DType::bf16, true, false, 0.2f},
                 Case{1, 3}, Case{301, 1030}}) {
    SCOPED_TRACE(::testing::Message() << c);
    Tensors one(c), two(c);
    for (auto [t, threads] : {std::pair{&one, 1}, {&two, 2}}) {
      cpu::add_norm_forward(forward_params(c, *t), {.threads = threads});
      cpu::add_norm_backward(backward_params(c, *t), {.threads = threads});
      cpu::norm_weight_grad(weight_params(c, *t, 1.0f), {.threads = threads});
    }
    expect_same(one.y, two.y);
    expect_same(one.residual_out, two.residual_out);
    expect_same(one.dresidual_in, two.dresidual_in);
    expect_same(one.dbranch, two.dbranch);
    expect_same(one.dweight, two.dweight);
    expect_same(one.dbias, two.dbias);
    check_forward(c, two);
    check_weight_grad(c, two, Tensors(c), 1.0f);
  }
}

TEST(Norm, FusedEqualsDropoutKernelThenAddThenNormKernel) {
  const Case c{13, 101, NormKind::layer, DType::f32, DType::f32, true, true, 0.25f};
  Tensors fused(c), plain(c);
  cpu::add_norm_forward(forward_params(c, fused), {.threads = 2});
  cpu::dropout({.rows = c.rows,
                .cols = c.cols,
                .x = plain.branch.data(),
                .y = plain.branch.data(),
                .spec = spec_of(c)},
               {});
  for (std::int64_t i = 0; i < c.rows * c.cols; ++i) {
    plain.residual.set(
        i, static_cast<double>(static_cast<float>(plain.residual[i]) + static_cast<float>(plain.branch[i])));
  }
  Case norm_only = c;
  norm_only.branch = false;
  cpu::add_norm_forward(forward_params(norm_only, plain), {});
  expect_close(fused.residual_out, plain.residual.values(), 1e-7);
  expect_close(fused.rstd, plain.rstd.values(), 1e-6);
  expect_close(fused.y, plain.y.values(), 2e-6);
}

TEST(Norm, WorksInPlace) {
  for (auto [residual, compute] : {std::pair{DType::f32, DType::bf16},
                                   {DType::bf16, DType::bf16},
                                   {DType::f32, DType::f16},
                                   {DType::f16, DType::f16}}) {
    const Case c{5, 43, NormKind::layer, residual, compute, true, true, 0.2f};
    Tensors apart(c), in_place(c);
    cpu::add_norm_forward(forward_params(c, apart), {});
    AddNormForward forward = forward_params(c, in_place);
    forward.residual_out = in_place.residual.data();
    cpu::add_norm_forward(forward, {});
    expect_same(apart.residual_out, in_place.residual);
    expect_same(apart.y, in_place.y);
    cpu::add_norm_backward(backward_params(c, apart), {});
    AddNormBackward backward = backward_params(c, in_place);
    backward.residual_out = in_place.residual.data();
    backward.dresidual_in = in_place.dresidual.data();
    cpu::add_norm_backward(backward, {});
    expect_same(apart.dresidual_in, in_place.dresidual);
    expect_same(apart.dbranch, in_place.dbranch);
  }
}

TEST(Norm, GradientFromAboveAndToTheBranchAreOptional) {
  const Case c{6, 29};
  Tensors with(c), without(c);
  with.dresidual = Buffer(DType::f32, c.rows * c.cols, 0.0);
  for (Tensors* t : {&with, &without}) cpu::add_norm_forward(forward_params(c, *t), {});
  cpu::add_norm_backward(backward_params(c, with), {});
  AddNormBackward params = backward_params(c, without);
  params.dresidual = nullptr;
  params.dbranch = nullptr;
  cpu::add_norm_backward(params, {});
  expect_same(with.dresidual_in, without.dresidual_in);
  expect_same(with.dbranch, with.dresidual_in);
}

TEST(Norm, VarianceSurvivesALargeMean) {
  const Case c{4, 771, NormKind::layer, DType::f32, DType::f32, false, false};
  Tensors t(c);
  t.residual = Buffer::random(DType::f32, c.rows * c.cols, 9, 0.5, 1000.0);
  cpu::add_norm_forward(forward_params(c, t), {});
  for (std::int64_t r = 0; r < c.rows; ++r) {
    double mean = 0, rstd = 0;
    plain_norm(c.kind, t.residual.values().data() + r * c.cols, c.cols, &mean, &rstd);
    EXPECT_NEAR(t.rstd[r] / rstd, 1.0, 1e-5);
  }
}

}  // namespace
}  // namespace tessera::kernels
