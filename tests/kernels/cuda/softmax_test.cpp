/// The softmax kernels of attention alone, on a block in the middle of a larger problem. Scores that no query
/// sees, and the padding of rows, are NaN: what reads them shows.

#include "kernels/cuda/softmax.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "tests/kernels/cuda/compare.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// What the rows of a block should become.
struct Expected {
  std::vector<double> p, ds;  ///< [rows, keys]
  std::vector<double> lse;    ///< of every query
};

template <typename T>
struct Problem {
  AttentionShape shape;
  cuda::ScoreBlock block;
  std::vector<float> slopes, scores, gradients;
  std::vector<std::int32_t> key_begin, key_end, documents;
  std::vector<T> o, d_o;
  Expected expected;

  Problem(std::int64_t keys, float dropout) {
    shape.batch = 3, shape.seq_q = 7, shape.seq_k = keys + 9;
    shape.heads = 8, shape.kv_heads = 2, shape.head_dim = 19;
    shape.dtype = dtype_of<T>::value;
    shape.o_stride = {3 * 8 * 20, 8 * 20, 20};
    shape.query_offset = keys - 6;  // the last query of the block sees the last key
    shape.dropout = dropout;
    shape.dropout_key = {77, 5, 3};
    shape.sample0 = std::int64_t{1} << 34, shape.head0 = 2, shape.total_heads = 11;
    shape.seq_length = shape.seq_k + 8;
    block = {.batch0 = 1, .batch = 2, .kv0 = 1, .kv = 1, .member0 = 1, .members = 2, .row0 = 2, .rows = 4};
    block.keys = keys, block.row_stride = (keys + 7) / 8 * 8 + 8;
    for (int h = 0; h < 8; ++h) slopes.push_back(h == 5 ? 0.0f : 2.0f / static_cast<float>(keys + h));
    key_begin = {0, 0, static_cast<std::int32_t>(keys / 3)};
    key_end = {0, static_cast<std::int32_t>(keys - 1), static_cast<std::int32_t>(keys + 20)};
    for (int b = 0; b < 3; ++b) {
      for (std::int64_t j = 0; j < shape.seq_k; ++j)
        documents.push_back(j < keys / 5 ? 1 : j == keys - 2 ? 4 : j > keys - 2 ? 6 : 3);
    }
    std::mt19937 engine(static_cast<unsigned>(keys));
    std::uniform_real_distribution<float> next(-4.0f, 4.0f);
    const auto n = static_cast<std::size_t>(rows() * block.row_stride);
    scores.assign(n, kNan), gradients.assign(n, kNan);
    for (std::int64_t i = 0; i < shape.seq_q * shape.o_stride.seq; ++i) {
      o.push_back(T(next(engine)));
      d_o.push_back(T(next(engine)));
    }
    expected.lse.assign(static_cast<std::size_t>(shape.batch * shape.heads * shape.seq_q), 12345.0);
    expected.p.assign(static_cast<std::size_t>(rows() * keys), 0.0);
    expected.ds = expected.p;
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t j = 0; j < keys; ++j) {
        if (!sees(r, j)) continue;
        score(r, j) = next(engine);
        gradients[static_cast<std::size_t>(r * block.row_stride + j)] = next(engine);
      }
      expect_row(r);
    }
  }

  std::int64_t rows() const { return block.matrices() * block.rows; }
  std::int64_t batch(std::int64_t r) const { return 1 + r / 8; }
  std::int64_t head(std::int64_t r) const { return 5 + r / 4 % 2; }
  std::int64_t query(std::int64_t r) const { return 2 + r % 4; }
  float& score(std::int64_t r, std::int64_t j) {
    return scores[static_cast<std::size_t>(r * block.row_stride + j)];
  }
  bool sees(std::int64_t r, std::int64_t j) const {
    const std::int64_t position = query(r) + shape.query_offset;
    const std::int32_t* document = documents.data() + batch(r) * shape.seq_k;
    const auto b = static_cast<std::size_t>(batch(r));
    return j <= position && j >= key_begin[b] && j < key_end[b] && document[j] == document[position];
  }
  bool kept(std::int64_t r, std::int64_t j) const {
    const auto row = static_cast<std::uint64_t>(
        ((shape.sample0 + batch(r)) * shape.total_heads + shape.head0 + head(r)) * shape.seq_length +
        query(r) + shape.query_offset);
    const auto blocks = static_cast<std::uint64_t>((shape.seq_length + 3) / 4);
    const PhiloxBlock random =
        random_block(shape.dropout_key, row * blocks + static_cast<std::uint64_t>(j / 4));
    return random.word[j % 4] >= DropoutSpec{shape.dropout_key, shape.dropout}.threshold();
  }

  void expect_row(std::int64_t r) {
    const std::int64_t position = query(r) + shape.query_offset;
    const double slope = static_cast<double>(slopes[static_cast<std::size_t>(head(r))]) / std::log(2.0);
    const auto biased = [&](std::int64_t j) {
      return static_cast<double>(score(r, j)) + slope * static_cast<double>(j - position);
    };
    double sum = 0.0, delta = 0.0;
    for (std::int64_t j = 0; j < block.keys; ++j) sum += sees(r, j) ? std::exp2(biased(j)) : 0.0;
    const std::int64_t at = query(r) * shape.o_stride.seq + batch(r) * shape.o_stride.batch + head(r) * 20;
    for (std::int64_t c = at; c < at + shape.head_dim; ++c) {
      delta += static_cast<double>(static_cast<float>(o[static_cast<std::size_t>(c)])) *
               static_cast<float>(d_o[static_cast<std::size_t>(c)]);
    }
    expected.lse[static_cast<std::size_t>((batch(r) * 8 + head(r)) * 7 + query(r))] = std::log(sum);
    for (std::int64_t j = 0; j < block.keys; ++j) {
      if (!sees(r, j)) continue;
      const auto i = static_cast<std::size_t>(r * block.keys + j);
      const double p = std::exp2(biased(j)) / sum, keep = kept(r, j) ? 1.0 : 0.0;
      const double gradient = gradients[static_cast<std::size_t>(r * block.row_stride + j)];
      expected.p[i] = p * keep;
      expected.ds[i] = p * (gradient * keep / (1.0 - static_cast<double>(shape.dropout)) - delta);
    }
  }

  /// Rows of T as the kernels leave them in an array of floats.
  void expect_rows(const std::vector<float>& actual, const std::vector<double>& wanted,
                   double tolerance) const {
    for (std::int64_t r = 0; r < rows(); ++r) {
      const auto* row = reinterpret_cast<const unsigned char*>(actual.data() + r * block.row_stride);
      for (std::int64_t j = 0; j < block.keys; ++j) {
        T value;
        std::memcpy(&value, row + j * static_cast<std::int64_t>(sizeof(T)), sizeof value);
        const double expect = wanted[static_cast<std::size_t>(r * block.keys + j)];
        if (expect == 0.0) {
          ASSERT_EQ(static_cast<float>(value), 0.0f) << "row " << r << ", key " << j;
        } else {
          ASSERT_NEAR(static_cast<float>(value), expect, tolerance * std::abs(expect) + 1e-7)
              << "row " << r << ", key " << j;
        }
      }
    }
  }
};

