/// Mixtures of experts. A warp routes a token: each of its choices is one pass over the logits, out of the L1
/// cache after the first, for the greatest behind the choice before. Slots are sorted by a block per expert,
/// which reads the experts of all slots twice, to count them and to place its own: 8 of 128 experts for 16k
/// tokens are 134 MB out of the L2 cache.

#include "kernels/api/moe.hpp"

#include "kernels/cuda/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kTokens = kThreads / kWarp;  // that a block routes

/// The token of this thread's warp, and the thread's place in it.
__device__ __forceinline__ std::int64_t own_token() {
  return std::int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarp;
}
__device__ __forceinline__ int own_lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// ---- Routing ----

using Key = unsigned long long;

/// The greater, the earlier a logit is chosen: NaN first, among equals the lower expert. Never 0, nor all
/// ones.
__device__ __forceinline__ Key key_of(float logit, int expert) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // of two zeros there is one
  const std::uint32_t ordered =
      logit != logit ? 0xffffffffu : ((bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u);
  return Key{ordered} << 32 | static_cast<std::uint32_t>(0x7fffffff - expert);
}
__device__ __forceinline__ int expert_of(Key key) {
  return 0x7fffffff - static_cast<int>(static_cast<std::uint32_t>(key));
}

struct LargerKey {
  __device__ __forceinline__ Key operator()(Key a, Key b) const { return a > b ? a : b; }
};

/// The greatest key below `last`.
template <typename T>
__device__ __forceinline__ Key next_choice(const T* logits, int experts, Key last) {
  Key best = 0;
#pragma unroll 4
  for (int e = own_lane(); e < experts; e += kWarp) {
    const Key key = key_of(to_float(logits[e]), e);
    if (key < last && key > best) best = key;
  }
  return detail::warp_reduce(best, LargerKey{});
}

template <typename T>
__global__ void __launch_bounds__(kThreads) route_forward_kernel(const RouteForward p) {
  const std::int64_t t = own_token();
  if (t >= p.tokens) return;
  const int lane = own_lane(), experts = static_cast<int>(p.experts), topk = static_cast<int>(p.topk);
  const T* const x = static_cast<const T*>(p.logits) + t * p.experts;
  float* const weight = p.weight + t * p.topk;
  std::int32_t* const expert = p.expert + t * p.topk;
  Key last = ~Key{0};
  float top = 0.0f, chosen = 0.0f;
  for (int j = 0; j < topk; ++j) {
    last = next_choice(x, experts, last);
    const float logit = to_float(x[expert_of(last)]);
    if (j == 0) top = logit;
    const float power = expf(logit - top);
    chosen += power;
    if (lane == j % kWarp) {
      weight[j] = power;
      expert[j] = expert_of(last);
    }
  }
  float sum = 0.0f;
#pragma unroll 4
  for (int e = lane; e < experts; e += kWarp) sum += expf(to_float(x[e]) - top);
  sum = warp_sum(sum);
  if (lane == 0) {
    p.lse[t] = static_cast<float>(static_cast<double>(top) + log(static_cast<double>(sum)));
    const bool counted = p.counted == nullptr || p.counted[t] != 0;
    if (p.z != nullptr) p.z[t] = counted ? p.lse[t] * p.lse[t] : 0.0f;
  }
  const float whole = p.normalized ? chosen : sum;
  for (int j = lane; j < topk; j += kWarp) weight[j] /= whole;  // what this lane has written
}

/// As on the CPU: the derivative by logit e is p[e] * of_probability(e), and of those chosen
/// weight * (weight_grad - share) besides.
struct RowGradient {
  float every, balance, mean;
  const float* factor;  // null: no balance

  __device__ __forceinline__ float of_probability(int e) const {
    return factor != nullptr ? every + balance * (factor[e] - mean) : every;
  }
};

