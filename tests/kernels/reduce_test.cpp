/// Reductions against sums in double.

#include <gtest/gtest.h>

#include "kernels/cpu/vector/reduce.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;

TEST(Reduce, ColumnSum) {
  for (const std::int64_t rows : {1, 2, 7, 64, 509, 1031}) {
    for (const std::int64_t cols : {1, 5, 16, 67, 128, 131, 300}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const float beta : {0.0f, 1.0f}) {
          const std::int64_t ld = cols + rows % 3;
          SCOPED_TRACE(::testing::Message() << rows << " x " << cols << " of " << dtype << ", beta " << beta);
          const Buffer x = Buffer::random(dtype, rows * ld, 1);
          Buffer before = Buffer::random(DType::f32, cols, 2);
          if (beta == 0.0f) before.set(0, std::nan(""));
          std::vector<double> want;
          for (std::int64_t c = 0; c < cols; ++c) {
            double total = beta == 0.0f ? 0.0 : before[c];
            for (std::int64_t r = 0; r < rows; ++r) total += x[r * ld + c];
            want.push_back(total);
          }
          Buffer results[2] = {before, before};
          for (const int threads : {1, 2}) {
            Buffer scratch(DType::f32, kReduceParts * cols, std::nan(""));
            cpu::column_sum({.rows = rows,
                             .cols = cols,
                             .ld = ld,
                             .dtype = dtype,
                             .x = x.data(),
                             .out = results[threads - 1].floats(),
                             .beta = beta,
                             .scratch = scratch.floats()},
                            {.threads = threads});
            expect_close(results[threads - 1], want, 1e-5);
            if (HasFatalFailure()) return;
          }
          expect_same(results[0], results[1]);
        }
      }
    }
  }
}

TEST(Reduce, Sum) {
  for (const std::int64_t n : {0, 1, 2, 15, 16, 17, 63, 65, 4095, 8191, 300007}) {
    Buffer x = Buffer::random(DType::f32, n, 3);
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) sum += x[i];
    double sums[2];
    for (const int threads : {1, 2}) {
      double scratch[kSumParts];
      cpu::sum({.n = n, .x = x.floats(), .out = &sums[threads - 1], .scratch = scratch},
               {.threads = threads});
    }
    EXPECT_NEAR(sums[0], sum, 1e-9) << n;
    EXPECT_EQ(sums[0], sums[1]) << n;
  }
}

TEST(Reduce, SumOfSquaresOfRuns) {
  Buffer x = Buffer::random(DType::f32, 400000, 3);
  // Runs of all lengths, apart from each other: few, and more than there are parts.
  for (const std::int64_t many : {0, 1, 5, 200}) {
    std::vector<SumRun> runs;
    double squares = 0.0;
    std::int64_t begin = 1;
    for (std::int64_t i = 0; i < many; ++i) {
      const std::int64_t count = many == 200 ? 7 * i : 1 + 4099 * i;
      runs.push_back({begin, count});
      for (std::int64_t j = begin; j < begin + count; ++j) squares += x[j] * x[j];
      begin += count + 3 + i;
    }
    ASSERT_LE(begin, x.size());
    double totals[2] = {10.0, 10.0};  // it adds to what is there
    for (const int threads : {1, 2}) {
      double scratch[kSumParts];
      cpu::sum_squares({.num_runs = many,
                        .runs = runs.data(),
                        .x = x.floats(),
                        .out = &totals[threads - 1],
                        .scratch = scratch},
                       {.threads = threads});
    }
    EXPECT_NEAR(totals[0], 10.0 + squares, 1e-12 * (10.0 + squares)) << many;
    EXPECT_EQ(totals[0], totals[1]) << many;
  }
}

TEST(Reduce, SquaresBeyondTheRangeOfFloat) {
  Buffer x(DType::f32, 100, 1e30);
  double total = 0.0, scratch[kSumParts];
  const SumRun all{0, 100};
  cpu::sum_squares({.num_runs = 1, .runs = &all, .x = x.floats(), .out = &total, .scratch = scratch}, {});
  EXPECT_NEAR(total, 1e62, 1e56);
}

TEST(Reduce, EveryCopy) {
  Buffer x = Buffer::random(DType::f32, 1003, 4);
  double sum = 0.0;
  for (std::int64_t i = 0; i < x.size(); ++i) sum += x[i];
  for (auto [isa, function] : TESSERA_COPIES(sum_range)) {
    EXPECT_NEAR(function(x.floats(), x.size()), sum, 1e-10) << cpu::isa_name(isa);
  }
  for (auto [isa, function] : TESSERA_COPIES(column_sum_rows)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    const std::int64_t cols = 177;  // 5 rows of it
    Buffer out(DType::f32, cols);
    function({.rows = 5, .cols = cols, .ld = cols, .x = x.data()}, 1, 4, out.floats());
    std::vector<double> want;
    for (std::int64_t c = 0; c < cols; ++c) want.push_back(x[cols + c] + x[2 * cols + c] + x[3 * cols + c]);
    expect_close(out, want, 1e-6);
  }
}

}  // namespace
}  // namespace tessera::kernels
