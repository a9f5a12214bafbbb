#pragma once
/// What the kernels of attention_fused.hpp share: tiles of 64 queries and 64 keys, each warp having 16 rows
/// of the one side; who sees whom; which probabilities dropout keeps.

#include <type_traits>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/attention_fused.hpp"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/softmax.hpp"

namespace tessera::kernels::cuda::fused {

inline constexpr int kTile = 64;
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
inline constexpr int kRows = kTile / kWarps;  ///< of a warp
static_assert(kRows == 16, "what mma takes");

/// Elements from row to row of a tile in shared memory: 8 rows of 16 bytes lie in different banks.
template <int D>
inline constexpr int kStride = D + 8;
template <int D>
inline constexpr int kElements = kTile* kStride<D>;

/// What every kernel knows. Scores are in units of log 2.
struct Problem {
  AttentionShape shape;
  const KeyRange* ranges;  ///< [batch, seq_q]
  const KeyRange* seen;  ///< [batch, tiles of queries]: from the first to the last key that any of them sees
  std::int64_t query_tiles, key_tiles;
  float* biases;     ///< [heads, distances()]: of key k and query q at distance_at(k - q); null without
  float scale, cap;  ///< of scores; cap 0 = none
  float kept;        ///< 1 / (1 - dropout)
  std::uint32_t threshold;  ///< of dropout

  __device__ int position(int query) const { return query + static_cast<int>(shape.query_offset); }
  /// Random block of key 0 of a query.
  __device__ std::uint64_t random_row(std::int64_t batch, std::int64_t head, int query) const {
    const std::int64_t row =
        ((shape.sample0 + batch) * shape.total_heads + shape.head0 + head) * shape.seq_length +
        position(query);
    return static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>((shape.seq_length + 3) / 4);
  }
  /// Bit i: whether dropout keeps key + i, a multiple of 4, of that query.
  __device__ unsigned keeps(std::uint64_t random_row, int key) const {
    const PhiloxBlock random = random_words(shape.dropout_key, random_row + static_cast<unsigned>(key / 4));
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mask |= (random.word[i] >= threshold ? 1u : 0u) << i;
    return mask;
  }
  /// Those from a key to a query of any two tiles.
  __host__ __device__ std::int64_t distances() const { return (query_tiles + key_tiles) * kTile; }
  __host__ __device__ std::int64_t distance_at(std::int64_t distance) const {
    return distance + query_tiles * kTile - 1;
  }
};

/// What is added to the scores of a head.
struct HeadBias {
  float slope;          ///< ALiBi's; 0 = none
  const float* biases;  ///< of distance 0; null = none

  __device__ HeadBias(const Problem& p, std::int64_t head)
      : slope(p.shape.alibi_slopes ? p.shape.alibi_slopes[head] * kLog2E : 0.0f),
        biases(p.biases != nullptr ? p.biases + head * p.distances() + p.distance_at(0) : nullptr) {}

  /// A product's score, before masks.
  __device__ float score(const Problem& p, float product, int distance) const {
    float x = product * p.scale;
    if (p.cap != 0.0f) x = p.cap * tanhf(x / p.cap);
    if (slope != 0.0f) x += slope * static_cast<float>(distance);
    if (biases != nullptr) x += biases[distance];
    return x;
  }
};

/// Where rows of a head of a sample begin.
template <typename T>
__device__ const T* head_of(const void* base, const HeadStrides& stride, std::int64_t batch,
                            std::int64_t head) {
  return static_cast<const T*>(base) + batch * stride.batch + head * stride.head;
}

/// Starts to copy rows [first, first + 64) of `rows` to a tile; what lies beyond them, or beyond head_dim, is
/// zero there.
template <typename T, int D>
__device__ void copy_tile(T* tile, const T* from, std::int64_t stride, int first, std::int64_t rows,
                          std::int64_t head_dim) {
  constexpr int kPacks = D / 8;
#pragma unroll
  for (int i = 0; i < kTile * kPacks / kThreads; ++i) {
    const int n = i * kThreads + static_cast<int>(threadIdx.x), row = n / kPacks, column = n % kPacks * 8;
    const bool there = first + row < rows && column < head_dim;
    copy_async<16>(tile + row * kStride<D> + column,
                   there ? from + (std::int64_t{first} + row) * stride + column : from, !there);
  }
}

template <int N>
__device__ __forceinline__ void clear(mma::Sums (&sums)[N]) {
#pragma unroll
  for (auto& each : sums) {
#pragma unroll
    for (float& x : each) x = 0.0f;
  }
}

/// products = the warp's 16 rows of a tile times 8 N rows of another.
template <typename T, int D, int N>
__device__ __forceinline__ void multiply_rows(const T* left, const T* right, mma::Sums (&products)[N]) {
  clear(products);
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    const mma::Left a = mma::load_left(left + c, kStride<D>);
#pragma unroll
    for (int n = 0; n < N * 8; n += 16) {
      mma::Right b[2];
      mma::load_rights(right + n * kStride<D> + c, kStride<D>, b);
      mma::multiply_add<T>(products[n / 8], a, b[0]);
      mma::multiply_add<T>(products[n / 8 + 1], a, b[1]);
    }
  }
}

