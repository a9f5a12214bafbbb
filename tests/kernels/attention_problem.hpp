#pragma once
/// Attention problems for the tests of every backend: random operands and masks, and what the definition
/// gives for them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/api/attention.hpp"

namespace tessera::kernels::attention_test {

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
  std::int64_t window = 0;
  float softcap = 0.0f;
  bool bias = false;     ///< by distance
  std::int64_t gap = 5;  ///< elements that rows are wider than their contents
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

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
  std::vector<float> slopes, bias;
  std::vector<std::int32_t> documents;

  explicit Problem(const Case& c) : config(c) {
    // Strides, not shapes, must lead.
    const std::int64_t q_row = c.heads * c.d + c.gap, k_row = c.kv_heads * c.d + c.gap;
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
    shape.window = c.window;
    shape.softcap = c.softcap;
    if (!c.key_begin.empty()) shape.key_begin = config.key_begin.data();
    if (!c.key_end.empty()) shape.key_end = config.key_end.data();
    if (c.alibi) {
      for (std::int64_t h = 0; h < c.heads; ++h) slopes.push_back(0.5f / static_cast<float>(h + 1));
      shape.alibi_slopes = slopes.data();
    }
    if (c.bias) {
      bias = uniform<float>(static_cast<std::size_t>((c.seq_q + c.seq_k - 1) * c.heads), 2.0f, 5);
      shape.bias = bias.data();
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
    if (shape.window > 0 && j <= position - shape.window) return false;
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

inline std::size_t at(const HeadStrides& stride, std::int64_t i, std::int64_t b, std::int64_t h) {
  return static_cast<std::size_t>(i * stride.seq + b * stride.batch + h * stride.head);
}

struct Results {
  std::vector<double> o, lse, dq, dk, dv, dbias;
};

/// The definition, one row at a time, in double precision.
template <typename T>
Results reference(const Problem<T>& p) {
  const AttentionShape& s = p.shape;
  Results r{std::vector<double>(p.q.size()), {},
            std::vector<double>(p.q.size()), std::vector<double>(p.k.size()),
            std::vector<double>(p.k.size()), std::vector<double>(p.bias.size())};
  const auto n = static_cast<std::size_t>(s.seq_k);
  std::vector<double> weight(n), gradient(n);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv = h / (s.heads / s.kv_heads);
      for (std::int64_t i = 0; i < s.seq_q; ++i) {
        const std::size_t qi = at(s.q_stride, i, b, h);
        double top = -std::numeric_limits<double>::infinity(), sum = 0.0, mean = 0.0;
        std::vector<double> slope(n, 1.0);  // of the cap
        for (std::int64_t j = 0; j < s.seq_k; ++j) {
          double score = -std::numeric_limits<double>::infinity();
          if (p.sees(b, i, j)) {
            score = 0.0;
            for (std::int64_t c = 0; c < s.head_dim; ++c) {
              score += static_cast<double>(static_cast<float>(p.q[qi + c])) *
                       static_cast<float>(p.k[at(s.k_stride, j, b, kv) + c]);
            }
            score *= s.scale;
            if (s.softcap > 0.0f) {
              const double capped = std::tanh(score / s.softcap);
              score = s.softcap * capped;
              slope[static_cast<std::size_t>(j)] = 1.0 - capped * capped;
            }
            if (s.bias) score += s.bias[(i - j + s.seq_k - 1) * s.heads + h];
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
          if (s.bias)
            r.dbias[static_cast<std::size_t>((i - j + s.seq_k - 1) * s.heads + h)] +=
                weight[jj] * (gradient[jj] - mean);
          const double ds = weight[jj] * (gradient[jj] - mean) * slope[jj] * s.scale;
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
  std::vector<float> lse, dbias = {};
  bool operator==(const Outputs& other) const {
    const auto same = [](const auto& a, const auto& b) {
      const auto bytes_of = [](const auto& values) { return std::as_bytes(std::span(values)); };
      return std::ranges::equal(bytes_of(a), bytes_of(b));  // bits, so that -0 is not 0 and NaN is NaN
    };
    return same(o, other.o) && same(dq, other.dq) && same(dk, other.dk) && same(dv, other.dv) &&
           same(lse, other.lse) && same(dbias, other.dbias);
  }
};

inline constexpr float kUntouched = 12345.0f;

template <typename T>
Outputs<T> run_on_cpu(const Problem<T>& p, int threads) {
  const AttentionShape& s = p.shape;
  const T fill(kUntouched);
  Outputs<T> out{std::vector<T>(p.q.size(), fill),
                 std::vector<T>(p.q.size(), fill),
                 std::vector<T>(p.k.size(), fill),
                 std::vector<T>(p.k.size(), fill),
                 std::vector<float>(static_cast<std::size_t>(s.batch * s.heads * s.seq_q)),
                 std::vector<float>(p.bias.size(), kUntouched)};
  const Launch launch{nullptr, threads};
  // An odd start and exactly the bytes asked for; garbage inside must not show.
  std::vector<unsigned char> forward_space(cpu::attention_forward_workspace(s, threads), 0xff);
  cpu::attention_forward(
      {s, p.q.data(), p.k.data(), p.v.data(), out.o.data(), out.lse.data(), forward_space.data()}, launch);
  std::vector<unsigned char> backward_space(cpu::attention_backward_workspace(s, threads), 0xff);
  cpu::attention_backward(
      {s, p.q.data(), p.k.data(), p.v.data(), out.o.data(), out.lse.data(), p.d_o.data(), out.dq.data(),
       out.dk.data(), out.dv.data(), backward_space.data(), out.dbias.data()},
      launch);
  return out;
}

/// A problem's keys and values in pages, which lie in any order and no closer than they must; where there are
/// none of either, nobody may look.
template <typename T>
struct Paged {
  AttentionShape shape;
  std::vector<T> k, v;
  std::vector<std::int32_t> pages;

  explicit Paged(const Problem<T>& p) : shape(p.shape) {
    const AttentionShape& s = p.shape;
    const std::int64_t each = cache_pages(s.seq_k), count = s.batch * each + 3,
                       page = s.kv_heads * kCachePage * s.head_dim;
    shape.page_entries = each + 1;
    shape.k_page = page;
    shape.v_page = page + 8 * s.head_dim;
    shape.k_stride = shape.v_stride = {s.head_dim, 0, kCachePage * s.head_dim};
    const T nothing(std::numeric_limits<float>::quiet_NaN());
    k.assign(static_cast<std::size_t>(count * shape.k_page), nothing);
    v.assign(static_cast<std::size_t>(count * shape.v_page), nothing);
    std::vector<std::int32_t> order(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::ranges::shuffle(order, std::mt19937(9));
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t i = 0; i < each; ++i) pages.push_back(order[static_cast<std::size_t>(b * each + i)]);
      pages.push_back(-12345);
      for (std::int64_t j = 0; j < s.seq_k; ++j) {
        const std::int64_t at_page = pages[static_cast<std::size_t>(b * shape.page_entries + j / kCachePage)];
        for (std::int64_t h = 0; h < s.kv_heads; ++h) {
          const std::size_t within = at(shape.k_stride, j % kCachePage, 0, h);
          const auto copy = [&](const std::vector<T>& from, std::size_t source, std::vector<T>& to,
                                std::int64_t step) {
            std::copy_n(
                from.begin() + static_cast<std::ptrdiff_t>(source), s.head_dim,
                to.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(at_page * step) + within));
          };
          copy(p.k, at(s.k_stride, j, b, h), k, shape.k_page);
          copy(p.v, at(s.v_stride, j, b, h), v, shape.v_page);
        }
      }
    }
    shape.pages = pages.data();
  }
  Paged(const Paged&) = delete;
};

/// Expects ||actual - expected|| <= tolerance ||expected|| over the rows of heads, and untouched gaps.
template <typename T>
void expect_close(const char* name, const std::vector<T>& actual, const std::vector<double>& expected,
                  std::int64_t row, double tolerance, std::int64_t gap = 5) {
  double error = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double value = static_cast<float>(actual[i]);
    if (static_cast<std::int64_t>(i) % (row + gap) >= row) {
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

/// The same for the gradient of a bias, whose rows lie together.
inline void expect_bias_close(const std::vector<float>& actual, const std::vector<double>& expected,
                              double tolerance) {
  double error = 0.0, norm = 0.0;
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double value = static_cast<double>(actual[i]);
    ASSERT_TRUE(std::isfinite(value)) << "dbias at " << i;
    error += (value - expected[i]) * (value - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 5e-7) << "dbias";
}

}  // namespace tessera::kernels::attention_test