template <typename T>
__device__ __forceinline__ RowGradient row_gradient(const RouteBackward& p, std::int64_t t, const T* x) {
  RowGradient g{0.0f, 0.0f, 0.0f, nullptr};
  if (p.counted != nullptr && p.counted[t] == 0) return g;
  const float lse = p.lse[t];
  if (p.z_grad != nullptr) g.every = 2.0f * lse * p.z_grad[t];
  if (p.factor == nullptr) return g;
  const std::int64_t sample = t % p.batch;
  g.factor = p.factor + sample * p.experts;
  g.balance = p.balance_grad[sample];
#pragma unroll 4
  for (int e = own_lane(); e < static_cast<int>(p.experts); e += kWarp) {
    g.mean += g.factor[e] * expf(to_float(x[e]) - lse);
  }
  g.mean = warp_sum(g.mean);
  return g;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(const RouteBackward p) {
  const std::int64_t t = own_token();
  if (t >= p.tokens) return;
  const int lane = own_lane(), experts = static_cast<int>(p.experts), topk = static_cast<int>(p.topk);
  const T* const x = static_cast<const T*>(p.logits) + t * p.experts;
  T* const out = static_cast<T*>(p.logits_grad) + t * p.experts;
  const float* const weight = p.weight + t * p.topk;
  const float* const weight_grad = p.weight_grad != nullptr ? p.weight_grad + t * p.topk : nullptr;
  const float lse = p.lse[t];
  const RowGradient g = row_gradient(p, t, x);
  float share = 0.0f;
  for (int j = lane; weight_grad != nullptr && j < topk; j += kWarp) share += weight[j] * weight_grad[j];
  share = warp_sum(share);
  const float others = p.normalized ? 0.0f : share;
#pragma unroll 4
  for (int e = lane; e < experts; e += kWarp) {
    out[e] = from_float<T>(expf(to_float(x[e]) - lse) * (g.of_probability(e) - others));
  }
  if (weight_grad == nullptr) return;
  __syncwarp();  // other lanes write some of these anew
  for (int j = lane; j < topk; j += kWarp) {
    const int e = p.expert[t * p.topk + j];
    out[e] = from_float<T>(expf(to_float(x[e]) - lse) * g.of_probability(e) +
                           weight[j] * (weight_grad[j] - share));
  }
}

// ---- Balance ----

constexpr int kSumThreads = 512;

/// Block (x, y): sample x, experts from y * blockDim.x on; blockDim.y tokens at a time. Both dimensions are
/// powers of two.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) route_sums_kernel(const RouteSums p) {
  __shared__ float parts[kSumThreads];
  __shared__ int counts[kWarp];
  const int width = static_cast<int>(blockDim.x), lines = static_cast<int>(blockDim.y);
  const int line = static_cast<int>(threadIdx.y), column = static_cast<int>(threadIdx.x);
  const int thread = line * width + column;
  const std::int64_t sample = blockIdx.x, positions = p.tokens / p.batch;
  const std::int64_t first = std::int64_t{blockIdx.y} * width, expert = first + column;
  const auto counts_in = [&](std::int64_t t) { return p.counted == nullptr || p.counted[t] != 0; };
  float sum = 0.0f;
  if (expert < p.experts) {
    const T* const x = static_cast<const T*>(p.logits) + expert;
#pragma unroll 4
    for (std::int64_t i = line; i < positions; i += lines) {
      const std::int64_t t = i * p.batch + sample;
      const float probability = expf(to_float(x[t * p.experts]) - p.lse[t]);
      sum += counts_in(t) ? probability : 0.0f;
    }
  }
  parts[thread] = sum;
  if (thread < kWarp) counts[thread] = 0;
  for (int half = lines / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line < half) parts[thread] += parts[thread + half * width];
  }
  __syncthreads();
  for (std::int64_t i = thread; i < positions; i += kSumThreads) {
    const std::int64_t t = i * p.batch + sample;
    if (!counts_in(t)) continue;
    for (std::int64_t j = t * p.topk; j < (t + 1) * p.topk; ++j) {
      const std::int64_t own = p.expert[j] - first;
      if (own >= 0 && own < width) atomicAdd(&counts[own], 1);
    }
  }
  __syncthreads();
  if (line != 0 || expert >= p.experts) return;
  p.probability[sample * p.experts + expert] = parts[thread];
  p.chosen[sample * p.experts + expert] = static_cast<float>(counts[column]);
}

