#include "kernels/api/attention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tessera::kernels {
namespace {

/// One attention problem. q, k and v lie in one packed [seq, batch, (heads + 2 kv_heads) d] buffer when seq_q
/// = seq_k.
struct Case {
  std::string name;
  std::int64_t batch = 1, seq_q = 1, seq_k = 1, heads = 1, kv_heads = 1, d = 8;
  bool causal = true, alibi = false, documents = false;
  std::int64_t query_offset = 0;
  std::vector<std::int32_t> key_begin = {}, key_end = {};
  float dropout = 0.0f;
  float range = 1.0f;  ///< q and k are uniform in [-range, range]
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

template <typename T>
std::vector<T> uniform(std::size_t n, float range, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> next(-range, range);
  std::vector<T> values(n);
  for (T& value : values) value = static_cast<T>(next(engine));
  return values;
}

/// Buffers, masks and shape of a case.
template <typename T>
struct Problem {
  Case config;
  AttentionShape shape;
  std::vector<T> q, k, v, d_o;
  std::vector<float> slopes;
  std::vector<std::int32_t> documents;

  explicit Problem(const Case& c) : config(c) {
    // Rows a little wider than their contents: strides, not shapes, must lead.
    const std::int64_t gap = 5;
    const std::int64_t q_row = c.heads * c.d + gap, k_row = c.kv_heads * c.d + gap;
    q = uniform<T>(static_cast<std::size_t>(c.seq_q * c.batch * q_row), c.range, 1);
    k = uniform<T>(static_cast<std::size_t>(c.seq_k * c.batch * k_row), c.range, 2);
    v = uniform<T>(k.size(), 1.0f, 3);
    d_o = uniform<T>(static_cast<std::size_t>(c.seq_q * c.batch * q_row), 1.0f, 4);
    shape.batch = c.batch, shape.seq_q = c.seq_q, shape.seq_k = c.seq_k;
    shape.heads = c.heads, shape.kv_heads = c.kv_heads, shape.head_dim = c.d;
    shape.dtype = dtype_of<T>::value;
    shape.q_stride = shape.o_stride = {c.batch * q_row, q_row, c.d};
    shape.k_stride = shape.v_stride = {c.batch * k_row, k_row, c.d};
    shape.scale = 1.0f / std::sqrt(static_cast<float>(c.d));
    shape.causal = c.causal;
    shape.query_offset = c.query_offset;
    if (!c.key_begin.empty()) shape.key_begin = config.key_begin.data();
    if (!c.key_end.empty()) shape.key_end = config.key_end.data();
    if (c.alibi) {
      for (std::int64_t h = 0; h < c.heads; ++h) slopes.push_back(0.5f / static_cast<float>(h + 1));
      shape.alibi_slopes = slopes.data();
    }
    if (c.documents) add_documents();
    shape.dropout = c.dropout;
    shape.dropout_key = {77, 5, 3};
    shape.sample0 = 3, shape.head0 = 2, shape.total_heads = c.heads + 4;
    shape.seq_length = std::max(c.seq_k, c.seq_q + c.query_offset);
  }
  Problem(const Problem&) = delete;

  /// Documents of 1, 2, ... 40, 1, ... tokens, ids with gaps, another first length in every sample.
  void add_documents() {
    for (std::int64_t b = 0; b < config.batch; ++b) {
      std::int32_t id = 2, left = static_cast<std::int32_t>(7 * b + 1), length = left;
      for (std::int64_t j = 0; j < config.seq_k; ++j, --left) {
        if (left == 0) {
          length = length % 40 + 3;
          left = length;
          id += 1 + length % 2;
        }
        documents.push_back(id);
      }
    }
    shape.document = documents.data();
  }

