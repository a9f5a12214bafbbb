/// Cross-entropy against its definition in double.

#include <gtest/gtest.h>

#include <limits>

#include "kernels/cpu/vector/cross_entropy.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_same;

constexpr std::int64_t kSizes[] = {1, 2, 15, 16, 17, 64, 65, 211, 2048, 2049, 4097};

struct Problem {
  std::int64_t rows, cols, ld;
  Buffer logits;
  std::vector<std::int32_t> labels;

  Problem(std::int64_t rows, std::int64_t cols, std::int64_t ld, DType dtype, double spread)
      : rows(rows), cols(cols), ld(ld), logits(Buffer::random(dtype, rows * ld, 5, spread)) {
    for (std::int64_t r = 0; r < rows; ++r) {
      labels.push_back(r % 3 == 2 ? -100 : static_cast<std::int32_t>((r * 7919 + cols - 1) % cols));
      for (std::int64_t j = cols; j < ld; ++j) logits.set(r * ld + j, 1e5);  // padding that must not count
    }
  }

  double lse(std::int64_t r) const {
    double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (std::int64_t j = 0; j < cols; ++j) top = std::max(top, logits[r * ld + j]);
    for (std::int64_t j = 0; j < cols; ++j) sum += std::exp(logits[r * ld + j] - top);
    return top + std::log(sum);
  }
};

struct Result {
  Buffer loss, lse, gradient;
  Buffer upstream;
};

Result run(const Problem& p, int threads) {
  Result out{Buffer(DType::f32, p.rows), Buffer(DType::f32, p.rows), p.logits,
             Buffer::random(DType::f32, p.rows, 6)};
  cpu::cross_entropy_forward({.rows = p.rows,
                              .cols = p.cols,
                              .ld = p.ld,
                              .dtype = p.logits.dtype(),
                              .logits = p.logits.data(),
                              .labels = p.labels.data(),
                              .loss = out.loss.floats(),
                              .lse = out.lse.floats()},
                             {.threads = threads});
  cpu::cross_entropy_backward({.rows = p.rows,
                               .cols = p.cols,
                               .ld = p.ld,
                               .dtype = p.logits.dtype(),
                               .logits = out.gradient.data(),
                               .labels = p.labels.data(),
                               .lse = out.lse.floats(),
                               .upstream = out.upstream.floats()},
                              {.threads = threads});
  return out;
}

void check(const Problem& p, const Result& got) {
  const double unit = testing::rounding_of(p.logits.dtype());
  const double smallest = p.logits.dtype() == DType::f16 ? 0x1p-25 : 0.0;  // half of the least float16
  for (std::int64_t r = 0; r < p.rows; ++r) {
    const double lse = p.lse(r);
    const std::int32_t label = p.labels[static_cast<std::size_t>(r)];
    const double loss = label == -100 ? 0.0 : lse - p.logits[r * p.ld + label];
    ASSERT_NEAR(got.lse[r], lse, 3e-7 * (1.0 + std::fabs(lse))) << "row " << r;
    ASSERT_NEAR(got.loss[r], loss, 3e-7 * (1.0 + std::fabs(loss))) << "row " << r;
    for (std::int64_t j = 0; j < p.ld; ++j) {
      double want = 0.0, probability = 0.0;
      if (label != -100 && j < p.cols) {
        probability = std::exp(p.logits[r * p.ld + j] - lse);
        want = got.upstream[r] * (probability - (j == label ? 1.0 : 0.0));
      }
      // The saved lse is a float: its rounding moves every probability by that much.
      const double moved = std::fabs(got.upstream[r]) * probability * (1e-6 + 1e-7 * std::fabs(lse));
      const double allowed = moved + (3e-7 + unit) * std::fabs(want) + smallest;
      ASSERT_NEAR(got.gradient[r * p.ld + j], want, allowed) << "row " << r << " column " << j;
    }
  }
}

TEST(CrossEntropy, LossAndGradient) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t cols : kSizes) {
      for (const std::int64_t pad : {0, 7}) {
        SCOPED_TRACE(::testing::Message() << cols << " + " << pad << " columns of " << dtype);
        const Problem p(5, cols, cols + pad, dtype, 8.0);
        const Result one = run(p, 1), two = run(p, 2);
        check(p, one);
        if (HasFatalFailure()) return;
        expect_same(one.loss, two.loss);
        expect_same(one.gradient, two.gradient);
      }
    }
  }
}

