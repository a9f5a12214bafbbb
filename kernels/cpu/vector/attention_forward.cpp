#include "kernels/cpu/vector/attention.hpp"
#include "kernels/cpu/vector/attention_keys.hpp"
#include "kernels/cpu/vector/attention_lanes.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// Views of one tile's part of the scratch.
struct TileState {
  float* q_t;
  float* o;
  float* max;
  float* sum;
};

TileState state_of(const AttentionShape& shape, const ForwardScratch& scratch, int t) {
  const std::int64_t row = std::int64_t{t} * kQueryTile;
  return {scratch.q_t + row * shape.head_dim, scratch.o + row * scratch.width, scratch.max + row,
          scratch.sum + row};
}

/// Multiplies row i of o by factor[i], i < rows.
void rescale(const float* factor, int rows, std::int64_t width, float* o) {
  for (int i = 0; i < rows; ++i) {
    if (factor[i] == 1.0f) continue;
    for (std::int64_t c = 0; c < width; c += kLanes)
      store(o + i * width + c, load(o + i * width + c) * factor[i]);
  }
}

void drop(const AttentionShape& shape, const Lanes& lanes, float* scores) {
  const QueryTile& tile = *lanes.block->tile;
  const LaneDropout dropout(shape, tile.batch, tile.head, tile.first + lanes.query);
  I keep[4];
  for (int group = lanes.any.begin / 4; group * 4 < lanes.any.end; ++group) {
    dropout.kept(lanes.block->key0 / 4 + group, keep);
    for (int w = 0; w < 4; ++w) {
      const int key = 4 * group + w;
      if (key < lanes.any.begin || key >= lanes.any.end) continue;
      float* p = lanes.at(scores, key);
      store(p, select(keep[w], load(p), F{}));
    }
  }
}

/// Scores of a register of queries to probabilities relative to the new running maximum (Milakov and
/// Gimelshein's online softmax); what was summed before is scaled to it.
void softmax(const AttentionShape& shape, const Lanes& lanes, const ForwardScratch& scratch,
             const TileState& state) {
  float* scores = scratch.scores;
  lanes.clear_rest(scores);
  if (lanes.any.empty()) return;
  const F lowest = splat(-__builtin_inff());
  const F before = load(state.max + lanes.query);
  F top = before;
  lanes.for_keys(
      [&](int key) VEC_LAMBDA {
        float* s = lanes.at(scores, key);
        const F x = select(lanes.sees(key), lanes.biased(load(s), key), lowest);
        store(s, x);
        top = max(top, x);
      },
      [&](int key) VEC_LAMBDA { top = max(top, load(lanes.at(scores, key))); });
  // A lane that has seen no key yet: any finite reference does.
  const F reference = select(top == lowest, F{}, top);
  const F factor = exp2_of(before - reference);
  F sum = load(state.sum + lanes.query) * factor;
  lanes.for_keys(
      [&](int key) VEC_LAMBDA {
        float* s = lanes.at(scores, key);
        const F p = select(lanes.sees(key), exp2_of(load(s) - reference), F{});
        store(s, p);
        sum += p;
      },
      [&](int key) VEC_LAMBDA {
        float* s = lanes.at(scores, key);
        const F p = exp2_of(load(s) - reference);
        store(s, p);
        sum += p;
      });
  if (shape.dropout > 0.0f) drop(shape, lanes, scores);
  store(state.max + lanes.query, top);
  store(state.sum + lanes.query, sum);
  float factors[kLanes];
  store(factors, factor);
  rescale(factors, smaller(kLanes, lanes.block->tile->count - lanes.query), scratch.width,
          state.o + lanes.query * scratch.width);
}

void forward_block(const AttentionShape& shape, const Block& block, const ForwardScratch& scratch,
                   const TileState& state) {
  score_block(block, scratch.k, scratch.width, state.q_t, shape.head_dim, scratch.scores);
  for (int i = 0; i * kLanes < block.tile->count; ++i) softmax(shape, Lanes(shape, block, i), scratch, state);
  add_over_keys(block, scratch.scores, scratch.v, scratch.width, shape.head_dim, state.o);
}