  bool sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
    const std::int64_t position = i + shape.query_offset;
    if (shape.causal && j > position) return false;
    if (shape.key_begin && j < shape.key_begin[b]) return false;
    if (shape.key_end && j >= shape.key_end[b]) return false;
    return !shape.document ||
           shape.document[b * shape.seq_k + position] == shape.document[b * shape.seq_k + j];
  }
  /// Factor of a probability: 1, or with dropout 0 or 1 / (1 - p).
  double kept(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (shape.dropout == 0.0f) return 1.0;
    const auto row = static_cast<std::uint64_t>(((shape.sample0 + b) * shape.total_heads + shape.head0 + h) *
                                                    shape.seq_length +
                                                i + shape.query_offset);
    const auto blocks = static_cast<std::uint64_t>((shape.seq_length + 3) / 4);
    const PhiloxBlock block =
        random_block(shape.dropout_key, row * blocks + static_cast<std::uint64_t>(j / 4));
    const DropoutSpec spec{shape.dropout_key, shape.dropout};
    return block.word[j % 4] < spec.threshold() ? 0.0 : 1.0 / (1.0 - static_cast<double>(shape.dropout));
  }
};

std::size_t at(const HeadStrides& stride, std::int64_t i, std::int64_t b, std::int64_t h) {
  return static_cast<std::size_t>(i * stride.seq + b * stride.batch + h * stride.head);
}

struct Results {
  std::vector<double> o, lse, dq, dk, dv;
};

/// The definition, one row at a time, in double precision.
template <typename T>
Results reference(const Problem<T>& p) {
  const AttentionShape& s = p.shape;
  Results r{std::vector<double>(p.q.size()),
            {},
            std::vector<double>(p.q.size()),
            std::vector<double>(p.k.size()),
            std::vector<double>(p.k.size())};
  const auto n = static_cast<std::size_t>(s.seq_k);
  std::vector<double> weight(n), gradient(n);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv = h / (s.heads / s.kv_heads);
      for (std::int64_t i = 0; i < s.seq_q; ++i) {
        const std::size_t qi = at(s.q_stride, i, b, h);
        double top = -std::numeric_limits<double>::infinity(), sum = 0.0, mean = 0.0;
        for (std::int64_t j = 0; j < s.seq_k; ++j) {
          double score = -std::numeric_limits<double>::infinity();
          if (p.sees(b, i, j)) {
            score = 0.0;
            for (std::int64_t c = 0; c < s.head_dim; ++c) {
              score += static_cast<double>(static_cast<float>(p.q[qi + c])) *
                       static_cast<float>(p.k[at(s.k_stride, j, b, kv) + c]);
            }
            score *= s.scale;
            if (s.alibi_slopes) score += s.alibi_slopes[h] * static_cast<double>(j - i - s.query_offset);
          }
          weight[static_cast<std::size_t>(j)] = score;
          top = std::max(top, score);
        }
        for (double& w : weight) sum += w = std::isinf(w) ? 0.0 : std::exp(w - top);
        r.lse.push_back(sum == 0.0 ? -std::numeric_limits<double>::infinity() : top + std::log(sum));
        if (sum == 0.0) continue;
        for (std::int64_t j = 0; j < s.seq_k; ++j) {
          const auto jj = static_cast<std::size_t>(j);
          weight[jj] /= sum;
          gradient[jj] = 0.0;
          if (weight[jj] == 0.0) continue;
          const double factor = p.kept(b, h, i, j);
          const std::size_t vj = at(s.v_stride, j, b, kv);
          double dp = 0.0;
          for (std::int64_t c = 0; c < s.head_dim; ++c) {
            const double upstream = static_cast<float>(p.d_o[qi + c]);
            r.o[qi + c] += weight[jj] * factor * static_cast<float>(p.v[vj + c]);
            r.dv[vj + c] += weight[jj] * factor * upstream;
            dp += upstream * static_cast<float>(p.v[vj + c]);
          }
          gradient[jj] = dp * factor;
          mean += weight[jj] * gradient[jj];
        }
        for (std::int64_t j = 0; j < s.seq_k; ++j) {
          const auto jj = static_cast<std::size_t>(j);
          const double ds = weight[jj] * (gradient[jj] - mean) * s.scale;
          const std::size_t kj = at(s.k_stride, j, b, kv);
          for (std::int64_t c = 0; c < s.head_dim; ++c) {
            r.dq[qi + c] += ds * static_cast<float>(p.k[kj + c]);
            r.dk[kj + c] += ds * static_cast<float>(p.q[qi + c]);
          }
        }
      }
    }
  }
  return r;
}

/// What the kernels wrote; gaps between rows keep the value they were filled with.
template <typename T>
struct Outputs {
  std::vector<T> o, dq, dk, dv;
  std::vector<float> lse;
  bool operator==(const Outputs& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
    };
    return same(o, other.o) && same(dq, other.dq) && same(dk, other.dk) && same(dv, other.dv) &&
           same(lse, other.lse);
  }
};

