/// Backward in two kernels, so that nothing is added up in whatever order blocks run: one has a tile of keys
/// and goes over the queries that see them (dK, dV), one a tile of queries and goes over their keys (dQ).
/// Both compute the scores anew: seven products where one kernel with atomic additions takes five.

#include <algorithm>
#include <climits>

#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/attention_fused.cuh"

namespace tessera::kernels::cuda {
namespace {

using namespace fused;

struct Backward {
  Problem problem;
  AttentionBackward call;
  float* deltas;  ///< [batch, heads, seq_q]: sums over features of o * d_o
  float* dbias;   ///< [batch, key_tiles, heads, distances]: what a tile of keys brings; null without a bias
};

/// The gradient of a score, from its probability, that of the probability after dropout, and what the row's
/// have in common.
__device__ float score_gradient(const Problem& p, float probability, float gradient, float delta,
                                float score) {
  const float capped = p.cap != 0.0f ? score / p.cap : 0.0f;  // whose cap's slope is 1 - its square
  return probability * (gradient - delta) * (1.0f - capped * capped);
}

/// A warp for a query of a head.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_outputs(const Backward p) {
  const AttentionShape& s = p.problem.shape;
  const std::int64_t count = s.batch * s.heads * s.seq_q, step = std::int64_t{gridDim.x} * kWarps;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; row < count; row += step) {
    const std::int64_t query = row % s.seq_q, head = row / s.seq_q % s.heads, batch = row / s.seq_q / s.heads;
    const std::int64_t at = query * s.o_stride.seq;
    const T* const o = head_of<T>(p.call.o, s.o_stride, batch, head) + at;
    const T* const d_o = head_of<T>(p.call.d_o, s.o_stride, batch, head) + at;
    float sum = 0.0f;
    for (int c = lane * 4; c < s.head_dim; c += kWarp * 4) {
      float x[4], y[4];
      load(o + c, x);
      load(d_o + c, y);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += x[i] * y[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) p.deltas[row] = sum;
  }
}

/// A block for a tile of queries of a head, as forward's.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads) fused_backward_queries(const Backward p) {
  TESSERA_DYNAMIC_SHARED(T, tiles);
  const AttentionShape& s = p.problem.shape;
  const std::int64_t rows = s.batch * s.heads, row = blockIdx.x % rows, batch = row / s.heads;
  const std::int64_t head = row % s.heads, kv = head / (s.heads / s.kv_heads);
  const int tile = static_cast<int>(p.problem.query_tiles - 1 - blockIdx.x / rows), query0 = tile * kTile;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  T* const q = tiles;
  T* const d_o = tiles + kElements<D>;
  T* const keys[2] = {tiles + 2 * kElements<D>, tiles + 3 * kElements<D>};
  T* const values[2] = {tiles + 4 * kElements<D>, tiles + 5 * kElements<D>};
  const T* const k = head_of<T>(p.call.k, s.k_stride, batch, kv);
  const T* const v = head_of<T>(p.call.v, s.v_stride, batch, kv);
  const auto fetch = [&](int key0, int to) {
    copy_tile<T, D>(keys[to], k, s.k_stride.seq, key0, s.seq_k, s.head_dim);
    copy_tile<T, D>(values[to], v, s.v_stride.seq, key0, s.seq_k, s.head_dim);
  };
  const KeyRange seen = p.problem.seen[batch * p.problem.query_tiles + tile];
  copy_tile<T, D>(q, head_of<T>(p.call.q, s.q_stride, batch, head), s.q_stride.seq, query0, s.seq_q,
                  s.head_dim);
  copy_tile<T, D>(d_o, head_of<T>(p.call.d_o, s.o_stride, batch, head), s.o_stride.seq, query0, s.seq_q,
                  s.head_dim);
  const int begin = seen.begin / kTile * kTile;
  if (seen.end > begin) fetch(begin, 0);
  commit_copies();

