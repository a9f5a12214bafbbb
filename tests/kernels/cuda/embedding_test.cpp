/// The CUDA embedding against the CPU's.

#include "kernels/api/embedding.hpp"

#include "tests/kernels/cuda/row_values.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::random_values;
using test::Twin;

DropoutSpec spec_of(float p) {
  return {.key = {.seed = 0x1234567890abcdefu, .site = 8, .step = 3},
          .probability = p,
          .batch = 3,
          .sample0 = 2,
          .position0 = 4,
          .seq_length = 40};
}

/// Random in [first, first + count); `hot` of four are the first.
std::vector<std::int32_t> indices(std::int64_t rows, std::int64_t first, std::int64_t count, int hot = 0) {
  std::vector<std::int32_t> all;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto block = random_block({.seed = 3, .site = 4}, static_cast<std::uint64_t>(r));
    const auto any = static_cast<std::int64_t>(block.word[0]) % count;
    all.push_back(static_cast<std::int32_t>(first + (static_cast<int>(block.word[1] % 4) < hot ? 0 : any)));
  }
  return all;
}

constexpr std::int64_t kVocabBegin = 5, kVocab = 40, kPositions = 13;

template <typename T, typename Y>
void forward(std::int64_t rows, std::int64_t cols, bool with_positions, float p, std::size_t offset = 0) {
  SCOPED_TRACE(::testing::Message() << rows << "x" << cols << " " << dtype_of<T>::value << " to "
                                    << dtype_of<Y>::value << (with_positions ? " positions" : "")
                                    << " p=" << p << " offset " << offset);
  const DeviceStream stream;
  const Twin<std::int32_t> tokens(stream, indices(rows, kVocabBegin - 3, kVocab + 6));  // some of other ranks
  const Twin<std::int32_t> positions(stream, indices(rows, 0, kPositions));
  const Twin<T> table(stream, random_values<T>(kVocab * cols, 1), offset);
  const Twin<T> position_table(stream, random_values<T>(kPositions * cols, 2), offset);
  Twin<Y> y(stream, random_values<Y>(rows * cols, 3), offset);
  EmbeddingForward params{.rows = rows,
                          .cols = cols,
                          .table_dtype = dtype_of<T>::value,
                          .y_dtype = dtype_of<Y>::value,
                          .tokens = tokens.host.data(),
                          .table = table.host.data(),
                          .vocab_begin = kVocabBegin,
                          .vocab_size = kVocab,
                          .positions = with_positions ? positions.host.data() : nullptr,
                          .position_table = with_positions ? position_table.host.data() : nullptr,
                          .y = y.host.data(),
                          .dropout = spec_of(p)};
  cpu::embedding_forward(params, {});
  params.tokens = tokens.device.data();
  params.table = table.device.data();
  params.y = y.device.data();
  if (with_positions) {
    params.positions = positions.device.data();
    params.position_table = position_table.device.data();
  }
  cuda::embedding_forward(params, stream.launch());
  // A sum is scaled after it: one rounding each, that either side could contract alike or not.
  expect_close(y, 3e-7f, "y");
}

TEST(CudaEmbedding, Forward) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {1, 3, 31, 33, 257, 768, 1600, 4096, 5120}) {
    for (const bool with_positions : {false, true}) {
      for (const float p : {0.0f, 0.3f}) {
        forward<float, float>(7, cols, with_positions, p);
        forward<float, bfloat16>(7, cols, with_positions, p);
        forward<bfloat16, bfloat16>(7, cols, with_positions, p);
        if (HasFatalFailure()) return;
      }
    }
  }
  for (const std::int64_t rows : {0, 1, 300}) forward<bfloat16, float>(rows, 48, true, 0.2f);
  for (const std::size_t offset : {1, 2, 4}) forward<bfloat16, bfloat16>(9, 64, true, 0.2f, offset);
  forward<float16, float16>(9, 72, true, 0.2f);
  forward<float, float16>(9, 72, true, 0.2f);
}

struct Gradient {
  std::int64_t rows, cols, begin, count;
  float beta = 0.0f, dropout = 0.0f;
  std::size_t offset = 0;
  std::int64_t skip = -1;
};