template <typename T>
void check(std::int64_t keys, float dropout, double tolerance) {
  SCOPED_TRACE(testing::Message() << keys << " keys of " << dtype_of<T>::value << ", dropout " << dropout);
  const Problem<T> p(keys, dropout);
  const DeviceStream stream;
  const DeviceBuffer<float> slopes(stream, p.slopes),
      lse(stream, std::vector<float>(p.expected.lse.size(), 12345.0f));
  const DeviceBuffer<std::int32_t> begin(stream, p.key_begin), end(stream, p.key_end),
      documents(stream, p.documents);
  const DeviceBuffer<T> o(stream, p.o), d_o(stream, p.d_o);
  const DeviceBuffer<cuda::KeyRange> ranges(
      stream, std::vector<cuda::KeyRange>(static_cast<std::size_t>(p.shape.batch * p.shape.seq_q)));
  AttentionShape shape = p.shape;
  shape.alibi_slopes = slopes.data(), shape.document = documents.data();
  shape.key_begin = begin.data(), shape.key_end = end.data();
  cuda::key_ranges(shape, ranges.data(), stream.launch());
  const DeviceBuffer<float> scores(stream, p.scores);
  cuda::softmax_forward({shape, p.block, ranges.data(), scores.data(), lse.data()}, stream.launch());
  p.expect_rows(scores.host(), p.expected.p, tolerance);
  const std::vector<float> sums = lse.host();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (std::isinf(p.expected.lse[i])) {
      ASSERT_EQ(sums[i], -std::numeric_limits<float>::infinity()) << i;
    } else {
      ASSERT_NEAR(sums[i], p.expected.lse[i], 1e-5) << i;
    }
  }
  const DeviceBuffer<float> again(stream, p.scores), gradients(stream, p.gradients);
  cuda::softmax_backward(
      {shape, p.block, ranges.data(), again.data(), gradients.data(), lse.data(), o.data(), d_o.data()},
      stream.launch());
  p.expect_rows(again.host(), p.expected.p, tolerance);
  p.expect_rows(gradients.host(), p.expected.ds, 4 * tolerance);
}

TEST(CudaSoftmax, BlockInTheMiddle) {
  SKIP_WITHOUT_CUDA();
  test::in_every_order([] {
    for (const std::int64_t keys : {6, 33, 130, 300, 700, 1030}) {
      for (const float dropout : {0.0f, 0.3f}) {
        check<float>(keys, dropout, 1e-5);
        check<bfloat16>(keys, dropout, 4.1e-3);
        check<float16>(keys, dropout, 6e-4);
      }
    }
  });
}

TEST(CudaSoftmax, LongRows) {
  SKIP_WITHOUT_CUDA();
  test::in_every_order([] {
    for (const std::int64_t keys : {2500, 5000, 8300}) {
      check<float>(keys, 0.3f, 1e-5);
      check<bfloat16>(keys, 0.3f, 4.1e-3);
    }
  });
}

}  // namespace
}  // namespace tessera::kernels