  const QueryRows queries(p.problem, batch, head, query0 + warp * kRows);
  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool there = queries.query[half] < s.seq_q;
    const std::int64_t at = row * s.seq_q + (there ? queries.query[half] : 0);
    lse[half] = there ? p.call.lse[at] * kLog2E : 0.0f;
    delta[half] = there ? p.deltas[at] : 0.0f;
  }
  mma::Sums dq[D / 8];
  clear(dq);
  int now = 0;
  for (int key0 = begin; key0 < seen.end; key0 += kTile, now ^= 1) {
    if (key0 + kTile < seen.end) fetch(key0 + kTile, now ^ 1);
    commit_copies();
    await_copies<1>();
    __syncthreads();
    mma::Sums x[kTile / 8], gradient[kTile / 8];
    multiply_rows<T, D>(q + warp * kRows * kStride<D>, keys[now], x);
    queries.score(p.problem, key0, x);
    multiply_rows<T, D>(d_o + warp * kRows * kStride<D>, values[now], gradient);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const unsigned kept = s.dropout != 0.0f ? queries.kept(p.problem, key0, n) : 0xfu;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool sees = x[n][i] != -INFINITY;
        const float probability = sees ? exp2f(x[n][i] - lse[i / 2]) : 0.0f;
        const float after = (kept >> i & 1u) != 0 ? gradient[n][i] * p.problem.kept : 0.0f;
        x[n][i] = sees ? score_gradient(p.problem, probability, after, delta[i / 2], x[n][i]) : 0.0f;
      }
    }
    add_weighted<T, D>(x, keys[now], dq);
    __syncthreads();  // what was read is overwritten next
  }
  T* const to = const_cast<T*>(head_of<T>(p.call.dq, s.q_stride, batch, head));
  const float factor[2] = {s.scale, s.scale};
  store_rows<T, D>(dq, to, s.q_stride.seq, query0 + warp * kRows, s.seq_q, s.head_dim, factor);
}

/// What a block of keys needs of a tile of queries, beside their rows.
struct QueryFacts {
  float lse[kTile], delta[kTile];
  KeyRange keys[kTile];
};

/// The tiles of queries, of all heads that read a KV head, which see some of a tile of keys.
struct Visits {
  const KeyRange* seen;  ///< of the sample
  int tiles, head0, key0, count;
  int first;  ///< of a head: those before it are too early under a causal mask

  __device__ int next(int at) const {
    for (; at < count; ++at) {
      const int tile = at % tiles;
      if (tile < first) at += first - tile;
      const KeyRange keys = seen[at % tiles];
      if (keys.begin < key0 + kTile && keys.end > key0) break;
    }
    return at;
  }
  __device__ int head(int at) const { return head0 + at / tiles; }
  __device__ int query0(int at) const { return at % tiles * kTile; }
};

/// Queries that a warp of keys takes at once: with wide heads there are no registers for more.
template <int D>
constexpr int kAtOnce = D > 64 ? kTile / 2 : kTile;

/// A warp's 16 keys against 8 N queries of a tile, from `first` on: products [keys, queries] become
/// probabilities after dropout, and the gradients of those become the scores'.
template <int N>
__device__ __forceinline__ void turn_to_gradients(const Problem& p, const QueryFacts& facts,
                                                  std::int64_t batch, std::int64_t head, int query0,
                                                  int first, int key0, mma::Sums (&x)[N],
                                                  mma::Sums (&gradient)[N]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 4, column = lane % 4 * 2;
  const HeadBias bias(p, head);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    unsigned kept[4] = {1, 1, 1, 1};
    if (p.shape.dropout != 0.0f) {
      // A lane draws for one of the 8 queries and 4 of the 16 keys.
      const unsigned own =
          p.keeps(p.random_row(batch, head, query0 + first + n * 8 + lane / 4), key0 + lane % 4 * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        kept[i] = __shfl_sync(0xffffffffu, own, (column + i % 2) * 4 + row / 4 + i / 2 * 2) >> (row % 4) & 1u;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first + n * 8 + column + i % 2;
      const int key = key0 + row + i / 2 * 8;
      const KeyRange keys = facts.keys[query];
      const bool sees = key >= keys.begin && key < keys.end;
      const float score = bias.score(p, x[n][i], key - p.position(query0 + query));
      const float probability = sees ? exp2f(score - facts.lse[query]) : 0.0f;
      const float after = kept[i] != 0 ? gradient[n][i] * p.kept : 0.0f;
      gradient[n][i] = sees ? score_gradient(p, probability, after, facts.delta[query], score) : 0.0f;
      x[n][i] = kept[i] != 0 ? probability : 0.0f;
    }
  }
}

/// The gradients of the scores of a tile of keys and one of queries, which are summed up along diagonals.
struct Diagonals {
  static constexpr int kStride = kTile + 1, kCount = 2 * kTile - 1;
  static_assert(kCount <= kThreads);
  float* scores;  ///< [key, query] in shared memory

  /// Those of the warp's 16 keys and 8 N queries from `first` on.
  template <int N>
  __device__ __forceinline__ void put(int key, int first, const mma::Sums (&gradient)[N]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* const row = scores + (key + lane / 4) * kStride + first + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i / 2 * 8 * kStride + n * 8 + i % 2] = gradient[n][i];
    }
  }

  /// Once all have put theirs: thread t adds diagonal key - query = t - 63 to to[t].
  __device__ __forceinline__ void add_to(float* to) const {
    const int diagonal = static_cast<int>(threadIdx.x) - (kTile - 1);
    if (diagonal >= kTile) return;
    float sum = 0.0f;
    for (int key = diagonal > 0 ? diagonal : 0; key < kTile + (diagonal < 0 ? diagonal : 0); ++key) {
      sum += scores[key * kStride + key - diagonal];
    }
    to[threadIdx.x] += sum;
  }
};

