#pragma once
/// What the kernels of softmax.hpp share: the rows of a block of scores, their masks, and who works on a row.

#include <climits>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/softmax.hpp"

namespace tessera::kernels::cuda::attention {

inline constexpr int kUnit =
    4;  ///< keys a thread takes at a time: 16 bytes of scores, one block of random words
inline constexpr int kWarpKeys = 1024;     ///< up to here a warp takes a row
inline constexpr int kBlockThreads = 256;  ///< beyond, so many threads do
inline constexpr int kBlockKeys = 8192;    ///< up to here a row fits their registers

/// What both directions need to know of their rows.
struct Rows {
  AttentionShape shape;
  ScoreBlock block;
  const KeyRange* ranges;
  std::uint32_t threshold;  ///< of dropout

  Rows(const AttentionShape& of, const ScoreBlock& scores, const KeyRange* keys)
      : shape(of),
        block(scores),
        ranges(keys),
        threshold(DropoutSpec{of.dropout_key, of.dropout}.threshold()) {}
};

/// One row of a score matrix: which query it belongs to and what that sees.
struct Row {
  std::int64_t batch, head, query, position;
  KeyRange keys;
  float slope;                 // ALiBi, in units of log 2
  float cap;                   // of scores, likewise; 0 = none
  const float* bias;           // by distance, of key 0; null without
  std::int64_t bias_step;      // from one key's to the one's before it
  std::uint64_t random_block;  // of key 0

  __device__ Row(const Rows& rows, std::int64_t number) {
    const AttentionShape& shape = rows.shape;
    const ScoreBlock& block = rows.block;
    // 32 bits divide several times faster than 64, and the launcher has seen that they are enough.
    auto rest = static_cast<std::uint32_t>(number);
    const auto next = [&rest](std::int64_t size) {
      const std::uint32_t divisor = static_cast<std::uint32_t>(size), index = rest % divisor;
      rest /= divisor;
      return static_cast<std::int64_t>(index);
    };
    query = block.row0 + next(block.rows);
    const std::int64_t member = block.member0 + next(block.members);
    head = (block.kv0 + next(block.kv)) * (shape.heads / shape.kv_heads) + member;
    batch = block.batch0 + rest;
    position = query + shape.query_offset;
    keys = rows.ranges[batch * shape.seq_q + query];
    slope = shape.alibi_slopes ? shape.alibi_slopes[head] * kLog2E : 0.0f;
    cap = shape.softcap * kLog2E;
    bias = shape.bias ? shape.bias + (query + shape.seq_k - 1) * shape.heads + head : nullptr;
    bias_step = shape.heads;
    const std::int64_t row =
        ((shape.sample0 + batch) * shape.total_heads + shape.head0 + head) * shape.seq_length + position;
    random_block = static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>((shape.seq_length + 3) / 4);
  }

  /// Whether some of the keys key .. key + 3 are seen.
  __device__ bool touches(std::int64_t key) const { return key < keys.end && key + kUnit > keys.begin; }

  /// Index of this row among those of [batch, heads, seq_q].
  __device__ std::int64_t statistic(const AttentionShape& shape) const {
    return (batch * shape.heads + head) * shape.seq_q + query;
  }
};

/// Scores key .. key + 3, capped or with their position bias; -inf where masked.
__device__ inline void load_scores(const Row& row, const float* scores, std::int64_t key, float (&x)[kUnit]) {
  if (!row.touches(key)) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = -INFINITY;
    return;
  }
  load(scores + key, x);
  const std::int64_t distance = key - row.position;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (row.cap != 0.0f) x[i] = row.cap * tanhf(x[i] / row.cap);
    if (row.slope != 0.0f) x[i] += row.slope * static_cast<float>(distance + i);
    if (row.bias != nullptr && key + i < row.keys.end) x[i] += kLog2E * row.bias[-(key + i) * row.bias_step];
    if (key + i < row.keys.begin || key + i >= row.keys.end) x[i] = -INFINITY;
  }
}

/// Bit i: whether dropout keeps key + i.
__device__ inline unsigned kept(const Rows& rows, const Row& row, std::int64_t key) {
  if (rows.shape.dropout == 0.0f) return 0xfu;
  const PhiloxBlock random =
      random_words(rows.shape.dropout_key, row.random_block + static_cast<std::uint64_t>(key / 4));
  unsigned mask = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) mask |= (random.word[i] >= rows.threshold ? 1u : 0u) << i;
  return mask;
}

/// The threads that share a row: a warp, four of which make a block, or a block.
template <int Threads>
struct Team {
  static constexpr int kRows = Threads == kWarp ? 4 : 1;
  static constexpr int kBlock = kRows * Threads;

  __device__ static std::int64_t row() {
    return std::int64_t{blockIdx.x} * kRows + static_cast<int>(threadIdx.x) / Threads;
  }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % Threads; }
  __device__ static void synchronize() {
    if constexpr (Threads == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  __device__ static float sum(float x) {
    if constexpr (Threads == kWarp) {
      return warp_sum(x);
    } else {
      __shared__ float shared[kWarp];
      return block_sum(x, shared);
    }
  }
  __device__ static float max(float x) {
    if constexpr (Threads == kWarp) {
      return warp_max(x);
    } else {
      __shared__ float shared[kWarp];
      return block_max(x, shared);
    }
  }
};

/// Blocks of threads for the rows of `block`.
inline unsigned blocks_of(const ScoreBlock& block, int rows_per_block) {
  const std::int64_t rows = block.matrices() * block.rows;
  TESSERA_CHECK(rows <= INT_MAX, "attention: ", rows, " rows of scores in one block; pass a smaller one");
  return static_cast<unsigned>(ceil_div(rows, std::int64_t{rows_per_block}));
}

}  // namespace tessera::kernels::cuda::attention