/// The same by parts of the vocabulary, as ranks hold them: each with a copy of its columns.
Result run_parts(const Problem& p, const std::vector<std::int64_t>& ends, int threads) {
  const auto parts = static_cast<std::int64_t>(ends.size());
  Result out{Buffer(DType::f32, p.rows), Buffer(DType::f32, p.rows), p.logits,
             Buffer::random(DType::f32, p.rows, 6)};
  std::vector<float> partial(static_cast<std::size_t>(2 * parts * p.rows));
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < parts; ++i) {
    float* const own = partial.data() + 2 * i * p.rows;
    const std::size_t unit = size_of(p.logits.dtype());
    cpu::cross_entropy_forward({.rows = p.rows,
                                .cols = ends[static_cast<std::size_t>(i)] - begin,
                                .ld = p.ld,
                                .dtype = p.logits.dtype(),
                                .logits = static_cast<const std::byte*>(p.logits.data()) + unit * begin,
                                .labels = p.labels.data(),
                                .loss = own,
                                .lse = own + p.rows,
                                .vocab_begin = begin},
                               {.threads = threads});
    begin = ends[static_cast<std::size_t>(i)];
  }
  cpu::cross_entropy_combine(
      {p.rows, parts, partial.data(), p.labels.data(), out.loss.floats(), out.lse.floats()},
      {.threads = threads});
  begin = 0;
  for (const std::int64_t end : ends) {
    Buffer columns(p.logits.dtype(), p.rows * (end - begin));
    for (std::int64_t r = 0; r < p.rows; ++r) {
      for (std::int64_t j = begin; j < end; ++j)
        columns.set(r * (end - begin) + j - begin, p.logits[r * p.ld + j]);
    }
    cpu::cross_entropy_backward({.rows = p.rows,
                                 .cols = end - begin,
                                 .ld = end - begin,
                                 .dtype = p.logits.dtype(),
                                 .logits = columns.data(),
                                 .labels = p.labels.data(),
                                 .lse = out.lse.floats(),
                                 .upstream = out.upstream.floats(),
                                 .vocab_begin = begin},
                                {.threads = threads});
    for (std::int64_t r = 0; r < p.rows; ++r) {
      for (std::int64_t j = begin; j < end; ++j)
        out.gradient.set(r * p.ld + j, columns[r * (end - begin) + j - begin]);
    }
    begin = end;
  }
  return out;
}

TEST(CrossEntropy, PartsOfTheVocabularyMakeTheWhole) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t cols : {3, 16, 65, 211, 2049}) {
      for (const double spread : {1.0, 8.0}) {
        SCOPED_TRACE(::testing::Message() << cols << " columns of " << dtype << ", spread " << spread);
        const Problem p(7, cols, cols, dtype, spread);
        check(p, run_parts(p, {cols / 3, cols / 3 + 1, cols}, 1));
        if (HasFatalFailure()) return;
        const Result one = run_parts(p, {cols / 2, cols}, 1), two = run_parts(p, {cols / 2, cols}, 2);
        check(p, one);
        expect_same(one.loss, two.loss);
        expect_same(one.gradient, two.gradient);
      }
    }
  }
}

TEST(CrossEntropy, EveryCopy) {
  const Problem p(4, 2100, 2103, DType::f32, 8.0);
  for (auto [isa, forward] : TESSERA_COPIES(cross_entropy_forward_rows)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    Buffer loss(DType::f32, 4), lse(DType::f32, 4);
    forward({.rows = 4,
             .cols = p.cols,
             .ld = p.ld,
             .logits = p.logits.data(),
             .labels = p.labels.data(),
             .loss = loss.floats(),
             .lse = lse.floats()},
            0, 4);
    for (std::int64_t r = 0; r < 4; ++r) ASSERT_NEAR(lse[r], p.lse(r), 3e-6);
  }
  for (auto [isa, backward] : TESSERA_COPIES(cross_entropy_backward_rows)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    Result got = run(p, 1);
    got.gradient = p.logits;
    backward({.rows = 4,
              .cols = p.cols,
              .ld = p.ld,
              .logits = got.gradient.data(),
              .labels = p.labels.data(),
              .lse = got.lse.floats(),
              .upstream = got.upstream.floats()},
             0, 4);
    check(p, got);
    if (HasFatalFailure()) return;
  }
}

TEST(CrossEntropy, ExtremeLogits) {
  const std::int64_t cols = 2500;
  const double infinity = std::numeric_limits<double>::infinity();
  struct Row {
    double fill, peak;  // the label's logit is `peak`
    double loss;
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const double huge = dtype == DType::f16 ? 6e4 : 1e30;
    const Row rows[] = {
        {0.0, huge, 0.0},
        {-huge, huge, 0.0},
        {huge, huge, std::log(2500.0)},
        {-infinity, 3.0, 0.0},
        {-huge, -huge, std::log(2500.0)},
        {-infinity, -huge, 0.0},
    };
    for (const Row& row : rows) {
      for (const std::int32_t label : {0, 1777, 2499}) {
        SCOPED_TRACE(::testing::Message()
                     << row.fill << " and " << row.peak << " at " << label << " in " << dtype);
        Problem p(1, cols, cols, dtype, 1.0);
        for (std::int64_t j = 0; j < cols; ++j) p.logits.set(j, j == label ? row.peak : row.fill);
        p.labels = {label};
        const Result got = run(p, 1);
        ASSERT_NEAR(got.loss[0], row.loss, 1e-5);
        for (std::int64_t j = 0; j < cols; ++j) ASSERT_TRUE(std::isfinite(got.gradient[j])) << j;
      }
    }
  }
}

// A run that has diverged must be seen in its loss.
TEST(CrossEntropy, NanReachesTheLoss) {
  for (const std::int64_t where : {0, 100, 2400}) {
    Problem p(1, 2500, 2500, DType::f32, 1.0);
    p.logits.set(where, std::nan(""));
    p.labels = {7};
    EXPECT_TRUE(std::isnan(run(p, 1).loss[0])) << where;
  }
}

}  // namespace
}  // namespace tessera::kernels
