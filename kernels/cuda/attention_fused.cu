/// Forward (Dao, "FlashAttention-2"): a block takes 64 queries of a head and goes over the keys they see, 64
/// at a time, the next ones on their way meanwhile. Scores stay in the registers of the warp that has the
/// queries; its sums are rescaled where a larger score comes.

#include <climits>
#include <cstdlib>

#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/attention_fused.cuh"

namespace tessera::kernels::cuda {
namespace {

using namespace fused;

struct Forward {
  Problem problem;
  AttentionForward call;
};

/// Largest scores and sums of a lane's two rows.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  /// Scores become weights, relative to the largest so far; `sums` of the keys before are made so too.
  template <int N>
  __device__ void add(mma::Sums (&x)[kTile / 8], mma::Sums (&sums)[N]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = top[half];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) largest = fmaxf(largest, fmaxf(x[n][half * 2], x[n][half * 2 + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float reference = largest == -INFINITY ? 0.0f : largest;  // any number serves who sees nothing
      const float before = exp2f(top[half] - reference);
      top[half] = largest;
      sum[half] *= before;
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n][half * 2] *= before, sums[n][half * 2 + 1] *= before;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          x[n][i] = exp2f(x[n][i] - reference);
          sum[half] += x[n][i];
        }
      }
    }
  }

  /// A lane has added up a quarter of its rows.
  __device__ void finish() {
#pragma unroll
    for (float& each : sum) {
      each += __shfl_xor_sync(0xffffffffu, each, 1);
      each += __shfl_xor_sync(0xffffffffu, each, 2);
    }
  }
};

/// A block for a tile of queries of a head: the last tiles first, which see most under a causal mask.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads) fused_forward(const Forward p) {
  TESSERA_DYNAMIC_SHARED(T, tiles);
  const AttentionShape& s = p.problem.shape;
  const std::int64_t rows = s.batch * s.heads, row = blockIdx.x % rows, batch = row / s.heads;
  const std::int64_t head = row % s.heads, kv = head / (s.heads / s.kv_heads);
  const int tile = static_cast<int>(p.problem.query_tiles - 1 - blockIdx.x / rows), query0 = tile * kTile;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  T* const q = tiles;
  T* const keys[2] = {tiles + kElements<D>, tiles + 2 * kElements<D>};
  T* const values[2] = {tiles + 3 * kElements<D>, tiles + 4 * kElements<D>};
  const T* const k = head_of<T>(p.call.k, s.k_stride, batch, kv);
  const T* const v = head_of<T>(p.call.v, s.v_stride, batch, kv);
  const auto fetch = [&](int key0, int to) {
    copy_tile<T, D>(keys[to], k, s.k_stride.seq, key0, s.seq_k, s.head_dim);
    copy_tile<T, D>(values[to], v, s.v_stride.seq, key0, s.seq_k, s.head_dim);
  };
  const KeyRange seen = p.problem.seen[batch * p.problem.query_tiles + tile];
  copy_tile<T, D>(q, head_of<T>(p.call.q, s.q_stride, batch, head), s.q_stride.seq, query0, s.seq_q,
                  s.head_dim);
  const int begin = seen.begin / kTile * kTile;
  if (seen.end > begin) fetch(begin, 0);
  commit_copies();

  const QueryRows queries(p.problem, batch, head, query0 + warp * kRows);
  Softmax softmax;
  mma::Sums o[D / 8];
  clear(o);
  int now = 0;
  for (int key0 = begin; key0 < seen.end; key0 += kTile, now ^= 1) {
    if (key0 + kTile < seen.end) fetch(key0 + kTile, now ^ 1);
    commit_copies();
    await_copies<1>();
    __syncthreads();
    mma::Sums x[kTile / 8];
    multiply_rows<T, D>(q + warp * kRows * kStride<D>, keys[now], x);
    queries.score(p.problem, key0, x);
    softmax.add(x, o);
    if (s.dropout != 0.0f) {
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const unsigned kept = queries.kept(p.problem, key0, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = (kept >> i & 1u) != 0 ? x[n][i] : 0.0f;
      }
    }
    add_weighted<T, D>(x, values[now], o);
    __syncthreads();  // what was read is overwritten next
  }
  softmax.finish();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.sum[half];
    factor[half] = sum == 0.0f ? 0.0f : p.problem.kept / sum;
    if (p.call.lse == nullptr || threadIdx.x % 4 != 0 || queries.query[half] >= s.seq_q) continue;
    p.call.lse[row * s.seq_q + queries.query[half]] =
        sum == 0.0f ? -INFINITY : (softmax.top[half] + log2f(sum)) * kLn2;
  }
  T* const to = const_cast<T*>(head_of<T>(p.call.o, s.o_stride, batch, head));
  store_rows<T, D>(o, to, s.o_stride.seq, query0 + warp * kRows, s.seq_q, s.head_dim, factor);
}

}  // namespace