/// A block for a tile of keys of a KV head: the first tiles first, which most see under a causal mask.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads) fused_backward_keys(const Backward p) {
  TESSERA_DYNAMIC_SHARED(T, tiles);
  __shared__ QueryFacts facts[2];
  const AttentionShape& s = p.problem.shape;
  const std::int64_t rows = s.batch * s.kv_heads, row = blockIdx.x % rows, batch = row / s.kv_heads;
  const std::int64_t kv = row % s.kv_heads, group = s.heads / s.kv_heads,
                     tiles_of_queries = p.problem.query_tiles;
  const int key0 = static_cast<int>(blockIdx.x / rows) * kTile;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  T* const k = tiles;
  T* const v = tiles + kElements<D>;
  T* const queries[2] = {tiles + 2 * kElements<D>, tiles + 3 * kElements<D>};
  T* const outputs[2] = {tiles + 4 * kElements<D>, tiles + 5 * kElements<D>};
  const Diagonals diagonals{reinterpret_cast<float*>(tiles + 6 * kElements<D>)};
  const int last_tile = static_cast<int>(tiles_of_queries) - 1;
  const int earliest =
      s.causal && key0 > s.query_offset ? (key0 - static_cast<int>(s.query_offset)) / kTile : 0;
  const Visits visits{.seen = p.problem.seen + batch * tiles_of_queries,
                      .tiles = static_cast<int>(tiles_of_queries),
                      .head0 = static_cast<int>(kv * group),
                      .key0 = key0,
                      .count = static_cast<int>(group * tiles_of_queries),
                      .first = earliest < last_tile ? earliest : last_tile};
  const auto fetch = [&](int at, int to) {
    const std::int64_t head = visits.head(at);
    const int query0 = visits.query0(at);
    copy_tile<T, D>(queries[to], head_of<T>(p.call.q, s.q_stride, batch, head), s.q_stride.seq, query0,
                    s.seq_q, s.head_dim);
    copy_tile<T, D>(outputs[to], head_of<T>(p.call.d_o, s.o_stride, batch, head), s.o_stride.seq, query0,
                    s.seq_q, s.head_dim);
    if (threadIdx.x >= kTile) return;
    const std::int64_t query = query0 + static_cast<int>(threadIdx.x);
    const std::int64_t first = (batch * s.heads + head) * s.seq_q;
    const bool there = query < s.seq_q;
    facts[to].lse[threadIdx.x] = there ? p.call.lse[first + query] * kLog2E : 0.0f;
    facts[to].delta[threadIdx.x] = there ? p.deltas[first + query] : 0.0f;
    facts[to].keys[threadIdx.x] = there ? p.problem.ranges[batch * s.seq_q + query] : KeyRange{};
  };
  copy_tile<T, D>(k, head_of<T>(p.call.k, s.k_stride, batch, kv), s.k_stride.seq, key0, s.seq_k, s.head_dim);
  copy_tile<T, D>(v, head_of<T>(p.call.v, s.v_stride, batch, kv), s.v_stride.seq, key0, s.seq_k, s.head_dim);
  int at = visits.next(0);
  if (at < visits.count) fetch(at, 0);
  commit_copies();

  mma::Sums dk[D / 8], dv[D / 8];
  clear(dk);
  clear(dv);
  for (int now = 0; at < visits.count; now ^= 1) {
    const int next = visits.next(at + 1);
    if (next < visits.count) fetch(next, now ^ 1);
    commit_copies();
    await_copies<1>();
    __syncthreads();
#pragma unroll
    for (int first = 0; first < kTile; first += kAtOnce<D>) {
      mma::Sums x[kAtOnce<D> / 8], gradient[kAtOnce<D> / 8];
      const T* const q = queries[now] + first * kStride<D>;
      const T* const d_o = outputs[now] + first * kStride<D>;
      multiply_rows<T, D>(k + warp * kRows * kStride<D>, q, x);
      multiply_rows<T, D>(v + warp * kRows * kStride<D>, d_o, gradient);
      turn_to_gradients(p.problem, facts[now], batch, visits.head(at), visits.query0(at), first,
                        key0 + warp * kRows, x, gradient);
      add_weighted<T, D>(x, d_o, dv);
      add_weighted<T, D>(gradient, q, dk);
      if (p.dbias != nullptr) diagonals.put(warp * kRows, first, gradient);
    }
    __syncthreads();  // what was read is overwritten next
    if (p.dbias != nullptr) {
      const std::int64_t sums = (batch * p.problem.key_tiles + key0 / kTile) * s.heads + visits.head(at);
      const int distance = key0 - visits.query0(at) - (kTile - 1);
      diagonals.add_to(p.dbias + sums * p.problem.distances() + p.problem.distance_at(distance));
    }
    at = next;
  }
  const auto write = [&](const mma::Sums(&sums)[D / 8], void* to, const HeadStrides& stride, float by) {
    const float factor[2] = {by, by};
    store_rows<T, D>(sums, const_cast<T*>(head_of<T>(to, stride, batch, kv)), stride.seq, key0 + warp * kRows,
                     s.seq_k, s.head_dim, factor);
  };
  write(dk, p.call.dk, s.k_stride, s.scale);
  write(dv, p.call.dv, s.v_stride, p.problem.kept);
}