constexpr float kUntouched = 12345.0f;

template <typename T>
Outputs<T> run(const Problem<T>& p, int threads) {
  const AttentionShape& s = p.shape;
  const T fill(kUntouched);
  Outputs<T> out{std::vector<T>(p.q.size(), fill), std::vector<T>(p.q.size(), fill),
                 std::vector<T>(p.k.size(), fill), std::vector<T>(p.k.size(), fill),
                 std::vector<float>(static_cast<std::size_t>(s.batch * s.heads * s.seq_q))};
  const Launch launch{nullptr, threads};
  // An odd start and exactly the bytes asked for; garbage inside must not show.
  std::vector<unsigned char> forward_space(cpu::attention_forward_workspace(s, threads), 0xff);
  cpu::attention_forward(
      {s, p.q.data(), p.k.data(), p.v.data(), out.o.data(), out.lse.data(), forward_space.data()}, launch);
  std::vector<unsigned char> backward_space(cpu::attention_backward_workspace(s, threads), 0xff);
  cpu::attention_backward({s, p.q.data(), p.k.data(), p.v.data(), out.o.data(), out.lse.data(), p.d_o.data(),
                           out.dq.data(), out.dk.data(), out.dv.data(), backward_space.data()},
                          launch);
  return out;
}

/// Expects ||actual - expected|| <= tolerance ||expected|| over the rows of heads, and untouched gaps.
template <typename T>
void expect_close(const char* name, const std::vector<T>& actual, const std::vector<double>& expected,
                  std::int64_t row, double tolerance) {
  double error = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double value = static_cast<float>(actual[i]);
    if (static_cast<std::int64_t>(i) % (row + 5) >= row) {
      ASSERT_EQ(value, static_cast<double>(static_cast<float>(T(kUntouched))))
          << name << " wrote between rows, at " << i;
      continue;
    }
    ASSERT_TRUE(std::isfinite(value)) << name << " at " << i;
    error += (value - expected[i]) * (value - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 5e-7) << name;
}

template <typename T>
void check(const Case& c, double tolerance) {
  const Problem<T> problem(c);
  const Results expected = reference(problem);
  const Outputs<T> one = run(problem, 1);
  const std::int64_t q_row = c.heads * c.d, k_row = c.kv_heads * c.d;
  expect_close("o", one.o, expected.o, q_row, tolerance);
  expect_close("dq", one.dq, expected.dq, q_row, tolerance);
  expect_close("dk", one.dk, expected.dk, k_row, tolerance);
  expect_close("dv", one.dv, expected.dv, k_row, tolerance);
  for (std::size_t i = 0; i < one.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(one.lse[i], -std::numeric_limits<float>::infinity()) << "row " << i;
    } else {
      ASSERT_NEAR(one.lse[i], expected.lse[i], 2e-5 * c.range * c.range) << "row " << i;
    }
  }
  EXPECT_TRUE(one == run(problem, 2)) << "2 threads";
  EXPECT_TRUE(one == run(problem, 3)) << "3 threads";
}

