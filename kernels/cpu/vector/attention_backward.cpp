#include "kernels/cpu/vector/attention.hpp"
#include "kernels/cpu/vector/attention_lanes.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// Views of one tile's part of the scratch.
struct TileState {
  float* q;
  float* q_t;
  float* d_o;
  float* d_o_t;
  float* dq;
  float* lse;
  float* delta;
};

TileState state_of(const AttentionShape& shape, const BackwardScratch& scratch, int t) {
  const std::int64_t row = std::int64_t{t} * kQueryTile;
  return {scratch.q + row * scratch.width,
          scratch.q_t + row * shape.head_dim,
          scratch.d_o + row * scratch.width,
          scratch.d_o_t + row * shape.head_dim,
          scratch.dq + row * scratch.width,
          scratch.lse + row,
          scratch.delta + row};
}

/// p: scores to probabilities (what V was multiplied by); ds: their gradients to the gradients of the scores.
void score_gradients(const AttentionShape& shape, Lanes lanes, const BackwardScratch& scratch,
                     const TileState& state) {
  lanes.clear_rest(scratch.p);
  lanes.clear_rest(scratch.ds);
  if (lanes.any.empty()) return;
  const F lse = load(state.lse + lanes.query);
  const F delta = load(state.delta + lanes.query);
  const auto plain = [&](int key) VEC_LAMBDA {
    float* p = lanes.at(scratch.p, key);
    float* ds = lanes.at(scratch.ds, key);
    const F probability = exp2_of(load(p) - lse);
    store(p, probability);
    store(ds, probability * (load(ds) - delta));
  };
  const auto edge = [&](int key, F keep) VEC_LAMBDA {
    float* p = lanes.at(scratch.p, key);
    float* ds = lanes.at(scratch.ds, key);
    const I seen = lanes.sees(key);
    const F probability = select(seen, exp2_of(lanes.biased(load(p), key) - lse), F{});
    store(p, probability * keep);
    store(ds, select(seen, probability * (load(ds) * keep - delta), F{}));
  };
  if (shape.dropout == 0.0f) {
    lanes.for_keys([&](int key) VEC_LAMBDA { edge(key, splat(1.0f)); }, plain);
    return;
  }
  const QueryTile& tile = *lanes.block->tile;
  const LaneDropout dropout(shape, tile.batch, tile.head, tile.first + lanes.query);
  const F kept = splat(1.0f / (1.0f - shape.dropout));
  I keep[4];
  for (int group = lanes.any.begin / 4; group * 4 < lanes.any.end; ++group) {
    dropout.kept(lanes.block->key0 / 4 + group, keep);
    for (int w = 0; w < 4; ++w) {
      const int key = 4 * group + w;
      if (key >= lanes.any.begin && key < lanes.any.end) edge(key, select(keep[w], kept, F{}));
    }
  }
}

/// Adds the gradients of the block's scores up along its diagonals: queries are apart like their distances.
void add_bias_gradient(const AttentionShape& shape, const Block& block, const BackwardScratch& scratch) {
  const QueryTile& tile = *block.tile;
  const std::int64_t member = tile.head - tile.kv_head * (shape.heads / shape.kv_heads);
  float* const sums = scratch.dbias + member * bias_row(shape) + block.bias_of_first(shape);
  for (int query = 0; query < tile.count; query += kLanes) {
    const Span keys = seen_by_any(block, query, query + kLanes - 1);
    for (int key = keys.begin; key < keys.end; ++key) {
      float* const sum = sums + query - key;
      store(sum, load(sum) + load(scratch.ds + key * kQueryTile + query));
    }
  }
}

void backward_block(const AttentionShape& shape, const Block& block, const BackwardScratch& scratch,
                    const TileState& state) {
  const std::int64_t width = scratch.width, d = shape.head_dim;
  score_block(block, scratch.k, width, state.q_t, d, scratch.p);
  score_block(block, scratch.v, width, state.d_o_t, d, scratch.ds);
  for (int i = 0; i * kLanes < block.tile->count; ++i)
    score_gradients(shape, Lanes(shape, block, i), scratch, state);
  if (block.bias != nullptr) add_bias_gradient(shape, block, scratch);
  add_over_queries(block, scratch.p, state.d_o, width, d, scratch.dv + block.key0 * width);
  add_over_queries(block, scratch.ds, state.q, width, d, scratch.dk + block.key0 * width);
  add_over_keys(block, scratch.ds, scratch.k, width, d, state.dq);
}

template <typename T>
float dot(const T* a, const T* b, std::int64_t n) {
  F sums = F{};
  for_lanes(0, n,
            [&](std::int64_t i, auto lanes) VEC_LAMBDA { sums += load(a + i, lanes) * load(b + i, lanes); });
  return sum(sums);
}