/// A block for a sample.
__global__ void __launch_bounds__(kThreads) balance_kernel(const BalanceForward p) {
  __shared__ double warps[kWarp];
  const std::int64_t first = blockIdx.x * p.experts;
  double choices = 0.0, value = 0.0;
  for (std::int64_t e = threadIdx.x; e < p.experts; e += kThreads)
    choices += static_cast<double>(p.chosen[first + e]);
  choices = block_sum(choices, warps);
  const double scale = choices == 0.0 ? 0.0 : static_cast<double>(p.experts * p.topk) / (choices * choices);
  for (std::int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    const auto factor = static_cast<float>(scale * static_cast<double>(p.chosen[first + e]));
    p.factor[first + e] = factor;
    value += static_cast<double>(factor) * static_cast<double>(p.probability[first + e]);
  }
  value = block_sum(value, warps);
  if (threadIdx.x == 0) p.value[blockIdx.x] = choices == 0.0 ? 0.0f : static_cast<float>(value);
}

// ---- Slots ----

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortBatch = 4;  // slots of a thread that are in flight together

/// A block for an expert; each warp has a stretch of the slots.
__global__ void __launch_bounds__(kSortThreads) sort_slots_kernel(const SortSlots p) {
  __shared__ int before[kSortWarps], own[kSortWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = own_lane();
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const std::int64_t stretch = ceil_div(p.slots, std::int64_t{kSortThreads}) * kWarp;
  const std::int64_t begin = warp * stretch, end = min(begin + stretch, p.slots);
  int lower = 0, equal = 0;
#pragma unroll 8
  for (std::int64_t i = begin + lane; i < end; i += kWarp) {
    const std::int32_t e = p.expert[i];
    lower += e < expert ? 1 : 0;
    equal += e == expert ? 1 : 0;
  }
  lower = detail::warp_reduce(lower, detail::Plus{});
  equal = detail::warp_reduce(equal, detail::Plus{});
  if (lane == 0) {
    before[warp] = lower;
    own[warp] = equal;
  }
  __syncthreads();
  int place = 0, count = 0;  // of the warp's next slot of this expert; of all its slots
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    place += before[w] + (w < warp ? own[w] : 0);
    count += own[w];
  }
  if (threadIdx.x == 0) p.count[expert] = count;
  for (std::int64_t i = begin + lane; i - lane < end; i += kSortBatch * kWarp) {
    std::int32_t e[kSortBatch];
#pragma unroll
    for (int k = 0; k < kSortBatch; ++k) e[k] = i + k * kWarp < end ? p.expert[i + k * kWarp] : -1;
#pragma unroll
    for (int k = 0; k < kSortBatch; ++k) {
      const unsigned ballot = __ballot_sync(kAll, e[k] == expert);
      if (e[k] == expert) {
        const int at = place + __popc(ballot & ((1u << lane) - 1u));
        const auto slot = static_cast<std::int32_t>(i + k * kWarp);
        p.row[slot] = at;
        p.slot[at] = slot;
        p.token[at] = slot / static_cast<std::int32_t>(p.topk);
      }
      place += __popc(ballot);
    }
  }
}

/// blockDim.y tokens at a time, blockDim.x packs of each.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) combine_slots_kernel(const CombineSlots p) {
  constexpr int N = kPack<T>;
  const std::int64_t t = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= p.tokens) return;
  const int cols = static_cast<int>(p.cols), step = static_cast<int>(blockDim.x) * N;
  const T* const x = static_cast<const T*>(p.x);
  for (int i = static_cast<int>(threadIdx.x) * N; i < cols; i += step) {
    float total[N] = {};
#pragma unroll 4
    for (std::int64_t j = t * p.topk; j < (t + 1) * p.topk; ++j) {
      float v[N];
      read<kWhole>(x + p.row[j] * p.cols, i, cols, v);
      const float weight = p.weight != nullptr ? p.weight[j] : 1.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += weight * v[k];
    }
    write<kWhole>(static_cast<T*>(p.y) + t * p.cols, i, cols, total);
  }
}

