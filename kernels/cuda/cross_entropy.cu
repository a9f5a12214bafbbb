/// Softmax cross-entropy, a block per row. Forward reads the logits once (online softmax: the sum so far is
/// rescaled when the maximum rises), backward reads and writes them once. Rows may begin anywhere: what lies
/// before and behind their whole 16-byte packs goes element by element.

#include "kernels/api/cross_entropy.hpp"

#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr float kElsewhere = INFINITY;
constexpr int kMaxThreads = 256;
constexpr int kBatch = 4;  // packs that a thread has in flight

/// Calls element(i) and batch<n>(i) so that thread t's share of columns [0, cols) is taken once: n packs, the
/// first at column i, the others `blockDim.x` packs apart.
template <typename T, typename Element, typename Batch>
__device__ __forceinline__ void for_columns(const T* row, std::int64_t cols, Element element, Batch batch) {
  constexpr int N = kPack<T>;
  const auto thread = static_cast<std::int64_t>(threadIdx.x), threads = static_cast<std::int64_t>(blockDim.x);
  const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
  const std::int64_t rest = (N - beyond) % N, head = rest < cols ? rest : cols;
  const std::int64_t packs = (cols - head) / N;
  // Less than a pack at either end, and a block has more threads than a pack has elements.
  if (thread < head) element(thread);
  std::int64_t pack = thread;
  for (; pack + (kBatch - 1) * threads < packs; pack += kBatch * threads) {
    batch.template operator()<kBatch>(head + pack * N);
  }
  for (; pack < packs; pack += threads) batch.template operator()<1>(head + pack * N);
  if (head + packs * N + thread < cols) element(head + packs * N + thread);
}

/// n packs of a row, `blockDim.x` packs apart.
template <int n, typename T>
struct Packs {
  static constexpr int N = kPack<T>;
  float x[n][N];

  __device__ __forceinline__ explicit Packs(const T* p) {
#pragma unroll
    for (int k = 0; k < n; ++k) load(p + std::int64_t{k} * blockDim.x * N, x[k]);
  }
  __device__ __forceinline__ void write(T* p) const {
#pragma unroll
    for (int k = 0; k < n; ++k) store(p + std::int64_t{k} * blockDim.x * N, x[k]);
  }
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) visit(x[k][j]);
    }
  }
};

/// e^x. At 16 bits a logit the GPU has a dozen instructions for each while memory brings the next: no more
/// exact an exponential fits. Its error, that of rounding x log2(e), is |x| 2^-24 of a term e^x <= 1.
__device__ __forceinline__ float exponential(float x) { return exp2f(x * 1.4426950408889634f); }

/// Sum of e^(x - top) over what was seen, with its maximum.
struct OnlineSum {
  float top = -INFINITY, sum = 0.0f;