const Case kCases[] = {
    {.name = "one"},
    {.name = "one_feature", .seq_q = 17, .seq_k = 17, .d = 1},
    {.name = "two", .batch = 3, .seq_q = 2, .seq_k = 2, .heads = 5, .kv_heads = 5, .d = 12},
    {.name = "odd", .batch = 2, .seq_q = 17, .seq_k = 17, .heads = 5, .kv_heads = 5, .d = 12},
    {.name = "prime", .batch = 2, .seq_q = 67, .seq_k = 67, .heads = 1, .d = 40},
    {.name = "prime_full",
     .batch = 1,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 5,
     .kv_heads = 5,
     .d = 8,
     .causal = false},
    {.name = "grouped", .batch = 1, .seq_q = 129, .seq_k = 129, .heads = 12, .kv_heads = 4, .d = 64},
    {.name = "one_kv_head", .batch = 1, .seq_q = 200, .seq_k = 200, .heads = 7, .kv_heads = 1, .d = 80},
    {.name = "several_key_blocks",
     .batch = 1,
     .seq_q = 300,
     .seq_k = 300,
     .heads = 2,
     .kv_heads = 2,
     .d = 64},
    {.name = "parts", .batch = 1, .seq_q = 1100, .seq_k = 1100, .heads = 1, .kv_heads = 1, .d = 16},
    {.name = "wide", .batch = 1, .seq_q = 67, .seq_k = 67, .heads = 2, .kv_heads = 1, .d = 128},
    {.name = "widest",
     .batch = 1,
     .seq_q = 33,
     .seq_k = 65,
     .heads = 1,
     .kv_heads = 1,
     .d = 256,
     .causal = false},
    {.name = "cross",
     .batch = 2,
     .seq_q = 17,
     .seq_k = 200,
     .heads = 5,
     .kv_heads = 1,
     .d = 40,
     .causal = false},
    {.name = "offset",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 200,
     .heads = 4,
     .kv_heads = 2,
     .d = 64,
     .query_offset = 133},
    {.name = "offset_inside", .batch = 1, .seq_q = 70, .seq_k = 200, .heads = 1, .d = 12, .query_offset = 61},
    {.name = "decode",
     .batch = 2,
     .seq_q = 1,
     .seq_k = 200,
     .heads = 12,
     .kv_heads = 4,
     .d = 64,
     .query_offset = 199},
    {.name = "decode_tail",
     .batch = 1,
     .seq_q = 3,
     .seq_k = 301,
     .heads = 7,
     .kv_heads = 1,
     .d = 40,
     .alibi = true,
     .query_offset = 298},
    {.name = "decode_masked",
     .batch = 3,
     .seq_q = 1,
     .seq_k = 150,
     .heads = 2,
     .kv_heads = 2,
     .d = 80,
     .query_offset = 140,
     .key_begin = {0, 139, 141},
     .key_end = {150, 140, 150}},
    {.name = "alibi",
     .batch = 1,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 5,
     .kv_heads = 5,
     .d = 40,
     .alibi = true},
    {.name = "alibi_full",
     .batch = 1,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 2,
     .kv_heads = 2,
     .d = 16,
     .causal = false,
     .alibi = true},
    {.name = "left_padding",
     .batch = 3,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 2,
     .d = 12,
     .key_begin = {0, 5, 128}},
    {.name = "right_padding",
     .batch = 3,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 2,
     .kv_heads = 1,
     .d = 12,
     .causal = false,
     .key_end = {67, 66, 1}},
    {.name = "key_ranges",
     .batch = 4,
     .seq_q = 200,
     .seq_k = 200,
     .heads = 1,
     .kv_heads = 1,
     .d = 8,
     .key_begin = {3, 100, 70, 150},
     .key_end = {200, 101, 70, 140}},
    {.name = "all_masked",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 1,
     .kv_heads = 1,
     .d = 8,
     .causal = false,
     .key_end = {0, 67}},
    {.name = "documents",
     .batch = 2,
     .seq_q = 200,
     .seq_k = 200,
     .heads = 2,
     .kv_heads = 2,
     .d = 40,
     .documents = true},
    {.name = "documents_full",
     .batch = 2,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 1,
     .d = 12,
     .causal = false,
     .documents = true},
    {.name = "dropout",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 5,
     .kv_heads = 5,
     .d = 12,
     .dropout = 0.3f},
    {.name = "dropout_cross",
     .batch = 1,
     .seq_q = 3,
     .seq_k = 200,
     .heads = 4,
     .kv_heads = 2,
     .d = 8,
     .query_offset = 150,
     .dropout = 0.5f},
    {.name = "everything",
     .batch = 3,
     .seq_q = 150,
     .seq_k = 201,
     .heads = 6,
     .kv_heads = 2,
     .d = 40,
     .alibi = true,
     .documents = true,
     .query_offset = 51,
     .key_begin = {0, 9, 60},
     .key_end = {201, 160, 199},
     .dropout = 0.1f},
    {.name = "everything_full",
     .batch = 2,
     .seq_q = 150,
     .seq_k = 201,
     .heads = 6,
     .kv_heads = 2,
     .d = 17,
     .causal = false,
     .alibi = true,
     .documents = true,
     .query_offset = 51,
     .key_begin = {2, 9},
     .key_end = {190, 160},
     .dropout = 0.2f},
    {.name = "large_scores",
     .batch = 1,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 2,
     .d = 64,
     .range = 6.0f},
};