/// A block for a row.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) weigh_rows_kernel(const WeighRows p) {
  constexpr int N = kPack<T>;
  __shared__ float warps[kWarp];
  const std::int64_t r = blockIdx.x;
  const int cols = static_cast<int>(p.cols), step = static_cast<int>(blockDim.x) * N;
  T* const x = static_cast<T*>(p.x) + r * p.cols;
  T* const y = static_cast<T*>(p.y) + r * p.cols;
  const float weight = p.weight[r];
  float dot = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) * N; i < cols; i += step) {
    float a[N], b[N];
    read<kWhole>(x, i, cols, a);
    read<kWhole>(y, i, cols, b);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      dot += a[k] * b[k];
      a[k] *= weight;
      b[k] *= weight;
    }
    write<kWhole>(x, i, cols, a);
    write<kWhole>(y, i, cols, b);
  }
  dot = block_sum(dot, warps);
  if (threadIdx.x == 0) p.dot[r] = dot;
}

/// A warp for each token.
template <typename Kernel, typename Params>
void launch_tokens(Kernel kernel, const Params& params, const Launch& where) {
  const auto blocks = ceil_div(params.tokens, std::int64_t{kTokens});
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, where, params);
}

/// Threads for the packs of a row.
template <typename T>
unsigned threads_for(std::int64_t cols) {
  const auto warps = ceil_div(cols, std::int64_t{kPack<T> * kWarp});
  return static_cast<unsigned>(std::clamp<std::int64_t>(warps * kWarp, kWarp, kThreads));
}

}  // namespace

void route_forward(const RouteForward& params, const Launch& where) {
  visit_float(params.dtype, "logits of a router",
              [&](auto t) { launch_tokens(route_forward_kernel<decltype(t)>, params, where); });
}

void route_backward(const RouteBackward& params, const Launch& where) {
  visit_float(params.dtype, "logits of a router",
              [&](auto t) { launch_tokens(route_backward_kernel<decltype(t)>, params, where); });
}

void route_sums(const RouteSums& params, const Launch& where) {
  unsigned width = 1;
  while (width < kWarp && width < params.experts) width *= 2;
  const dim3 grid(static_cast<unsigned>(params.batch),
                  static_cast<unsigned>(ceil_div(params.experts, std::int64_t{width})));
  visit_float(params.dtype, "logits of a router", [&](auto t) {
    launch(route_sums_kernel<decltype(t)>, grid, dim3(width, kSumThreads / width), 0, where, params);
  });
}

void balance_forward(const BalanceForward& params, const Launch& where) {
  launch(balance_kernel, dim3(static_cast<unsigned>(params.batch)), dim3(kThreads), 0, where, params);
}

void sort_slots(const SortSlots& params, const Launch& where) {
  launch(sort_slots_kernel, dim3(static_cast<unsigned>(params.experts)), dim3(kSortThreads), 0, where,
         params);
}

void combine_slots(const CombineSlots& params, const Launch& where) {
  visit_float(params.dtype, "rows of slots", [&](auto t) {
    using T = decltype(t);
    const bool whole = in_packs<kPack<T>>(static_cast<const T*>(params.x), params.cols) &&
                       in_packs<kPack<T>>(static_cast<const T*>(params.y), params.cols);
    const unsigned width = threads_for<T>(params.cols);
    const dim3 block(width, kThreads / width);
    const auto blocks = ceil_div(params.tokens, std::int64_t{block.y});
    launch(whole ? combine_slots_kernel<T, true> : combine_slots_kernel<T, false>,
           dim3(static_cast<unsigned>(blocks)), block, 0, where, params);
  });
}

void weigh_rows(const WeighRows& params, const Launch& where) {
  visit_float(params.dtype, "rows to weigh", [&](auto t) {
    using T = decltype(t);
    const bool whole = in_packs<kPack<T>>(static_cast<const T*>(params.x), params.cols) &&
                       in_packs<kPack<T>>(static_cast<const T*>(params.y), params.cols);
    launch(whole ? weigh_rows_kernel<T, true> : weigh_rows_kernel<T, false>,
           dim3(static_cast<unsigned>(params.rows)), dim3(threads_for<T>(params.cols)), 0, where, params);
  });
}

TESSERA_KERNEL_FILE(balance_kernel);

}  // namespace tessera::kernels::cuda
