#pragma once
/// What the attention launchers (attention.cpp) and the vector files share: plain data only.
///
/// Scores are kept transposed, [key, query], with queries in the lanes of a register: maxima and sums run
/// down the lanes, masks are two comparisons, K and V need no transposing, and P^T is what dV and dK multiply
/// by.

#include <cstdint>

#include "kernels/api/attention.hpp"
#include "kernels/cpu/vector/isa.hpp"

namespace tessera::kernels::cpu {

inline constexpr int kQueryTile = 64;    ///< queries of one score block
inline constexpr int kKeyBlock = 128;    ///< keys packed at a time
inline constexpr int kForwardTiles = 8;  ///< most query tiles that share a packed key block
inline constexpr int kBackwardTiles = 4;
inline constexpr int kDecodeQueries = 4;  ///< up to this many queries a head, keys are read where they lie
inline constexpr int kDecodeRows = 4;     ///< query rows one decoding task takes

/// Biases that one query tile and one key block have between them: a register of queries reads kLanes from
/// any of them on.
inline constexpr int kBiasWindow = 2 * kQueryTile + kKeyBlock;
/// Floats of one head's sums of bias gradients; registers of queries may reach beyond the last one.
inline std::int64_t bias_row(const AttentionShape& shape) { return shape.seq_q + shape.seq_k + kQueryTile; }

/// Up to kQueryTile consecutive queries of one head. Query i sees the keys [begin[i], end[i]), a range that
/// is empty for a masked row; begin and end never decrease along the tile, whatever the mask.
struct QueryTile {
  std::int64_t batch = 0, head = 0, kv_head = 0, first = 0;
  int count = 0;
  std::int32_t begin[kQueryTile], end[kQueryTile];
};

/// Tiles [first, first + count) of the query heads that read one KV head, numbered head by head.
struct TileRange {
  std::int64_t batch = 0, kv_head = 0, first = 0;
  int count = 0;
};

/// One thread's scratch. `width` is head_dim rounded up to whole registers; tile t's part starts at t *
/// kQueryTile rows.
struct ForwardScratch {
  std::int64_t width = 0;
  QueryTile* tiles = nullptr;
  float* q_t = nullptr;     ///< [tile][head_dim, kQueryTile], times scale * log2(e)
  float* o = nullptr;       ///< [tile][kQueryTile, width]
  float* max = nullptr;     ///< [tile][kQueryTile] largest score so far, in units of log 2
  float* sum = nullptr;     ///< [tile][kQueryTile]
  float* k = nullptr;       ///< [kKeyBlock, width]
  float* v = nullptr;       ///< [kKeyBlock, width]
  float* scores = nullptr;  ///< [kKeyBlock, kQueryTile]
  float* bias = nullptr;    ///< [kBiasWindow]
};

struct BackwardScratch {
  std::int64_t width = 0;
  QueryTile* tiles = nullptr;
  float* q = nullptr;      ///< [tile][kQueryTile, width]
  float* q_t = nullptr;    ///< [tile][head_dim, kQueryTile], times scale * log2(e)
  float* d_o = nullptr;    ///< [tile][kQueryTile, width]
  float* d_o_t = nullptr;  ///< [tile][head_dim, kQueryTile]
  float* dq = nullptr;     ///< [tile][kQueryTile, width]
  float* lse = nullptr;    ///< [tile][kQueryTile], in units of log 2
  float* delta = nullptr;  ///< [tile][kQueryTile] sum of d_o * o over a row
  float* k = nullptr;      ///< [kKeyBlock, width]
  float* v = nullptr;      ///< [kKeyBlock, width]
  float* p = nullptr;      ///< [kKeyBlock, kQueryTile]
  float* ds = nullptr;     ///< [kKeyBlock, kQueryTile]
  float* dk = nullptr;     ///< [seq_k, width] sums over the tiles of a task
  float* dv = nullptr;     ///< [seq_k, width]
  float* bias = nullptr;   ///< [kBiasWindow]
  float* dbias = nullptr;  ///< [heads of a group][bias_row(shape)] sums over the tiles of a task
};

/// Partial sums of dK and dV: part i at dk + i * stride.
struct KvPartials {
  const float* dk = nullptr;
  const float* dv = nullptr;
  std::int64_t parts = 0, stride = 0, width = 0;
};

struct DecodeScratch {
  std::int64_t width = 0;
  float* q = nullptr;       ///< [kDecodeRows, width]
  float* o = nullptr;       ///< [kDecodeRows, width]
  float* k = nullptr;       ///< [kKeyBlock, width], used when rows must be padded
  float* v = nullptr;       ///< [kKeyBlock, width]
  float* scores = nullptr;  ///< [kDecodeRows, kKeyBlock]
};

}  // namespace tessera::kernels::cpu

TESSERA_EACH_ISA(
    /** Attention of a range of query tiles: writes o and lse. */
    void attention_forward_tiles(const AttentionForward& call, const TileRange& range,
                                 const ForwardScratch& scratch);
    /** The same for query rows [first, first + count) of one KV head's group, counted head by head: few rows,
       many keys. */
    void attention_decode_rows(const AttentionForward& call, const TileRange& range,
                               const DecodeScratch& scratch);
    /** Gradients of a range of query tiles: writes dq, adds to scratch.dk and scratch.dv. */
    void attention_backward_tiles(const AttentionBackward& call, const TileRange& range,
                                  const BackwardScratch& scratch);
    /** dk and dv of keys [key0, key1): the sum of the partials, in order. */
    void attention_store_kv_gradients(const AttentionBackward& call, std::int64_t batch, std::int64_t kv_head,
                                      std::int64_t key0, std::int64_t key1, const KvPartials& partials);)
