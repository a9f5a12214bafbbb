#include "kernels/cpu/vector/moe.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

/// NaN comes before all numbers: a router that has diverged must be seen in its weights.
VEC_INLINE bool comes_before(float a, float b) { return a > b || (a != a && b == b); }

/// The `topk` first of n values and their numbers, in order.
template <typename T>
static void choose(const T* x, std::int64_t n, std::int64_t topk, float* value, std::int32_t* number) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<float>(x[i]);
    if (count == topk && !comes_before(v, value[topk - 1])) continue;
    std::int64_t at = count < topk ? count++ : topk - 1;
    for (; at > 0 && comes_before(v, value[at - 1]); --at) {
      value[at] = value[at - 1];
      number[at] = number[at - 1];
    }
    value[at] = v;
    number[at] = static_cast<std::int32_t>(i);
  }
}

template <typename T>
static void forward_rows(const RouteForward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(p.logits) + t * p.experts;
    float* weight = p.weight + t * p.topk;
    choose(x, p.experts, p.topk, weight, p.expert + t * p.topk);
    const float top = weight[0];
    F sums[4] = {}, chosen = {};
    for_lanes_in_fours(0, p.experts, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      sums[slot] += keep(exp(load(x + i, lanes) - top), lanes);
    });
    for_lanes(0, p.topk, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      const F power = exp(load(weight + i, lanes) - top);
      store(weight + i, power, lanes);
      chosen += keep(power, lanes);
    });
    const float all = sum(sums), whole = p.normalized ? sum(chosen) : all;
    p.lse[t] = static_cast<float>(static_cast<double>(top) + __builtin_log(static_cast<double>(all)));
    const bool counted = p.counted == nullptr || p.counted[t] != 0;
    if (p.z != nullptr) p.z[t] = counted ? p.lse[t] * p.lse[t] : 0.0f;
    for_lanes(0, p.topk, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(weight + i, load(weight + i, lanes) / whole, lanes);
    });
  }
}

/// The derivative by logit e is p[e] * of_probability(e), and of those chosen weight * (weight_grad - share)
/// besides.
struct RowGradient {
  float lse, share;
  float every;          ///< what of_probability has of any expert
  float balance, mean;  ///< upstream gradient; sum of factor[e] * p[e]
  const float* factor;  ///< null: no balance
};

template <typename T>
VEC_INLINE RowGradient row_gradient(const RouteBackward& p, std::int64_t t, const T* x) {
  const bool counted = p.counted == nullptr || p.counted[t] != 0;
  const std::int64_t sample = t % p.batch;
  RowGradient g{.lse = p.lse[t], .share = 0, .every = 0, .balance = 0, .mean = 0, .factor = nullptr};
  if (p.weight_grad != nullptr) {
    for (std::int64_t i = t * p.topk; i < (t + 1) * p.topk; ++i) g.share += p.weight[i] * p.weight_grad[i];
  }
  if (counted && p.z_grad != nullptr) g.every = 2.0f * g.lse * p.z_grad[t];
  if (counted && p.factor != nullptr) {
    g.factor = p.factor + sample * p.experts;
    g.balance = p.balance_grad[sample];
    F sums[4] = {};
    for_lanes_in_fours(0, p.experts, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      sums[slot] += keep(load(g.factor + i, lanes) * exp(load(x + i, lanes) - g.lse), lanes);
    });
    g.mean = sum(sums);
  }
  return g;
}

template <typename T>
static void backward_rows(const RouteBackward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(p.logits) + t * p.experts;
    T* out = static_cast<T*>(p.logits_grad) + t * p.experts;
    const RowGradient g = row_gradient(p, t, x);
    const float others = p.normalized ? g.every : g.every - g.share;
    for_lanes(0, p.experts, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F of_probability = splat(others);
      if (g.factor != nullptr) of_probability += g.balance * (load(g.factor + i, lanes) - g.mean);
      store(out + i, exp(load(x + i, lanes) - g.lse) * of_probability, lanes);
    });
    if (p.weight_grad == nullptr) continue;
    // Written anew, because weight * (weight_grad - share) in two terms would cancel where the router is
    // sure.
    for (std::int64_t i = t * p.topk; i < (t + 1) * p.topk; ++i) {
      const std::int32_t e = p.expert[i];
      float of_probability = g.every;
      if (g.factor != nullptr) of_probability += g.balance * (g.factor[e] - g.mean);
      const float probability = exp(splat(static_cast<float>(x[e]) - g.lse))[0];
      out[e] = static_cast<T>(probability * of_probability + p.weight[i] * (p.weight_grad[i] - g.share));
    }
  }
}

template <typename T>
static void sums_columns(const RouteSums& p, std::int64_t sample, std::int64_t begin, std::int64_t end) {
  float* probability = p.probability + sample * p.experts;
  float* chosen = p.chosen + sample * p.experts;
  for (std::int64_t e = begin; e < end; ++e) probability[e] = chosen[e] = 0.0f;
  for (std::int64_t t = sample; t < p.tokens; t += p.batch) {
    if (p.counted != nullptr && p.counted[t] == 0) continue;
    const T* x = static_cast<const T*>(p.logits) + t * p.experts;
    const float lse = p.lse[t];
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(probability + i, load(probability + i, lanes) + exp(load(x + i, lanes) - lse), lanes);
    });
    for (std::int64_t i = t * p.topk; i < (t + 1) * p.topk; ++i) {
      const std::int32_t e = p.expert[i];
      if (e >= begin && e < end) chosen[e] += 1.0f;
    }
  }
}

template <typename T>
static void combine_rows(const CombineSlots& p, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(p.x);
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int32_t* row = p.row + t * p.topk;
    const float* weight = p.weight != nullptr ? p.weight + t * p.topk : nullptr;
    T* y = static_cast<T*>(p.y) + t * p.cols;
    for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F total = {};
      for (std::int64_t j = 0; j < p.topk; ++j) {
        const F v = load(x + row[j] * p.cols + i, lanes);
        total += weight != nullptr ? weight[j] * v : v;
      }
      store(y + i, total, lanes);
    });
  }
}

template <typename T>
static void weigh(const WeighRows& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    T* x = static_cast<T*>(p.x) + r * p.cols;
    T* y = static_cast<T*>(p.y) + r * p.cols;
    const float weight = p.weight[r];
    F sums[4] = {};
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      const F a = load(x + i, lanes), b = load(y + i, lanes);
      sums[slot] += a * b;
      store(x + i, weight * a, lanes);
      store(y + i, weight * b, lanes);
    });
    p.dot[r] = sum(sums);
  }
}

void route_forward_rows(const RouteForward& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { forward_rows<decltype(t)>(params, begin, end); });
}

void route_backward_rows(const RouteBackward& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { backward_rows<decltype(t)>(params, begin, end); });
}

void route_sums_columns(const RouteSums& params, std::int64_t sample, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype,
              [&](auto t) VEC_LAMBDA { sums_columns<decltype(t)>(params, sample, begin, end); });
}

void combine_slots_rows(const CombineSlots& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { combine_rows<decltype(t)>(params, begin, end); });
}

void weigh_rows_rows(const WeighRows& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { weigh<decltype(t)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
