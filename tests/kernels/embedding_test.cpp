/// Embedding lookup and its gradient against plain loops.

#include <gtest/gtest.h>

#include "kernels/cpu/vector/embedding.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;

constexpr std::int64_t kRows = 23, kVocab = 11, kPositions = 13, kVocabBegin = 5;
constexpr std::int64_t kSkipped = 10;  // an index that occurs and gives nothing
constexpr std::int64_t kCols[] = {1, 3, 16, 37, 64, 65, 130, 200};

std::vector<std::int32_t> indices(std::int64_t rows, std::int64_t first, std::int64_t count) {
  std::vector<std::int32_t> all;
  for (std::int64_t r = 0; r < rows; ++r) all.push_back(static_cast<std::int32_t>(first + r * r * 7 % count));
  return all;
}

DropoutSpec spec_of(float p) {
  return {.key = {.seed = 0x1234567890abcdefu, .site = 8, .step = 3},
          .probability = p,
          .batch = 3,
          .sample0 = 2,
          .position0 = 4,
          .seq_length = 40};
}

/// What dropout multiplies element (r, f) of cols features with, from the definition in
/// tessera/base/philox.hpp.
double mask(const DropoutSpec& spec, std::int64_t r, std::int64_t f, std::int64_t cols) {
  if (spec.probability == 0.0f) return 1.0;
  const std::int64_t sample = spec.sample0 + r % spec.batch, position = spec.position0 + r / spec.batch;
  const std::int64_t row = sample * spec.seq_length + position;
  const auto block = random_block(spec.key, static_cast<std::uint64_t>(row * ((cols + 3) / 4) + f / 4));
  return block.word[f % 4] < spec.threshold() ? 0.0 : 1.0 / (1.0 - static_cast<double>(spec.probability));
}

TEST(Embedding, Forward) {
  // Tokens 3 .. 17 against a table of 5 .. 15: some belong to another rank, on either side.
  const auto tokens = indices(kRows, 3, 15), positions = indices(kRows, 0, kPositions);
  for (const std::int64_t cols : kCols) {
    for (const DType table_dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const DType y_dtype : {DType::f32, DType::bf16, DType::f16}) {
        if (table_dtype != y_dtype && table_dtype != DType::f32 && y_dtype != DType::f32) continue;
        for (const bool with_positions : {false, true}) {
          for (const float p : {0.0f, 0.3f}) {
            SCOPED_TRACE(::testing::Message()
                         << cols << " columns, " << table_dtype << " to " << y_dtype << ", dropout " << p);
            const Buffer table = Buffer::random(table_dtype, kVocab * cols, 1);
            const Buffer position_table = Buffer::random(table_dtype, kPositions * cols, 2);
            const EmbeddingForward params{.rows = kRows,
                                          .cols = cols,
                                          .table_dtype = table_dtype,
                                          .y_dtype = y_dtype,
                                          .tokens = tokens.data(),
                                          .table = table.data(),
                                          .vocab_begin = kVocabBegin,
                                          .vocab_size = kVocab,
                                          .positions = with_positions ? positions.data() : nullptr,
                                          .position_table = with_positions ? position_table.data() : nullptr,
                                          .y = nullptr,
                                          .dropout = spec_of(p)};
            std::vector<double> want;
            for (std::int64_t r = 0; r < kRows; ++r) {
              const auto i = static_cast<std::size_t>(r);
              const std::int64_t token = tokens[i] - kVocabBegin;
              for (std::int64_t f = 0; f < cols; ++f) {
                const bool owned = token >= 0 && token < kVocab;
                double v = owned ? table[token * cols + f] : 0.0;
                if (owned && with_positions) v += position_table[positions[i] * cols + f];
                want.push_back(v * mask(params.dropout, r, f, cols));
              }
            }
            for (const int threads : {1, 2}) {
              Buffer y(y_dtype, kRows * cols);
              EmbeddingForward call = params;
              call.y = y.data();
              cpu::embedding_forward(call, {.threads = threads});
              expect_close(y, want, 3e-7);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(Embedding, Backward) {
  const auto tokens = indices(kRows, 3, 15);
  for (const std::int64_t cols : kCols) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const float beta : {0.0f, 1.0f}) {
        for (const float p : {0.0f, 0.3f}) {
          SCOPED_TRACE(::testing::Message()
                       << cols << " columns of " << dtype << ", beta " << beta << ", dropout " << p);
          const Buffer dy = Buffer::random(dtype, kRows * cols, 3);
          Buffer before = Buffer::random(DType::f32, kVocab * cols, 4);
          if (beta == 0.0f) before.set(0, std::nan(""));
          const DropoutSpec dropout = spec_of(p);
          std::vector<double> want(static_cast<std::size_t>(kVocab * cols));
          for (std::int64_t i = 0; i < kVocab * cols; ++i)
            want[static_cast<std::size_t>(i)] = beta == 0.0f ? 0.0 : before[i];
          for (std::int64_t r = 0; r < kRows; ++r) {
            const std::int64_t token = tokens[static_cast<std::size_t>(r)] - kVocabBegin;
            if (token < 0 || token >= kVocab || token + kVocabBegin == kSkipped) continue;
            for (std::int64_t f = 0; f < cols; ++f) {
              want[static_cast<std::size_t>(token * cols + f)] +=
                  dy[r * cols + f] * mask(dropout, r, f, cols);
            }
          }
          Buffer results[2] = {before, before};
          for (const int threads : {1, 2}) {
            Buffer& dtable = results[threads - 1];
            cpu::embedding_backward({.rows = kRows,
                                     .cols = cols,
                                     .dy_dtype = dtype,
                                     .dy = dy.data(),
                                     .index = tokens.data(),
                                     .begin = kVocabBegin,
                                     .count = kVocab,
                                     .dtable = dtable.floats(),
                                     .skip = kSkipped,
                                     .beta = beta,
                                     .dropout = dropout},
                                    {.threads = threads});
            expect_close(dtable, want, 1e-6);
            if (HasFatalFailure()) return;
          }
          expect_same(results[0], results[1]);
        }
      }
    }
  }
}

TEST(Embedding, EveryCopyOfBackward) {
  const std::int64_t cols = 131;
  const auto tokens = indices(kRows, 0, kVocab);
  const Buffer dy = Buffer::random(DType::f32, kRows * cols, 3);
  const DropoutSpec dropout = spec_of(0.4f);
  std::vector<double> want(static_cast<std::size_t>(kVocab * cols));
  for (std::int64_t i = 0; i < kRows * cols; ++i) {
    const std::int64_t r = i / cols, f = i % cols;
    want[static_cast<std::size_t>(tokens[static_cast<std::size_t>(r)] * cols + f)] +=
        dy[i] * mask(dropout, r, f, cols);
  }
  for (auto [isa, columns] : TESSERA_COPIES(embedding_backward_columns)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    Buffer dtable(DType::f32, kVocab * cols);
    const EmbeddingBackward params{.rows = kRows,
                                   .cols = cols,
                                   .dy = dy.data(),
                                   .index = tokens.data(),
                                   .count = kVocab,
                                   .dtable = dtable.floats(),
                                   .beta = 1.0f,
                                   .dropout = dropout};
    columns(params, 0, 64);
    columns(params, 64, cols);
    expect_close(dtable, want, 1e-6);
  }
}

}  // namespace
}  // namespace tessera::kernels
