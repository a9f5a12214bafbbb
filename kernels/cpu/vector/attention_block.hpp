#pragma once
/// What attention forward and backward share: which keys a query sees, packing rows into fp32 blocks, score
/// blocks and dropout masks.

#include "kernels/cpu/vector/attention.hpp"
#include "kernels/cpu/vector/attention_tile.hpp"
#include "kernels/cpu/vector/shuffle.hpp"
#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

template <typename N>
VEC_INLINE N larger(N a, N b) {
  return a > b ? a : b;
}
template <typename N>
VEC_INLINE N smaller(N a, N b) {
  return a < b ? a : b;
}

/// A range of keys, relative to the first key of a block.
struct Span {
  int begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

/// First key of sample `batch` in [0, seq_k) whose document is at least `document`.
inline std::int32_t first_key_of(const AttentionShape& shape, std::int64_t batch, std::int64_t document) {
  const std::int32_t* documents = shape.document + batch * shape.seq_k;
  std::int64_t low = 0, high = shape.seq_k;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (documents[middle] < document)
      low = middle + 1;
    else
      high = middle;
  }
  return static_cast<std::int32_t>(low);
}

/// Keys that `count` queries from `first` on see. Every condition is an interval that moves only rightwards
/// with the query, so their intersection is one too.
inline void visible_keys(const AttentionShape& shape, std::int64_t batch, std::int64_t first, int count,
                         std::int32_t* begin, std::int32_t* end) {
  const std::int32_t low = shape.key_begin ? larger(shape.key_begin[batch], std::int32_t{0}) : 0;
  const std::int32_t size = static_cast<std::int32_t>(shape.seq_k);
  const std::int32_t high = shape.key_end ? smaller(shape.key_end[batch], size) : size;
  std::int64_t document = 0;
  std::int32_t document_begin = 0, document_end = size;
  for (int i = 0; i < count; ++i) {
    const std::int64_t position = first + i + shape.query_offset;
    if (shape.document) {
      const std::int64_t own = shape.document[batch * shape.seq_k + position];
      if (i == 0 || own != document) {
        document_begin = first_key_of(shape, batch, own);
        document_end = first_key_of(shape, batch, own + 1);
        document = own;
      }
    }
    std::int32_t last = smaller(high, document_end);
    if (shape.causal && position + 1 < last) last = static_cast<std::int32_t>(position + 1);
    begin[i] = larger(low, document_begin);
    end[i] = larger(begin[i], last);
  }
}

inline void describe_tile(const AttentionShape& shape, const TileRange& range, std::int64_t number,
                          QueryTile& tile) {
  const std::int64_t tiles = (shape.seq_q + kQueryTile - 1) / kQueryTile;
  tile.batch = range.batch;
  tile.kv_head = range.kv_head;
  tile.head = range.kv_head * (shape.heads / shape.kv_heads) + number / tiles;
  tile.first = number % tiles * kQueryTile;
  tile.count = static_cast<int>(smaller<std::int64_t>(kQueryTile, shape.seq_q - tile.first));
  visible_keys(shape, tile.batch, tile.first, tile.count, tile.begin, tile.end);
  for (int i = tile.count; i < kQueryTile; ++i) {
    tile.begin[i] = tile.begin[tile.count - 1];
    tile.end[i] = tile.end[tile.count - 1];
  }
}

/// The part of keys [begin, end) inside the block of `keys` keys from `key0`.
VEC_INLINE Span within(std::int64_t begin, std::int64_t end, std::int64_t key0, int keys) {
  return {static_cast<int>(smaller<std::int64_t>(larger<std::int64_t>(begin - key0, 0), keys)),
          static_cast<int>(smaller<std::int64_t>(larger<std::int64_t>(end - key0, 0), keys))};
}

/// One query tile against one packed block of `keys` keys from `key0`; `span` are the keys any of its queries
/// sees.
struct Block {
  const QueryTile* tile = nullptr;
  std::int64_t key0 = 0;
  int keys = 0;
  Span span;
  const float* bias = nullptr;  ///< of query q of the tile and key k of the block at q - k, or null

  /// Row of AttentionShape::bias for query 0 of the tile and key 0 of the block.
  std::int64_t bias_of_first(const AttentionShape& shape) const {
    return tile->first - key0 + shape.seq_k - 1;
  }
};

/// Where `block.bias` points: its biases, in units of log 2, in `window` [kBiasWindow].
inline const float* gather_bias(const AttentionShape& shape, const Block& block, float* window) {
  if (shape.bias == nullptr) return nullptr;
  const std::int64_t first = block.bias_of_first(shape) - (kKeyBlock - 1);
  const std::int64_t count = shape.seq_q + shape.seq_k - 1;
  for (std::int64_t i = 0; i < kBiasWindow; ++i) {
    const std::int64_t row = first + i;
    window[i] = row >= 0 && row < count ? shape.bias[row * shape.heads + block.tile->head] * kLog2E : 0.0f;
  }
  return window + kKeyBlock - 1;
}

/// Keys of the block that some (`any`) or every (`all`) query of [first, last] sees.
VEC_INLINE Span seen_by_any(const Block& block, int first, int last) {
  return within(block.tile->begin[first], block.tile->end[last], block.key0, block.keys);
}
VEC_INLINE Span seen_by_all(const Block& block, int first, int last) {
  return within(block.tile->begin[last], block.tile->end[first], block.key0, block.keys);
}

template <typename T>
const T* head_rows(const void* base, const HeadStrides& stride, std::int64_t batch, std::int64_t head,
                   std::int64_t row) {
  return static_cast<const T*>(base) + row * stride.seq + batch * stride.batch + head * stride.head;
}
template <typename T>
T* head_rows(void* base, const HeadStrides& stride, std::int64_t batch, std::int64_t head, std::int64_t row) {
  return static_cast<T*>(base) + row * stride.seq + batch * stride.batch + head * stride.head;
}