class Attention : public testing::TestWithParam<Case> {};

TEST_P(Attention, Float32) { check<float>(GetParam(), GetParam().range > 1.0f ? 4e-5 : 1e-6); }
TEST_P(Attention, Bfloat16) { check<bfloat16>(GetParam(), GetParam().range > 1.0f ? 2e-2 : 6e-3); }

INSTANTIATE_TEST_SUITE_P(Shapes, Attention, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

/// q, k and v as views of one [seq, batch, 3 heads d] buffer, gradients written into another: as the models
/// do.
TEST(AttentionViews, PackedQkv) {
  const std::int64_t seq = 67, batch = 2, heads = 5, d = 12, row = 3 * heads * d;
  Case c{.name = "", .batch = batch, .seq_q = seq, .seq_k = seq, .heads = heads, .kv_heads = heads, .d = d};
  const Problem<float> apart(c);
  const Outputs<float> expected = run(apart, 1);
  AttentionShape shape = apart.shape;
  shape.q_stride = shape.k_stride = shape.v_stride = {batch * row, row, d};
  std::vector<float> qkv(static_cast<std::size_t>(seq * batch * row)), gradient(qkv.size());
  const auto part = [&](std::vector<float>& buffer, int which) { return buffer.data() + which * heads * d; };
  const auto for_all = [&](auto&& visit) {
    for (std::int64_t i = 0; i < seq * batch; ++i) {
      for (std::int64_t f = 0; f < heads * d; ++f)
        visit(static_cast<std::size_t>(i * row + f), static_cast<std::size_t>(i * (heads * d + 5) + f));
    }
  };
  for_all([&](std::size_t packed, std::size_t single) {
    part(qkv, 0)[packed] = apart.q[single];
    part(qkv, 1)[packed] = apart.k[single];
    part(qkv, 2)[packed] = apart.v[single];
  });
  std::vector<float> o(apart.q.size()), lse(expected.lse.size());
  std::vector<char> space(
      std::max(cpu::attention_forward_workspace(shape, 2), cpu::attention_backward_workspace(shape, 2)));
  const Launch launch{nullptr, 2};
  cpu::attention_forward(
      {shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), o.data(), lse.data(), space.data()}, launch);
  cpu::attention_backward(
      {shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), o.data(), lse.data(), apart.d_o.data(),
       part(gradient, 0), part(gradient, 1), part(gradient, 2), space.data()},
      launch);
  for_all([&](std::size_t packed, std::size_t single) {
    ASSERT_EQ(o[single], expected.o[single]);
    ASSERT_EQ(part(gradient, 0)[packed], expected.dq[single]);
    ASSERT_EQ(part(gradient, 1)[packed], expected.dk[single]);
    ASSERT_EQ(part(gradient, 2)[packed], expected.dv[single]);
  });
}

/// A NaN must reach the output of the queries that see it, and of no others.
TEST(AttentionViews, NanComesThrough) {
  Case c{.name = "", .seq_q = 67, .seq_k = 67, .d = 12};
  Problem<float> problem(c);
  problem.k[at(problem.shape.k_stride, 20, 0, 0) + 3] = std::numeric_limits<float>::quiet_NaN();
  const Outputs<float> out = run(problem, 1);
  for (std::int64_t i = 0; i < 67; ++i) {
    EXPECT_EQ(std::isnan(out.o[at(problem.shape.o_stride, i, 0, 0)]), i >= 20) << "query " << i;
  }
}

/// Without an lse to write, forward gives the same o.
TEST(AttentionViews, LseIsOptional) {
  Case c{.name = "", .seq_q = 67, .seq_k = 67, .d = 12};
  const Problem<float> p(c);
  const Outputs<float> expected = run(p, 1);
  std::vector<float> o(p.q.size(), kUntouched);
  std::vector<char> space(cpu::attention_forward_workspace(p.shape, 1));
  cpu::attention_forward({p.shape, p.q.data(), p.k.data(), p.v.data(), o.data(), nullptr, space.data()},
                         {nullptr, 1});
  EXPECT_EQ(o, expected.o);
}

}  // namespace
}  // namespace tessera::kernels
