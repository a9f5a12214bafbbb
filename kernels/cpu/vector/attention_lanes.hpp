#pragma once
/// One register of queries of a score block: masks, position biases and dropout, key by key.

#include "kernels/cpu/vector/attention_block.hpp"
#include "kernels/cpu/vector/philox.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

/// Dropout of the probabilities of kLanes consecutive queries: lane l counts in its own row.
struct LaneDropout {
  RngKey key;
  std::uint32_t threshold = 0;
  U low = {}, high = {};  // block number of feature 0 in each lane's row

  LaneDropout(const AttentionShape& shape, std::int64_t batch, std::int64_t head, std::int64_t query)
      : key(shape.dropout_key), threshold(DropoutSpec{shape.dropout_key, shape.dropout}.threshold()) {
    const auto blocks = static_cast<std::uint64_t>((shape.seq_length + 3) / 4);
    const std::int64_t row =
        ((shape.sample0 + batch) * shape.total_heads + shape.head0 + head) * shape.seq_length + query +
        shape.query_offset;
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t first = static_cast<std::uint64_t>(row + lane) * blocks;
      low[lane] = static_cast<std::uint32_t>(first);
      high[lane] = static_cast<std::uint32_t>(first >> 32);
    }
  }

  /// Which of the keys 4 group .. 4 group + 3 each lane keeps.
  VEC_LAMBDA void kept(std::int64_t group, I (&keep)[4]) const {
    const auto step = static_cast<std::uint32_t>(group);
    const U c0 = low + step;
    const U c1 = high - (U)(c0 < step);
    const W c2 = (W)(U{} + key.site), c3 = (W)(U{} + key.step);
    HalfState even{(W)c0, (W)c1, c2, c3}, odd{(W)c0 >> 32, (W)c1 >> 32, c2, c3};
    auto k0 = static_cast<std::uint32_t>(key.seed);
    auto k1 = static_cast<std::uint32_t>(key.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      even.round(U{} + k0, U{} + k1);
      odd.round(U{} + k0, U{} + k1);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    keep[0] = joined(even.c0, odd.c0) >= threshold;
    keep[1] = joined(even.c1, odd.c1) >= threshold;
    keep[2] = joined(even.c2, odd.c2) >= threshold;
    keep[3] = joined(even.c3, odd.c3) >= threshold;
  }

 private:
  /// The low halves of both, those of `odd` in the odd lanes.
  VEC_INLINE U joined(W even, W odd) { return (iota() & 1) != 0 ? (U)(odd << 32) : (U)even; }
};

/// Register `index` of a block's queries.
struct Lanes {
  const Block* block;
  int query;                 // first lane, in the tile
  I begin, end;              // keys each lane sees
  float slope;               // ALiBi, in units of log 2; 0 without
  const float* by_distance;  // bias of key 0 and lane 0, or null
  F position;                // of each lane's query
  Span any, whole;           // keys some lane sees; keys that need neither mask nor bias (a part of `any`)

  Lanes(const AttentionShape& shape, const Block& of, int index) : block(&of), query(index * kLanes) {
    const QueryTile& tile = *of.tile;
    begin = *reinterpret_cast<const I*>(tile.begin + query);
    end = *reinterpret_cast<const I*>(tile.end + query);
    slope = shape.alibi_slopes ? shape.alibi_slopes[tile.head] * kLog2E : 0.0f;
    by_distance = of.bias != nullptr ? of.bias + query : nullptr;
    position = __builtin_convertvector(iota() + static_cast<int>(tile.first + query + shape.query_offset), F);
    any = seen_by_any(of, query, query + kLanes - 1);
    whole = seen_by_all(of, query, query + kLanes - 1);
    if (any.empty()) any = {of.span.end, of.span.end};
    if (shape.alibi_slopes || by_distance != nullptr || whole.empty()) whole = {any.end, any.end};
  }

  /// Lanes that see key `key` of the block.
  VEC_LAMBDA I sees(int key) const {
    const std::int32_t j = static_cast<std::int32_t>(block->key0 + key);
    return (begin <= j) & (end > j);
  }
  VEC_LAMBDA F biased(F score, int key) const {
    if (by_distance != nullptr) return score + load(by_distance - key);
    return score + slope * (static_cast<float>(block->key0 + key) - position);
  }
  /// Element (key, lanes) of a [key, query] block.
  VEC_LAMBDA float* at(float* scores, int key) const { return scores + key * kQueryTile + query; }

  /// Calls edge(key) for the keys that need care and plain(key) for the others, in order.
  template <typename Edge, typename Plain>
  VEC_LAMBDA void for_keys(Edge edge, Plain plain) const {
    for (int key = any.begin; key < whole.begin; ++key) edge(key);
    for (int key = whole.begin; key < whole.end; ++key) plain(key);
    for (int key = whole.end; key < any.end; ++key) edge(key);
  }

  /// Zero where no lane sees a key that other registers of the tile see.
  VEC_LAMBDA void clear_rest(float* scores) const {
    for (int key = block->span.begin; key < any.begin; ++key) store(at(scores, key), F{});
    for (int key = any.end; key < block->span.end; ++key) store(at(scores, key), F{});
  }
};

}  // namespace tessera::kernels::cpu::TESSERA_ISA