template <typename T>
void start_tile(const AttentionBackward& call, const QueryTile& tile, const BackwardScratch& scratch,
                const TileState& state) {
  const AttentionShape& shape = call.shape;
  const std::int64_t d = shape.head_dim;
  const T* q = head_rows<T>(call.q, shape.q_stride, tile.batch, tile.head, tile.first);
  const T* o = head_rows<T>(call.o, shape.o_stride, tile.batch, tile.head, tile.first);
  const T* d_o = head_rows<T>(call.d_o, shape.o_stride, tile.batch, tile.head, tile.first);
  pack_rows(q, shape.q_stride.seq, tile.count, d, state.q, scratch.width);
  pack_columns(q, shape.q_stride.seq, tile.count, d, shape.scale * kLog2E, state.q_t);
  pack_rows(d_o, shape.o_stride.seq, tile.count, d, state.d_o, scratch.width);
  pack_columns(d_o, shape.o_stride.seq, tile.count, d, 1.0f, state.d_o_t);
  const float* lse = call.lse + (tile.batch * shape.heads + tile.head) * shape.seq_q + tile.first;
  for (int i = 0; i < kQueryTile; ++i) {
    const bool inside = i < tile.count;
    state.lse[i] = inside ? lse[i] * kLog2E : 0.0f;
    state.delta[i] = inside ? dot(o + i * shape.o_stride.seq, d_o + i * shape.o_stride.seq, d) : 0.0f;
  }
  for (std::int64_t i = 0; i < tile.count * scratch.width; i += kLanes) store(state.dq + i, F{});
}

template <typename T>
void backward_tiles(const AttentionBackward& call, const TileRange& range, const BackwardScratch& scratch) {
  const AttentionShape& shape = call.shape;
  std::int64_t first_key = shape.seq_k, last_key = 0;
  for (int t = 0; t < range.count; ++t) {
    QueryTile& tile = scratch.tiles[t];
    describe_tile(shape, range, range.first + t, tile);
    start_tile<T>(call, tile, scratch, state_of(shape, scratch, t));
    first_key = smaller<std::int64_t>(first_key, tile.begin[0]);
    last_key = larger<std::int64_t>(last_key, tile.end[kQueryTile - 1]);
  }
  for (std::int64_t key0 = first_key / 4 * 4; key0 < last_key; key0 += kKeyBlock) {
    const int keys = static_cast<int>(smaller<std::int64_t>(kKeyBlock, last_key - key0));
    pack_rows(head_rows<T>(call.k, shape.k_stride, range.batch, range.kv_head, key0), shape.k_stride.seq,
              keys, shape.head_dim, scratch.k, scratch.width);
    pack_rows(head_rows<T>(call.v, shape.v_stride, range.batch, range.kv_head, key0), shape.v_stride.seq,
              keys, shape.head_dim, scratch.v, scratch.width);
    for (int t = 0; t < range.count; ++t) {
      Block block{&scratch.tiles[t], key0, keys, {}};
      block.span = seen_by_any(block, 0, kQueryTile - 1);
      if (block.span.empty()) continue;
      block.bias = gather_bias(shape, block, scratch.bias);
      backward_block(shape, block, scratch, state_of(shape, scratch, t));
    }
  }
  for (int t = 0; t < range.count; ++t) {
    const QueryTile& tile = scratch.tiles[t];
    store_rows(state_of(shape, scratch, t).dq, scratch.width, tile.count, shape.head_dim, shape.scale,
               head_rows<T>(call.dq, shape.q_stride, tile.batch, tile.head, tile.first), shape.q_stride.seq);
  }
}

/// to[d] = factor * the sum of the parts' rows.
template <typename T>
void store_sum(const float* row, std::int64_t stride, std::int64_t parts, std::int64_t d, float factor,
               T* to) {
  for_lanes(0, d, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F total = load(row + i);
    for (std::int64_t part = 1; part < parts; ++part) total += load(row + part * stride + i);
    store(to + i, total * factor, lanes);
  });
}

}  // namespace

void attention_backward_tiles(const AttentionBackward& call, const TileRange& range,
                              const BackwardScratch& scratch) {
  visit_dtype(call.shape.dtype, [&](auto type) { backward_tiles<decltype(type)>(call, range, scratch); });
}

void attention_store_kv_gradients(const AttentionBackward& call, std::int64_t batch, std::int64_t kv_head,
                                  std::int64_t key0, std::int64_t key1, const KvPartials& partials) {
  const AttentionShape& shape = call.shape;
  visit_dtype(shape.dtype, [&](auto type) {
    using T = decltype(type);
    for (std::int64_t key = key0; key < key1; ++key) {
      // dK was summed from dS and unscaled q: the scale enters here, once.
      store_sum(partials.dk + key * partials.width, partials.stride, partials.parts, shape.head_dim,
                shape.scale, head_rows<T>(call.dk, shape.k_stride, batch, kv_head, key));
      store_sum(partials.dv + key * partials.width, partials.stride, partials.parts, shape.head_dim, 1.0f,
                head_rows<T>(call.dv, shape.v_stride, batch, kv_head, key));
    }
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
