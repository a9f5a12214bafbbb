#include "kernels/api/optimizer.hpp"

#include <algorithm>

#include "kernels/cuda/elementwise.cuh"

namespace tessera::kernels::cuda {
namespace {

/// Blocks that run at once on a multiprocessor: as many as are launched, so that the factors are read once
/// and not again by every wave.
constexpr int kResidentBlocks = 4;

/// The group of the block that element i lies in: the same for all elements of a pack.
__device__ __forceinline__ std::uint8_t group_of(const GroupsOfElements& groups, std::int64_t i) {
  return groups.of_block[static_cast<std::uint64_t>(i) / kGroupBlock];
}

/// Stand for the element type of the compute copy where there is none, and where main weights are split.
struct NoModel {};
struct Split {};

/// Split main weights of N elements, moved by one access each.
template <int N>
struct SplitPack {
  using Model = detail::Chunk<bfloat16, N>;
  using Low = detail::Chunk<std::uint16_t, N>;

  static __device__ __forceinline__ void load(const bfloat16* model, const std::uint16_t* low,
                                              float (&main)[N]) {
    Model models;
    Low lows;
    const auto* model_word = reinterpret_cast<const decltype(models.word)*>(model);
    const auto* low_word = reinterpret_cast<const decltype(lows.word)*>(low);
    detail::check_access(model_word);
    detail::check_access(low_word);
    models.word = *model_word;
    lows.word = *low_word;
#pragma unroll
    for (int j = 0; j < N; ++j) main[j] = SplitWeight{models.items[j], lows.items[j]}.join();
  }
  static __device__ __forceinline__ void store(bfloat16* model, std::uint16_t* low, const float (&main)[N]) {
    Model models;
    Low lows;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const SplitWeight parts = SplitWeight::split(main[j]);
      models.items[j] = parts.model;
      lows.items[j] = parts.low;
    }
    auto* model_word = reinterpret_cast<decltype(models.word)*>(model);
    auto* low_word = reinterpret_cast<decltype(lows.word)*>(low);
    detail::check_access(model_word);
    detail::check_access(low_word);
    *model_word = models.word;
    *low_word = lows.word;
  }
};

/// The main weights of an update, and after it their compute copy.
template <typename Model, typename Params, int N>
__device__ __forceinline__ void load_main(const Params& p, std::int64_t i, float (&main)[N]) {
  if constexpr (std::is_same_v<Model, Split>) {
    SplitPack<N>::load(static_cast<const bfloat16*>(p.model) + i, p.low + i, main);
  } else {
    load(p.main + i, main);
  }
}
template <typename Model, typename Params, int N>
__device__ __forceinline__ void store_main(const Params& p, std::int64_t i, const float (&main)[N]) {
  if constexpr (std::is_same_v<Model, Split>) {
    SplitPack<N>::store(static_cast<bfloat16*>(p.model) + i, p.low + i, main);
  } else {
    store(p.main + i, main);
    if constexpr (!std::is_same_v<Model, NoModel>) store(static_cast<Model*>(p.model) + i, main);
  }
}

struct SplitMainOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = PackOf<N>;
  SplitMain p;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(p.main + i, v.x);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
    SplitPack<N>::store(p.model + i, p.low + i, v.x);
  }
};

struct JoinMainOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = PackOf<N>;
  JoinMain p;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    SplitPack<N>::load(p.model + i, p.low + i, v.x);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
    cuda::store(p.main + i, v.x);
  }
};

template <typename Model>
struct AdamOp {
  // Two packs of five float buffers do not fit into the registers, nor two of split weights.
  static constexpr int kUnroll = std::is_same_v<Model, float> || std::is_same_v<Model, Split> ? 1 : 2;
  template <int N>
  struct Values {
    float grad[N], main[N], m[N], v[N];
    std::uint8_t group;
  };
  using Factors = AdamFactors;
  Adam p;
  float grad_factor;
  const Factors* factors;

  __device__ static const Factors& factors_of(const GroupFactors& group) { return group.adam; }

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& x) const {
    x.group = group_of(p.groups, i);
    cuda::load(p.grad + i, x.grad);
    load_main<Model>(p, i, x.main);
    cuda::load(p.m + i, x.m);
    cuda::load(p.v + i, x.v);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& x) const {
    if (x.group == kNoGroup) return;
    const Factors& f = factors[x.group];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = x.grad[j] * grad_factor + f.l2 * x.main[j];
      x.m[j] = x.m[j] + f.blend1 * (g - x.m[j]);
      x.v[j] = x.v[j] * f.beta2 + (f.blend2 * g) * g;
      x.main[j] = x.main[j] * f.decay - f.step * x.m[j] / (sqrtf(x.v[j]) * f.root + f.eps);
    }
    cuda::store(p.m + i, x.m);
    cuda::store(p.v + i, x.v);
    store_main<Model>(p, i, x.main);
  }
};

