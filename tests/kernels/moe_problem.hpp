#pragma once
/// A router's logits, and by plain loops in double what becomes of them.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/kernels/buffer.hpp"

namespace tessera::testing {

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct RouteProblem {
  std::int64_t seq, batch, experts, topk;
  bool normalized;
  Buffer logits;
  std::vector<std::int32_t> counted;  // [seq, batch]: the second sample has no token that counts

  /// Multiples of 1/4, so that there are ties; nobody chooses the second expert unless there is no other way.
  RouteProblem(std::int64_t seq, std::int64_t batch, std::int64_t experts, std::int64_t topk, bool normalized,
               DType dtype)
      : seq(seq),
        batch(batch),
        experts(experts),
        topk(topk),
        normalized(normalized),
        logits(Buffer::random(dtype, seq * batch * experts, 11, 3.0)) {
    for (std::int64_t i = 0; i < logits.size(); ++i) {
      logits.set(i, i % experts == 1 ? -7.0 : std::round(4.0 * logits[i]) / 4.0);
    }
    for (std::int64_t t = 0; t < tokens(); ++t) counted.push_back(t % batch == 1 || t % 5 == 2 ? 0 : 1);
  }
  std::int64_t tokens() const { return seq * batch; }
};

inline double log_sum_exp(const RouteProblem& p, const std::vector<double>& logits, std::int64_t t) {
  const auto first = logits.begin() + t * p.experts, last = first + p.experts;
  const double top = *std::max_element(first, last);
  return top + std::log(std::accumulate(first, last, 0.0,
                                        [&](double sum, double x) { return sum + std::exp(x - top); }));
}

inline std::vector<std::int32_t> choices(const RouteProblem& p) {
  std::vector<std::int32_t> chosen;
  for (std::int64_t t = 0; t < p.tokens(); ++t) {
    std::vector<std::int32_t> order(index(p.experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return p.logits[t * p.experts + a] > p.logits[t * p.experts + b];
    });
    chosen.insert(chosen.end(), order.begin(), order.begin() + p.topk);
  }
  return chosen;
}

inline std::vector<double> weights(const RouteProblem& p, const std::vector<double>& logits,
                                   const std::vector<std::int32_t>& chosen) {
  std::vector<double> weight(chosen.size());
  for (std::int64_t t = 0; t < p.tokens(); ++t) {
    const double lse = log_sum_exp(p, logits, t);
    double sum = 0.0;
    for (std::int64_t i = t * p.topk; i < (t + 1) * p.topk; ++i) {
      weight[index(i)] = std::exp(logits[index(t * p.experts + chosen[index(i)])] - lse);
      sum += weight[index(i)];
    }
    for (std::int64_t i = t * p.topk; p.normalized && i < (t + 1) * p.topk; ++i) weight[index(i)] /= sum;
  }
  return weight;
}

/// [batch, experts]: of probabilities, or of choices.
inline std::vector<double> sums_of_probabilities(const RouteProblem& p, const std::vector<double>& logits) {
  std::vector<double> sums(index(p.batch * p.experts));
  for (std::int64_t t = 0; t < p.tokens(); ++t) {
    if (p.counted[index(t)] == 0) continue;
    const double lse = log_sum_exp(p, logits, t);
    for (std::int64_t e = 0; e < p.experts; ++e) {
      sums[index(t % p.batch * p.experts + e)] += std::exp(logits[index(t * p.experts + e)] - lse);
    }
  }
  return sums;
}
inline std::vector<double> sums_of_choices(const RouteProblem& p, const std::vector<std::int32_t>& chosen) {
  std::vector<double> sums(index(p.batch * p.experts));
  for (std::int64_t i = 0; i < p.tokens() * p.topk; ++i) {
    const std::int64_t t = i / p.topk;
    if (p.counted[index(t)] != 0) sums[index(t % p.batch * p.experts + chosen[index(i)])] += 1.0;
  }
  return sums;
}

/// Upstream gradients, and the factors of a balance.
struct RouteUpstream {
  Buffer weight, factor, balance, z;

  explicit RouteUpstream(const RouteProblem& p)
      : weight(Buffer::random(DType::f32, p.tokens() * p.topk, 21)),
        factor(Buffer::random(DType::f32, p.batch * p.experts, 22)),
        balance(Buffer::random(DType::f32, p.batch, 23)),
        z(Buffer::random(DType::f32, p.tokens(), 24)) {}
};

/// What token t gives to the loss that these gradients are of, by its logits x and the experts it chose.
/// `row` is a problem of one token.
inline double loss_of_token(const RouteProblem& p, const RouteProblem& row, const RouteUpstream& up,
                            const std::vector<double>& x, const std::vector<std::int32_t>& chosen,
                            std::int64_t t) {
  const std::vector<double> weight = weights(row, x, chosen);
  double loss = 0.0;
  for (std::int64_t j = 0; j < p.topk; ++j) loss += up.weight[t * p.topk + j] * weight[index(j)];
  if (p.counted[index(t)] == 0) return loss;
  const double lse = log_sum_exp(row, x, 0);
  const std::int64_t sample = t % p.batch;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    loss += up.balance[sample] * up.factor[sample * p.experts + e] * std::exp(x[index(e)] - lse);
  }
  return loss + up.z[t] * lse * lse;
}

/// By central differences.
inline std::vector<double> differences(const RouteProblem& p, const RouteUpstream& up) {
  const RouteProblem row(1, 1, p.experts, p.topk, p.normalized, DType::f32);
  const std::vector<double> logits = p.logits.values();
  const std::vector<std::int32_t> all = choices(p);
  std::vector<double> gradient;
  for (std::int64_t t = 0; t < p.tokens(); ++t) {
    std::vector<double> x(logits.begin() + t * p.experts, logits.begin() + (t + 1) * p.experts);
    const std::vector<std::int32_t> chosen(all.begin() + t * p.topk, all.begin() + (t + 1) * p.topk);
    for (double& logit : x) {
      const double step = 1e-5, before = logit;
      logit = before + step;
      const double above = loss_of_token(p, row, up, x, chosen, t);
      logit = before - step;
      const double below = loss_of_token(p, row, up, x, chosen, t);
      logit = before;
      gradient.push_back((above - below) / (2.0 * step));
    }
  }
  return gradient;
}

}  // namespace tessera::testing
