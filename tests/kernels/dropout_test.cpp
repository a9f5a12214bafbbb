/// Dropout against its definition in tessera/base/philox.hpp, word by word.

#include <gtest/gtest.h>

#include "kernels/cpu/vector/dropout.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;

DropoutSpec spec_of(float p, std::int64_t batch) {
  return {.key = {.seed = 0xabcdef0123456789u, .site = 4, .step = 9},
          .probability = p,
          .batch = batch,
          .sample0 = 3,
          .position0 = 2,
          .seq_length = 50};
}

std::vector<double> reference(const Buffer& x, std::int64_t rows, std::int64_t cols,
                              const DropoutSpec& spec) {
  std::vector<double> y;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t sample = spec.sample0 + r % spec.batch, position = spec.position0 + r / spec.batch;
    const std::int64_t row = sample * spec.seq_length + position;
    for (std::int64_t f = 0; f < cols; ++f) {
      const auto block = random_block(spec.key, static_cast<std::uint64_t>(row * ((cols + 3) / 4) + f / 4));
      const bool dropped = block.word[f % 4] < spec.threshold();
      y.push_back(dropped ? 0.0 : x[r * cols + f] / (1.0 - static_cast<double>(spec.probability)));
    }
  }
  return y;
}

TEST(Dropout, EveryCopyFollowsTheDefinition) {
  for (std::int64_t cols : {1, 3, 4, 15, 16, 64, 65, 127, 129, 200}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::int64_t rows = 7;
      const DropoutSpec spec = spec_of(0.4f, 3);
      const Buffer x = Buffer::random(dtype, rows * cols, 1);
      for (auto [isa, function] : TESSERA_COPIES(dropout_rows)) {
        SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << ", " << cols << " columns of " << dtype);
        Buffer y(dtype, rows * cols);
        function({.rows = rows, .cols = cols, .dtype = dtype, .x = x.data(), .y = y.data(), .spec = spec}, 0,
                 rows);
        expect_close(y, reference(x, rows, cols, spec), 3e-7);
      }
    }
  }
}

TEST(Dropout, PiecesOfABatchDropTheSameElements) {
  // 6 positions of 4 samples at once, then position by position and sample by sample.
  const std::int64_t positions = 6, samples = 4, cols = 37;
  const Buffer x = Buffer::random(DType::f32, positions * samples * cols, 2);
  Buffer whole(DType::f32, x.size());
  DropoutSpec spec = spec_of(0.5f, samples);
  cpu::dropout({.rows = positions * samples, .cols = cols, .x = x.data(), .y = whole.data(), .spec = spec},
               {.threads = 2});
  for (std::int64_t s = 0; s < samples; ++s) {
    for (std::int64_t position = 0; position < positions; ++position) {
      DropoutSpec piece = spec;
      piece.batch = 1;
      piece.sample0 = spec.sample0 + s;
      piece.position0 = spec.position0 + position;
      Buffer in(DType::f32, cols), out(DType::f32, cols);
      const std::int64_t at = (position * samples + s) * cols;
      for (std::int64_t f = 0; f < cols; ++f) in.set(f, x[at + f]);
      cpu::dropout({.rows = 1, .cols = cols, .x = in.data(), .y = out.data(), .spec = piece}, {});
      for (std::int64_t f = 0; f < cols; ++f)
        ASSERT_EQ(out[f], whole[at + f]) << "sample " << s << " position " << position;
    }
  }
}

TEST(Dropout, DropsTheShareAskedFor) {
  const std::int64_t rows = 300, cols = 333;
  for (float p : {0.1f, 0.5f, 0.9f}) {
    const Buffer x(DType::f32, rows * cols, 1.0);
    Buffer y(DType::f32, rows * cols);
    DropoutSpec spec = spec_of(p, 1);
    spec.seq_length = rows + 2;
    cpu::dropout({.rows = rows, .cols = cols, .x = x.data(), .y = y.data(), .spec = spec}, {.threads = 2});
    double kept = 0;
    for (std::int64_t i = 0; i < y.size(); ++i) kept += y[i] != 0.0;
    const double n = static_cast<double>(y.size());
    EXPECT_NEAR(kept / n, 1.0 - static_cast<double>(p), 5 * std::sqrt(0.25 / n));
  }
}

TEST(Dropout, InPlaceAndInactive) {
  const std::int64_t rows = 9, cols = 21;
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Buffer x = Buffer::random(dtype, rows * cols, 3);
    const Buffer before(x);
    Buffer y(dtype, rows * cols);
    Dropout params{
        .rows = rows, .cols = cols, .dtype = dtype, .x = x.data(), .y = y.data(), .spec = spec_of(0.3f, 2)};
    cpu::dropout(params, {});
    params.y = x.data();
    cpu::dropout(params, {.threads = 2});
    expect_same(x, y);
    params.x = before.data();
    params.spec.probability = 0.0f;
    cpu::dropout(params, {.threads = 2});
    expect_same(x, before);
  }
}

}  // namespace
}  // namespace tessera::kernels