/// Adds up what the tiles of keys of all samples bring to a head's bias at a distance, in their order.
__global__ void __launch_bounds__(kThreads) sum_biases(const Backward p) {
  const AttentionShape& s = p.problem.shape;
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, head = blockIdx.y;
  if (row >= s.seq_q + s.seq_k - 1) return;
  const std::int64_t distances = p.problem.distances();
  const float* from = p.dbias + head * distances + p.problem.distance_at(s.seq_k - 1 - row);
  float sum = 0.0f;
  for (std::int64_t i = 0; i < s.batch * p.problem.key_tiles; ++i) sum += from[i * s.heads * distances];
  p.call.dbias[row * s.heads + head] = sum;
}

std::int64_t bias_sums(const Problem& p) {
  return p.shape.batch * p.key_tiles * p.shape.heads * p.distances();
}

Backward backward_of(const AttentionBackward& call, DeviceArena& arena) {
  const AttentionShape& s = call.shape;
  Backward p{problem_of(s, arena), call, nullptr, nullptr};
  p.deltas = arena.take(s.batch * s.heads * s.seq_q);
  if (s.bias != nullptr) p.dbias = arena.take(bias_sums(p.problem));
  return p;
}

}  // namespace

std::size_t fused_attention_backward_workspace(const AttentionShape& shape) {
  AttentionBackward call;
  call.shape = shape;
  DeviceArena arena(nullptr);
  backward_of(call, arena);
  return arena.bytes();
}

void fused_attention_backward(const AttentionBackward& call, const Launch& where) {
  const AttentionShape& s = call.shape;
  DeviceArena arena(call.workspace);
  const Backward p = backward_of(call, arena);
  prepare(p.problem, where);
  if (s.bias != nullptr) {
    check(cudaMemsetAsync(p.dbias, 0, static_cast<std::size_t>(bias_sums(p.problem)) * sizeof(float),
                          static_cast<cudaStream_t>(where.stream)),
          "cudaMemsetAsync");
  }
  const std::int64_t of_queries = s.batch * s.heads * p.problem.query_tiles;
  const std::int64_t of_keys = s.batch * s.kv_heads * p.problem.key_tiles;
  TESSERA_CHECK(std::max(of_queries, of_keys) <= INT_MAX, "attention: ", std::max(of_queries, of_keys),
                " tiles in one call; pass fewer samples");
  const std::int64_t sums = std::min(ceil_div(s.batch * s.heads * s.seq_q, std::int64_t{kWarps}),
                                     std::int64_t{32} * multiprocessors());
  for_sizes(s, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int D = decltype(width)::value;
    constexpr std::size_t kShared = 6 * kElements<D> * sizeof(T);
    launch(sum_outputs<T>, dim3(static_cast<unsigned>(sums)), dim3(kThreads), 0, where, p);
    constexpr std::size_t kOfDiagonals = kTile * Diagonals::kStride * sizeof(float);
    launch(fused_backward_keys<T, D>, dim3(static_cast<unsigned>(of_keys)), dim3(kThreads),
           kShared + (s.bias != nullptr ? kOfDiagonals : 0), where, p);
    launch(fused_backward_queries<T, D>, dim3(static_cast<unsigned>(of_queries)), dim3(kThreads), kShared,
           where, p);
  });
  if (s.bias == nullptr) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(s.seq_q + s.seq_k - 1, std::int64_t{kThreads})),
                  static_cast<unsigned>(s.heads));
  launch(sum_biases, grid, dim3(kThreads), 0, where, p);
}

TESSERA_KERNEL_FILE(fused_backward_keys<bfloat16, 64>);

}  // namespace tessera::kernels::cuda