template <typename T>
void start_tile(const AttentionForward& call, const QueryTile& tile, const ForwardScratch& scratch,
                const TileState& state) {
  const AttentionShape& shape = call.shape;
  pack_columns(head_rows<T>(call.q, shape.q_stride, tile.batch, tile.head, tile.first), shape.q_stride.seq,
               tile.count, shape.head_dim, shape.scale * kLog2E, state.q_t);
  for (int i = 0; i < kQueryTile; ++i) {
    state.max[i] = -__builtin_inff();
    state.sum[i] = 0.0f;
  }
  for (std::int64_t i = 0; i < tile.count * scratch.width; i += kLanes) store(state.o + i, F{});
}

template <typename T>
void finish_tile(const AttentionForward& call, const QueryTile& tile, const ForwardScratch& scratch,
                 const TileState& state) {
  const AttentionShape& shape = call.shape;
  const float kept = 1.0f / (1.0f - shape.dropout);
  T* o = head_rows<T>(call.o, shape.o_stride, tile.batch, tile.head, tile.first);
  float* lse =
      call.lse ? call.lse + (tile.batch * shape.heads + tile.head) * shape.seq_q + tile.first : nullptr;
  for (int i = 0; i < tile.count; ++i) {
    const float sum = state.sum[i];
    const bool masked = sum == 0.0f;
    store_rows(state.o + i * scratch.width, scratch.width, 1, shape.head_dim, masked ? 0.0f : kept / sum,
               o + i * shape.o_stride.seq, shape.o_stride.seq);
    if (lse) lse[i] = masked ? -__builtin_inff() : (state.max[i] + __builtin_log2f(sum)) * kLn2;
  }
}

template <typename T>
void forward_tiles(const AttentionForward& call, const TileRange& range, const ForwardScratch& scratch) {
  const AttentionShape& shape = call.shape;
  std::int64_t first_key = shape.seq_k, last_key = 0;
  for (int t = 0; t < range.count; ++t) {
    QueryTile& tile = scratch.tiles[t];
    describe_tile(shape, range, range.first + t, tile);
    start_tile<T>(call, tile, scratch, state_of(shape, scratch, t));
    first_key = smaller<std::int64_t>(first_key, tile.begin[0]);
    last_key = larger<std::int64_t>(last_key, tile.end[kQueryTile - 1]);
  }
  const KeyRows<T> k = keys_of<T>(call, range.batch, range.kv_head);
  const KeyRows<T> v = values_of<T>(call, range.batch, range.kv_head);
  for (std::int64_t key0 = first_key / 4 * 4; key0 < last_key; key0 += kKeyBlock) {
    const int keys = static_cast<int>(smaller<std::int64_t>(kKeyBlock, last_key - key0));
    pack_keys(k, key0, keys, shape.head_dim, scratch.k, scratch.width);
    pack_keys(v, key0, keys, shape.head_dim, scratch.v, scratch.width);
    for (int t = 0; t < range.count; ++t) {
      Block block{&scratch.tiles[t], key0, keys, {}};
      block.span = seen_by_any(block, 0, kQueryTile - 1);
      if (block.span.empty()) continue;
      block.bias = gather_bias(shape, block, scratch.bias);
      forward_block(shape, block, scratch, state_of(shape, scratch, t));
    }
  }
  for (int t = 0; t < range.count; ++t) {
    finish_tile<T>(call, scratch.tiles[t], scratch, state_of(shape, scratch, t));
  }
}

}  // namespace

void attention_forward_tiles(const AttentionForward& call, const TileRange& range,
                             const ForwardScratch& scratch) {
  visit_dtype(call.shape.dtype, [&](auto type) { forward_tiles<decltype(type)>(call, range, scratch); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