/// Rows this far ahead are fetched while one is packed: rows of a head lie pages apart, where no hardware
/// prefetcher follows.
inline constexpr int kPrefetchRows = 16;

template <typename T>
VEC_INLINE void prefetch_row(const T* row, std::int64_t d) {
  for (std::int64_t c = 0; c < d; c += 64 / static_cast<std::int64_t>(sizeof(T))) __builtin_prefetch(row + c);
}

/// Rows of d elements, `stride` apart, into rows of `width` floats, padded with zeros up to a whole register.
template <typename T>
inline void pack_rows(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t d, float* to,
                      std::int64_t width) {
  const std::int64_t whole = d / kLanes * kLanes;
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* source = from + r * stride;
    float* target = to + r * width;
    if (r + kPrefetchRows < rows) prefetch_row(source + kPrefetchRows * stride, d);
    for (std::int64_t c = 0; c < whole; c += kLanes) store(target + c, load(source + c));
    if (whole < d) store(target + whole, load_n(source + whole, static_cast<int>(d - whole)));
  }
}

/// The same rows, times `factor`, as columns: to[c * kQueryTile + r]. Columns up to a whole register are
/// zero.
template <typename T>
inline void pack_columns(const T* from, std::int64_t stride, int rows, std::int64_t d, float factor,
                         float* to) {
  const F factors = splat(factor);
  for (int r0 = 0; r0 < rows; r0 += kLanes) {
    const int n = smaller(rows - r0, kLanes);
    for (int r = r0 + kLanes; r < smaller(rows, r0 + 2 * kLanes); ++r) prefetch_row(from + r * stride, d);
    for (std::int64_t c0 = 0; c0 < d; c0 += kLanes) {
      const int m = static_cast<int>(smaller<std::int64_t>(d - c0, kLanes));
      F square[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const T* source = from + (r0 + r) * stride + c0;
        square[r] = r >= n ? F{} : m == kLanes ? load(source) : load_n(source, m);
        square[r] *= factors;
      }
      transpose(square);
      for (int c = 0; c < m; ++c) store(to + (c0 + c) * kQueryTile + r0, square[c]);
    }
  }
}

/// `rows` rows of sums, times `factor`, into rows of d elements `stride` apart.
template <typename T>
inline void store_rows(const float* from, std::int64_t width, int rows, std::int64_t d, float factor, T* to,
                       std::int64_t stride) {
  const std::int64_t whole = d / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* source = from + r * width;
    T* target = to + r * stride;
    for (std::int64_t c = 0; c < whole; c += kLanes) store(target + c, load(source + c) * factor);
    if (whole < d) store_n(target + whole, load(source + whole) * factor, static_cast<int>(d - whole));
  }
}

/// out[key, query] = sum over d of rows[key, d] * columns[d, query], where some query of a register sees the
/// key.
inline void score_block(const Block& block, const float* rows, std::int64_t width, const float* columns,
                        std::int64_t d, float* out) {
  const int registers = (block.tile->count + kLanes - 1) / kLanes;
  even_pieces(registers, kTileVectors, [&](int v0, int vectors) {
    even_pieces(block.span.end - block.span.begin, tile_rows(vectors), [&](int first, int count) {
      const int key = block.span.begin + first;
      const std::int64_t low = block.key0 + key, high = low + count;
      int v = v0, v_end = v0 + vectors;
      while (v < v_end && block.tile->end[v * kLanes + kLanes - 1] <= low) ++v;
      while (v < v_end && block.tile->begin[(v_end - 1) * kLanes] >= high) --v_end;
      if (v == v_end) return;
      tile_product(count, v_end - v,
                   {rows + key * width, width, columns + v * kLanes, kQueryTile,
                    out + key * kQueryTile + v * kLanes, kQueryTile, d});
    });
  });
}

/// sums[query, d] += sum over keys of weights[key, query] * rows[key, d].
inline void add_over_keys(const Block& block, const float* weights, const float* rows, std::int64_t width,
                          std::int64_t d, float* sums) {
  const int registers = static_cast<int>((d + kLanes - 1) / kLanes);
  even_pieces(registers, kTileVectors, [&](int v, int vectors) {
    even_pieces(block.tile->count, tile_rows(vectors), [&](int query, int count) {
      const Span keys = seen_by_any(block, query, query + count - 1);
      if (keys.empty()) return;
      tile_add_transposed(
          count, vectors,
          {weights + keys.begin * kQueryTile + query, kQueryTile, rows + keys.begin * width + v * kLanes,
           width, sums + query * width + v * kLanes, width, keys.end - keys.begin});
    });
  });
}

/// sums[key, d] += sum over queries of weights[key, query] * rows[query, d].
inline void add_over_queries(const Block& block, const float* weights, const float* rows, std::int64_t width,
                             std::int64_t d, float* sums) {
  const int registers = static_cast<int>((d + kLanes - 1) / kLanes);
  even_pieces(registers, kTileVectors, [&](int v, int vectors) {
    int query = 0, query_end = 0;
    even_pieces(block.span.end - block.span.begin, tile_rows(vectors), [&](int first, int count) {
      const int key = block.span.begin + first;
      const std::int64_t low = block.key0 + key, high = low + count;
      while (query < block.tile->count && block.tile->end[query] <= low) ++query;
      while (query_end < block.tile->count && block.tile->begin[query_end] < high) ++query_end;
      if (query >= query_end) return;
      tile_add(count, vectors,
               {weights + key * kQueryTile + query, kQueryTile, rows + query * width + v * kLanes, width,
                sums + key * width + v * kLanes, width, query_end - query});
    });
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