template <typename Model, bool kMomentum>
struct SgdOp {
  static constexpr int kUnroll = 2;
  template <int N>
  struct Values {
    float grad[N], main[N], momentum[N];
    std::uint8_t group;
  };
  using Factors = SgdFactors;
  Sgd p;
  float grad_factor;
  const Factors* factors;

  __device__ static const Factors& factors_of(const GroupFactors& group) { return group.sgd; }

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& x) const {
    x.group = group_of(p.groups, i);
    cuda::load(p.grad + i, x.grad);
    load_main<Model>(p, i, x.main);
    if constexpr (kMomentum) cuda::load(p.buffer + i, x.momentum);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& x) const {
    if (x.group == kNoGroup) return;
    const Factors& f = factors[x.group];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float update = x.grad[j] * grad_factor + f.decay * x.main[j];
      if (kMomentum && f.momentum != 0.0f) {
        x.momentum[j] = f.momentum * x.momentum[j] + update;
        update = p.nesterov ? update + f.momentum * x.momentum[j] : x.momentum[j];
      }
      x.main[j] -= f.lr * update;
    }
    if constexpr (kMomentum) cuda::store(p.buffer + i, x.momentum);
    store_main<Model>(p, i, x.main);
  }
};

template <typename Op, int N, typename Params>
__global__ void __launch_bounds__(kElementwiseThreads, kResidentBlocks) update_kernel(Params p) {
  __shared__ typename Op::Factors factors[kMostGroups];
  if (p.state->skip != 0) return;
  for (int group = static_cast<int>(threadIdx.x); group < p.groups.count; group += kElementwiseThreads)
    factors[group] = Op::factors_of(p.groups.factors[group]);
  __syncthreads();
  const Op op{p, static_cast<float>(p.state->grad_factor), factors};
  for_packs<N>(op, p.n);
}

template <typename Op, int N, typename Params>
void launch_update(const Params& p, const Launch& where) {
  constexpr std::int64_t kPerBlock =
      static_cast<std::int64_t>(kElementwiseThreads) * kElementwiseUnroll<Op, N> * N;
  const std::int64_t blocks =
      std::min<std::int64_t>(ceil_div(p.n, kPerBlock), std::int64_t{kResidentBlocks} * multiprocessors());
  launch(update_kernel<Op, N, Params>, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseThreads), 0,
         where, p);
}

/// Calls `run(tag)` with the element type of the compute copy, or NoModel or Split.
template <typename Params, typename Run>
void with_model(const Params& p, const char* what, Run&& run) {
  if (p.low != nullptr) return run(Split{});
  if (p.model == nullptr) return run(NoModel{});
  visit_float(p.model_dtype, what, run);
}

template <typename Op, typename Params>
void update(const Params& p, bool aligned, const Launch& where) {
  if (aligned && is_aligned(p.grad, 16) && is_aligned(p.main, 16) && is_aligned(p.low, 8) &&
      is_aligned(p.model, 4 * std::min<std::size_t>(4, size_of(p.model_dtype)))) {
    launch_update<Op, kPack<float>>(p, where);
  } else {
    launch_update<Op, 1>(p, where);
  }
}

/// Applies `Op` to all of params.
template <typename Op, typename Params>
void each_weight(const Params& p, const Launch& where) {
  if (is_aligned(p.main, 16) && is_aligned(p.model, 8) && is_aligned(p.low, 8)) {
    each_pack<kPack<float>>(Op{p}, p.n, where);
  } else {
    each_pack<1>(Op{p}, p.n, where);
  }
}

__global__ void begin_update_kernel(BeginUpdate p) { p.run(); }

__global__ void __launch_bounds__(UpdateGroups::kMost) update_groups_kernel(UpdateGroups p) {
  const auto group = static_cast<int>(threadIdx.x);
  if (group < p.count) p.run(group);
}

}  // namespace

void begin_update(const BeginUpdate& params, const Launch& where) {
  launch(begin_update_kernel, dim3(1), dim3(1), 0, where, params);
}

void update_groups(const UpdateGroups& params, const Launch& where) {
  launch(update_groups_kernel, dim3(1), dim3(UpdateGroups::kMost), 0, where, params);
}

void split_main(const SplitMain& params, const Launch& where) { each_weight<SplitMainOp>(params, where); }

void join_main(const JoinMain& params, const Launch& where) { each_weight<JoinMainOp>(params, where); }

void adam(const Adam& params, const Launch& where) {
  const bool aligned = is_aligned(params.m, 16) && is_aligned(params.v, 16);
  with_model(params, "adam model",
             [&](auto model) { update<AdamOp<decltype(model)>>(params, aligned, where); });
}

void sgd(const Sgd& params, const Launch& where) {
  const bool aligned = is_aligned(params.buffer, 16);  // null is
  with_model(params, "sgd model", [&](auto model) {
    using Model = decltype(model);
    if (params.buffer != nullptr) {
      update<SgdOp<Model, true>>(params, aligned, where);
    } else {
      update<SgdOp<Model, false>>(params, aligned, where);
    }
  });
}

TESSERA_KERNEL_FILE(begin_update_kernel);

}  // namespace tessera::kernels::cuda