namespace fused {
namespace {

/// A warp for a tile of queries.
__global__ void __launch_bounds__(kThreads) find_seen(const Problem p, KeyRange* seen) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (number >= p.shape.batch * p.query_tiles) return;
  const std::int64_t batch = number / p.query_tiles, query0 = number % p.query_tiles * kTile;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // As floats, which the largest of a warp is taken of: exact up to 2^24 keys.
  float begin = -INFINITY, end = 0.0f;
  for (std::int64_t query = query0 + lane; query < query0 + kTile && query < p.shape.seq_q; query += kWarp) {
    const KeyRange keys = p.ranges[batch * p.shape.seq_q + query];
    if (keys.begin >= keys.end) continue;
    begin = fmaxf(begin, -static_cast<float>(keys.begin));
    end = fmaxf(end, static_cast<float>(keys.end));
  }
  begin = warp_max(begin);
  end = warp_max(end);
  if (lane == 0)
    seen[number] =
        end > 0.0f ? KeyRange{static_cast<std::int32_t>(-begin), static_cast<std::int32_t>(end)} : KeyRange{};
}

/// Turns a table of biases [query - key + seq_k - 1, heads] to rows of a head by distance, in the units of
/// scores; zeros for what lies beyond the operands.
__global__ void __launch_bounds__(kThreads) spread_biases(const Problem p) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, head = blockIdx.y;
  if (at >= p.distances()) return;
  const std::int64_t row = p.distance_at(0) - at + p.shape.seq_k - 1;
  const bool there = row >= 0 && row < p.shape.seq_q + p.shape.seq_k - 1;
  p.biases[head * p.distances() + at] = there ? p.shape.bias[row * p.shape.heads + head] * kLog2E : 0.0f;
}

}  // namespace

Problem problem_of(const AttentionShape& shape, DeviceArena& arena) {
  Problem p{.shape = shape,
            .ranges = arena.take<KeyRange>(shape.batch * shape.seq_q),
            .seen = nullptr,
            .query_tiles = ceil_div(shape.seq_q, std::int64_t{kTile}),
            .key_tiles = ceil_div(shape.seq_k, std::int64_t{kTile}),
            .biases = nullptr,
            .scale = shape.scale * kLog2E,
            .cap = shape.softcap * kLog2E,
            .kept = 1.0f / (1.0f - shape.dropout),
            .threshold = DropoutSpec{shape.dropout_key, shape.dropout}.threshold()};
  p.seen = arena.take<KeyRange>(shape.batch * p.query_tiles);
  if (shape.bias != nullptr) p.biases = arena.take(shape.heads * p.distances());
  return p;
}

void prepare(const Problem& p, const Launch& where) {
  key_ranges(p.shape, const_cast<KeyRange*>(p.ranges), where);
  const std::int64_t blocks = ceil_div(p.shape.batch * p.query_tiles, std::int64_t{kWarps});
  launch(find_seen, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, where, p,
         const_cast<KeyRange*>(p.seen));
  if (p.biases == nullptr) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.distances(), std::int64_t{kThreads})),
                  static_cast<unsigned>(p.shape.heads));
  launch(spread_biases, grid, dim3(kThreads), 0, where, p);
}

}  // namespace fused

bool fuses(const AttentionShape& s) {
  const auto whole = [](const HeadStrides& x) {
    return x.seq % 8 == 0 && x.batch % 8 == 0 && x.head % 8 == 0;
  };
  if (s.dtype == DType::f32 || s.head_dim % 8 != 0 || s.head_dim > 128 || s.pages) return false;
  constexpr std::int64_t kLongest = std::int64_t{1} << 24;  // positions are counted in ints and floats
  if (s.seq_q < 2 || s.seq_q > kLongest || s.seq_k < 1 || s.seq_k > kLongest) return false;
  if (s.batch < 1 || s.kv_heads < 1 || std::abs(s.query_offset) > kLongest) return false;
  if (!whole(s.q_stride) || !whole(s.k_stride) || !whole(s.v_stride) || !whole(s.o_stride)) return false;
  return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 8;
}

std::size_t fused_attention_forward_workspace(const AttentionShape& shape) {
  DeviceArena arena(nullptr);
  problem_of(shape, arena);
  return arena.bytes();
}

void fused_attention_forward(const AttentionForward& call, const Launch& where) {
  const AttentionShape& s = call.shape;
  DeviceArena arena(call.workspace);
  const Forward p{problem_of(s, arena), call};
  prepare(p.problem, where);
  const std::int64_t blocks = s.batch * s.heads * p.problem.query_tiles;
  TESSERA_CHECK(blocks <= INT_MAX, "attention: ", blocks,
                " tiles of queries in one call; pass fewer samples");
  for_sizes(s, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int D = decltype(width)::value;
    launch(fused_forward<T, D>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
           5 * kElements<D> * sizeof(T), where, p);
  });
}

TESSERA_KERNEL_FILE(fused_forward<bfloat16, 64>);

}  // namespace tessera::kernels::cuda