template <typename T>
void backward(const Gradient& c, const std::vector<std::int32_t>& indices) {
  SCOPED_TRACE(::testing::Message() << c.rows << "x" << c.cols << " " << dtype_of<T>::value << " into "
                                    << c.count << " from " << c.begin << " beta=" << c.beta
                                    << " p=" << c.dropout << " offset " << c.offset << " skip " << c.skip);
  const DeviceStream stream;
  const Twin<std::int32_t> index(stream, indices);
  const Twin<T> dy(stream, random_values<T>(c.rows * c.cols, 1), c.offset);
  auto before = random_values<float>(c.count * c.cols, 2);
  if (c.beta == 0.0f) before.assign(before.size(), NAN);
  Twin<float> dtable(stream, before, c.offset);
  EmbeddingBackward params{.rows = c.rows,
                           .cols = c.cols,
                           .dy_dtype = dtype_of<T>::value,
                           .dy = dy.host.data(),
                           .index = index.host.data(),
                           .begin = c.begin,
                           .count = c.count,
                           .dtable = dtable.host.data(),
                           .skip = c.skip,
                           .beta = c.beta,
                           .dropout = spec_of(c.dropout)};
  cpu::embedding_backward(params, {});
  params.dy = dy.device.data();
  params.index = index.device.data();
  params.dtable = dtable.device.data();
  cuda::embedding_backward(params, stream.launch());
  if (c.dropout == 0.0f) {  // the same sums in the same order
    expect_same_bits(dtable.device.host(), dtable.host, "dtable");
  } else {  // a multiplication and an addition may be one instruction or two
    expect_close(dtable, 1e-6f * std::sqrt(static_cast<float>(c.rows)), "dtable");
  }
}

TEST(CudaEmbedding, BackwardAtAllWidths) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {1, 3, 31, 33, 257, 768, 1600, 4096, 5120}) {
    for (const float beta : {0.0f, 1.0f}) {
      for (const float p : {0.0f, 0.3f}) {
        const Gradient c{70, cols, 5, 11, beta, p};
        const Gradient passed_over{70, cols, 5, 11, beta, p, 0, 9};
        backward<float>(c, indices(c.rows, 2, 17));
        backward<float>(passed_over, indices(c.rows, 2, 17));
        backward<bfloat16>(c, indices(c.rows, 2, 17, 2));
        if (HasFatalFailure()) return;
      }
    }
  }
  backward<float16>({70, 40, 5, 11, 0.0f, 0.3f}, indices(70, 2, 17));
}

TEST(CudaEmbedding, BackwardAtAnyNumberOfRows) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t rows : {0, 1, 7, 300, 1023, 1025}) {
    for (const std::int64_t count : {1, 2, 300, 50257}) {
      backward<bfloat16>({rows, 5, 0, count}, indices(rows, 0, count));
      backward<float>({rows, 4, 100, count, 1.0f}, indices(rows, 90, count + 20));
      if (HasFatalFailure()) return;
    }
  }
}

// The list in shared memory fills several times.
TEST(CudaEmbedding, BackwardOfAFrequentToken) {
  SKIP_WITHOUT_CUDA();
  for (const int hot : {1, 3, 4}) {
    backward<bfloat16>({7000, 4, 0, 500, 1.0f}, indices(7000, 0, 500, hot));
    backward<float>({7000, 3, 0, 500, 0.0f}, indices(7000, 0, 500, hot));
  }
}

// Sorted, each as often as there are samples.
TEST(CudaEmbedding, BackwardOfPositions) {
  SKIP_WITHOUT_CUDA();
  std::vector<std::int32_t> positions;
  for (std::int32_t position = 0; position < 128; ++position) positions.insert(positions.end(), 9, position);
  backward<bfloat16>({128 * 9, 36, 0, 200, 0.0f}, positions);
  backward<float>({128 * 9, 36, 0, 200, 1.0f, 0.1f}, positions);
}

TEST(CudaEmbedding, BackwardOfMisalignedRows) {
  SKIP_WITHOUT_CUDA();
  for (const std::size_t offset : {1, 2, 4}) {
    backward<bfloat16>({40, 64, 0, 20, 1.0f, 0.1f, offset}, indices(40, 0, 20));
    backward<float>({40, 64, 0, 20, 1.0f, 0.0f, offset}, indices(40, 0, 20));
  }
}

}  // namespace
}  // namespace tessera::kernels