  __device__ __forceinline__ void raise(float new_top) {
    if (new_top > top) {
      sum *= exponential(top - new_top);
      top = new_top;
    }
  }
  __device__ __forceinline__ void add(float x) {
    // While every logit is -inf, e^(x - 0) gives the zeros that e^(x - top) would not.
    sum += exponential(x - (top == -INFINITY ? 0.0f : top));
  }
};

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) cross_entropy_forward_kernel(const CrossEntropyForward p) {
  __shared__ float tops[kWarp];
  __shared__ double sums[kWarp];
  for (std::int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T* const x = static_cast<const T*>(p.logits) + r * p.ld;
    const std::int32_t label = p.labels[r];
    const std::int64_t column = label - p.vocab_begin;
    const bool here = column >= 0 && column < p.cols;
    const float at_label = threadIdx.x == 0 && here ? to_float(x[column]) : 0.0f;
    OnlineSum own;
    for_columns(
        x, p.cols,
        [&](std::int64_t i) {
          const float value = to_float(x[i]);
          own.raise(value);
          own.add(value);
        },
        [&]<int n>(std::int64_t i) {
          Packs<n, T> packs(x + i);
          float top = -INFINITY;
          packs.each([&](float value) { top = fmaxf(top, value); });
          own.raise(top);
          packs.each([&](float value) { own.add(value); });
        });
    const float top = block_max(own.top, tops);
    // Equal infinities have no difference; of -inf the sum is 0 or, after a NaN, NaN.
    const float share = own.top == top ? own.sum : own.sum * exponential(own.top - top);
    const double log_sum = log(block_sum(static_cast<double>(share), sums));
    if (threadIdx.x != 0) continue;
    const auto log_top = static_cast<double>(top);
    p.lse[r] = static_cast<float>(log_top + log_sum);
    if (label == kIgnoredLabel) {
      p.loss[r] = 0.0f;
    } else if (!here) {
      p.loss[r] = kElsewhere;
    } else {  // apart, because the sum with a large top would lose log_sum
      p.loss[r] = static_cast<float>(log_top - static_cast<double>(at_label) + log_sum);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) cross_entropy_backward_kernel(const CrossEntropyBackward p) {
  constexpr int N = kPack<T>;
  for (std::int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    T* const x = static_cast<T*>(p.logits) + r * p.ld;
    const std::int32_t label = p.labels[r];
    const std::int64_t kept = label == kIgnoredLabel ? 0 : p.cols;
    const std::int64_t column = kept == 0 ? -1 : label - p.vocab_begin;
    const float lse = p.lse[r], upstream = p.upstream[r];
    // expm1, because e^(x - lse) - 1 cancels where the model is right.
    const auto gradient = [&](float value, bool at_label) {
      return upstream * (at_label ? expm1f(value - lse) : expf(value - lse));
    };
    for_columns(
        x, kept, [&](std::int64_t i) { x[i] = from_float<T>(gradient(to_float(x[i]), i == column)); },
        [&]<int n>(std::int64_t i) {
          Packs<n, T> packs(x + i);
          float at_label = 0.0f;
          const std::int64_t inside = column - i, step = std::int64_t{blockDim.x} * N;
          const bool has_label = inside >= 0 && inside < n * step && inside % step < N;
          if (has_label) at_label = gradient(to_float(x[column]), true);
          packs.each([&](float& value) { value = gradient(value, false); });
          packs.write(x + i);
          if (has_label) x[column] = from_float<T>(at_label);
        });
    const auto zero = [&](std::int64_t i) { x[kept + i] = from_float<T>(0.0f); };
    for_columns(x + kept, p.ld - kept, zero, [&]<int n>(std::int64_t i) {
      const float zeros[N] = {};
#pragma unroll
      for (int k = 0; k < n; ++k) store(x + kept + i + std::int64_t{k} * blockDim.x * N, zeros);
    });
  }
}

__global__ void combine_kernel(const CrossEntropyCombine p) {
  const std::int64_t r = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r >= p.rows) return;
  const auto loss = [&](std::int64_t part) { return p.partial[2 * part * p.rows + r]; };
  const auto lse = [&](std::int64_t part) {
    return static_cast<double>(p.partial[(2 * part + 1) * p.rows + r]);
  };
  double top = -INFINITY, sum = 0.0;
  std::int64_t owner = -1;
  for (std::int64_t part = 0; part < p.parts; ++part) {
    if (lse(part) > top) top = lse(part);
    if (loss(part) != kElsewhere) owner = part;  // so a NaN is handed on
  }
  for (std::int64_t part = 0; part < p.parts; ++part) sum += exp(lse(part) - top);
  const double log_sum = log(sum);
  p.lse[r] = static_cast<float>(top + log_sum);
  if (p.labels[r] == kIgnoredLabel) {
    p.loss[r] = 0.0f;
  } else if (owner < 0) {
    p.loss[r] = kElsewhere;
  } else {
    // Small terms are added to the owner's loss, however large the logits are: nothing cancels.
    p.loss[r] = static_cast<float>(static_cast<double>(loss(owner)) + ((top - lse(owner)) + log_sum));
  }
}

/// A block per row, of as many threads as the row has packs.
template <typename T, typename Kernel, typename Params>
void launch_rows(Kernel kernel, const Params& params, std::int64_t cols, const Launch& where) {
  const auto blocks = std::min<std::int64_t>(params.rows, 0x7fffffff);
  const auto warps = ceil_div(cols, std::int64_t{kPack<T> * kWarp});
  const auto threads = std::clamp<std::int64_t>(warps * kWarp, kWarp, kMaxThreads);
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0, where, params);
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& params, const Launch& where) {
  visit_float(params.dtype, "logits", [&](auto t) {
    launch_rows<decltype(t)>(cross_entropy_forward_kernel<decltype(t)>, params, params.cols, where);
  });
}

void cross_entropy_combine(const CrossEntropyCombine& params, const Launch& where) {
  const auto blocks = ceil_div(params.rows, std::int64_t{kMaxThreads});
  launch(combine_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kMaxThreads), 0, where, params);
}

void cross_entropy_backward(const CrossEntropyBackward& params, const Launch& where) {
  visit_float(params.dtype, "logits", [&](auto t) {
    launch_rows<decltype(t)>(cross_entropy_backward_kernel<decltype(t)>, params, params.ld, where);
  });
}

TESSERA_KERNEL_FILE(combine_kernel);

}  // namespace tessera::kernels::cuda