/// sums += weights, rounded, times 8 N rows of a tile.
template <typename T, int D, int N>
__device__ __forceinline__ void add_weighted(const mma::Sums (&weights)[N], const T* rows,
                                             mma::Sums (&sums)[D / 8]) {
#pragma unroll
  for (int k = 0; k < N * 8; k += 16) {
    const mma::Left a = mma::left_of<T>(weights[k / 8], weights[k / 8 + 1]);
#pragma unroll
    for (int c = 0; c < D; c += 16) {
      mma::Right b[2];
      mma::load_rights_by_rows(rows + k * kStride<D> + c, kStride<D>, b);
      mma::multiply_add<T>(sums[c / 8], a, b[0]);
      mma::multiply_add<T>(sums[c / 8 + 1], a, b[1]);
    }
  }
}

/// Writes the warp's 16 rows from `first` on, each times its factor.
template <typename T, int D>
__device__ void store_rows(const mma::Sums (&sums)[D / 8], T* to, std::int64_t stride, int first,
                           std::int64_t rows, std::int64_t head_dim, const float (&factor)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = first + lane / 4 + half * 8;
    if (row >= rows) continue;
    T* const at = to + row * stride + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      if (c * 8 >= head_dim) break;
      const float pair[2] = {sums[c][half * 2] * factor[half], sums[c][half * 2 + 1] * factor[half]};
      store(at + c * 8, pair);
    }
  }
}

/// The queries of a lane's two rows, in a warp whose rows are queries.
struct QueryRows {
  int query[2];
  KeyRange keys[2];
  std::uint64_t random[2];
  HeadBias bias;

  __device__ QueryRows(const Problem& p, std::int64_t batch, std::int64_t head, int first) : bias(p, head) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      query[half] = first + lane / 4 + half * 8;
      const bool there = query[half] < p.shape.seq_q;
      keys[half] = there ? p.ranges[batch * p.shape.seq_q + query[half]] : KeyRange{};
      random[half] = p.random_row(batch, head, query[half]);
    }
  }

  /// Products with the keys from `key0` on become scores; -inf where a key is not seen.
  __device__ void score(const Problem& p, int key0, mma::Sums (&x)[kTile / 8]) const {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool all = keys[half].begin <= key0 && keys[half].end >= key0 + kTile;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = key0 + n * 8 + column + i;
          float& value = x[n][half * 2 + i];
          value = bias.score(p, value, key - p.position(query[half]));
          if (!all && (key < keys[half].begin || key >= keys[half].end)) value = -INFINITY;
        }
      }
    }
  }

  /// Bits 0 to 3 for the four sums of columns 8 n ... of keys from `key0` on: whether dropout keeps them. Two
  /// neighbouring lanes need the same four keys of both rows: each draws those of one.
  __device__ unsigned kept(const Problem& p, int key0, int n) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, odd = lane & 1;
    const unsigned own = p.keeps(odd ? random[1] : random[0], key0 + n * 8 + (lane & 2) * 2);
    const unsigned other = __shfl_xor_sync(0xffffffffu, own, 1);
    const unsigned first = (odd ? other : own) >> (odd * 2) & 3u,
                   second = (odd ? own : other) >> (odd * 2) & 3u;
    return first | second << 2;
  }
};

/// The problem of a call, with room in `arena` for its ranges and biases, which prepare() writes.
Problem problem_of(const AttentionShape& shape, DeviceArena& arena);
void prepare(const Problem& problem, const Launch& launch);

/// visit(T, D): the element type, and the width of tiles that head_dim fits in.
template <typename Visit>
void for_sizes(const AttentionShape& shape, Visit&& visit) {
  const auto with_type = [&](auto type) {
    if (shape.head_dim <= 64) {
      visit(type, std::integral_constant<int, 64>{});
    } else {
      visit(type, std::integral_constant<int, 128>{});
    }
  };
  if (shape.dtype == DType::bf16) {
    with_type(bfloat16{});
  } else {
    with_type(float16{});
  }
}

}  // namespace tessera::kernels::cuda::fused
