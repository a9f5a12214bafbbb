#include "kernels/cpu/vector/attention.hpp"
#include "kernels/cpu/vector/attention_keys.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// One query row of a decoding task.
struct Row {
  std::int64_t head = 0, query = 0;
  std::int32_t begin = 0, end = 0;  // keys it sees
  float slope = 0.0f, max = 0.0f, sum = 0.0f;
};

/// scores[r][i] = q[r] . k[key0 + i], i in [0, keys): products of kLanes keys, transposed, add up to a
/// register of scores.
template <int Rows, typename T>
void decode_scores(const DecodeScratch& scratch, const KeyRows<T>& k, const KeyRows<T>& v, std::int64_t key0,
                   int keys, std::int64_t d) {
  const std::int64_t padded = (d + kLanes - 1) / kLanes * kLanes;
  for (int key = 0; key < keys; key += kLanes) {
    F products[Rows][kLanes];
    const int last = smaller(kLanes, keys - key) - 1;
    const T* const first = k.at(key0 + key);
    const bool together = k.run(key0 + key, last + 1) > last;
    for (int i = 0; i < kLanes; ++i) {
      // Past the last key its row is read again; the scores it gives are ignored.
      const int own = smaller(i, last);
      const T* row = together ? first + own * k.stride : k.at(key0 + key + own);
      k.fetch(key0 + key + i + kPrefetchRows);
      v.fetch(key0 + key + i);
      F sums[Rows] = {};
      for (std::int64_t c = 0; c < padded; c += kLanes) {
        const F x = load(row + c);
        for (int r = 0; r < Rows; ++r) sums[r] += load(scratch.q + r * scratch.width + c) * x;
      }
      for (int r = 0; r < Rows; ++r) products[r][i] = sums[r];
    }
    for (int r = 0; r < Rows; ++r) {
      transpose(products[r]);
      F total = products[r][0];
      for (int i = 1; i < kLanes; ++i) total += products[r][i];
      store(scratch.scores + r * kKeyBlock + key, total);
    }
  }
}

/// Online softmax of one row over a block; scales what o holds to the new maximum.
void decode_softmax(Row& row, std::int64_t key0, int keys, float position, float cap, std::int64_t width,
                    float* scores, float* o) {
  const Span span = within(row.begin, row.end, key0, keys);
  const F lowest = splat(-__builtin_inff());
  F top = splat(row.max);
  for (int key = 0; key < keys; key += kLanes) {
    const I index = iota() + key;
    const F distance = __builtin_convertvector(index, F) + (static_cast<float>(key0) - position);
    const F raw = load(scores + key);
    const F x = cap != 0.0f ? cap * tanh_of(raw * (1.0f / cap)) : raw + distance * row.slope;
    const F s = select((index >= span.begin) & (index < span.end), x, lowest);
    store(scores + key, s);
    top = max(top, s);
  }
  const float largest = max_lane(top);
  const float reference = largest == -__builtin_inff() ? 0.0f : largest;
  F sums = F{};
  for (int key = 0; key < keys; key += kLanes) {
    const F s = load(scores + key);
    const F p = select(s == lowest, F{}, exp2_of(s - reference));
    store(scores + key, p);
    sums += p;
  }
  const float factor = exp2_of(splat(row.max - reference))[0];
  row.sum = row.sum * factor + sum(sums);
  row.max = largest;
  for (std::int64_t c = 0; c < width; c += kLanes) store(o + c, load(o + c) * factor);
}

/// o[r] += sum over i in [0, keys) of scores[r][i] * v[key0 + i], for `Vectors` registers of columns.
template <int Rows, int Vectors, typename T>
void decode_values(const DecodeScratch& scratch, const KeyRows<T>& v, std::int64_t key0, int keys,
                   std::int64_t column) {
  float* const o = scratch.o + column;
  F sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int i = 0; i < Vectors; ++i) sums[r][i] = load(o + r * scratch.width + i * kLanes);
  }
  for (int key = 0; key < keys;) {
    const T* row = v.at(key0 + key) + column;
    const int end = key + v.run(key0 + key, keys - key);
    for (; key < end; ++key, row += v.stride) {
      for (int i = 0; i < Vectors; ++i) {
        const F x = load(row + i * kLanes);
        for (int r = 0; r < Rows; ++r) sums[r][i] += splat(scratch.scores[r * kKeyBlock + key]) * x;
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int i = 0; i < Vectors; ++i) store(o + r * scratch.width + i * kLanes, sums[r][i]);
  }
}

/// Keys [key0, key0 + keys), which are [from, from + keys) of k and v.
template <int Rows, typename T>
void decode_block(const AttentionShape& shape, Row* rows, const DecodeScratch& scratch, const KeyRows<T>& k,
                  const KeyRows<T>& v, std::int64_t from, std::int64_t key0, int keys) {
  decode_scores<Rows>(scratch, k, v, from, keys, shape.head_dim);
  for (int r = 0; r < Rows; ++r) {
    decode_softmax(rows[r], key0, keys, static_cast<float>(rows[r].query + shape.query_offset),
                   shape.softcap * kLog2E, scratch.width, scratch.scores + r * kKeyBlock,
                   scratch.o + r * scratch.width);
  }
  const std::int64_t padded = (shape.head_dim + kLanes - 1) / kLanes * kLanes;
  std::int64_t c = 0;
  for (; c + 4 * kLanes <= padded; c += 4 * kLanes) decode_values<Rows, 4>(scratch, v, from, keys, c);
  for (; c < padded; c += kLanes) decode_values<Rows, 1>(scratch, v, from, keys, c);
}

template <int Rows, typename T>
void decode_keys(const AttentionForward& call, const TileRange& range, Row* rows,
                 const DecodeScratch& scratch) {
  const AttentionShape& shape = call.shape;
  std::int64_t first_key = shape.seq_k, last_key = 0;
  for (int r = 0; r < Rows; ++r) {
    if (rows[r].begin >= rows[r].end) continue;
    first_key = smaller<std::int64_t>(first_key, rows[r].begin);
    last_key = larger<std::int64_t>(last_key, rows[r].end);
  }
  const KeyRows<T> k = keys_of<T>(call, range.batch, range.kv_head);
  const KeyRows<T> v = values_of<T>(call, range.batch, range.kv_head);
  const KeyRows<float> packed_k{scratch.k, scratch.width}, packed_v{scratch.v, scratch.width};
  for (std::int64_t key0 = first_key; key0 < last_key; key0 += kKeyBlock) {
    const int keys = static_cast<int>(smaller<std::int64_t>(kKeyBlock, last_key - key0));
    if (shape.head_dim % kLanes == 0) {
      decode_block<Rows>(shape, rows, scratch, k, v, key0, key0, keys);
    } else {
      pack_keys(k, key0, keys, shape.head_dim, scratch.k, scratch.width);
      pack_keys(v, key0, keys, shape.head_dim, scratch.v, scratch.width);
      decode_block<Rows>(shape, rows, scratch, packed_k, packed_v, 0, key0, keys);
    }
  }
}

template <typename T>
void decode_rows(const AttentionForward& call, const TileRange& range, const DecodeScratch& scratch) {
  const AttentionShape& shape = call.shape;
  Row rows[kDecodeRows];
  for (int r = 0; r < range.count; ++r) {
    Row& row = rows[r];
    row.head = range.kv_head * (shape.heads / shape.kv_heads) + (range.first + r) / shape.seq_q;
    row.query = (range.first + r) % shape.seq_q;
    visible_keys(shape, range.batch, row.query, 1, &row.begin, &row.end);
    row.slope = shape.alibi_slopes ? shape.alibi_slopes[row.head] * kLog2E : 0.0f;
    row.max = -__builtin_inff();
    float* q = scratch.q + r * scratch.width;
    pack_rows(head_rows<T>(call.q, shape.q_stride, range.batch, row.head, row.query), 0, 1, shape.head_dim, q,
              0);
    for (std::int64_t c = 0; c < shape.head_dim; ++c) q[c] *= shape.scale * kLog2E;
    for (std::int64_t c = 0; c < scratch.width; c += kLanes) store(scratch.o + r * scratch.width + c, F{});
  }
  static_assert(kDecodeRows == 4);
  switch (range.count) {
    case 1:
      decode_keys<1, T>(call, range, rows, scratch);
      break;
    case 2:
      decode_keys<2, T>(call, range, rows, scratch);
      break;
    case 3:
      decode_keys<3, T>(call, range, rows, scratch);
      break;
    default:
      decode_keys<4, T>(call, range, rows, scratch);
      break;
  }
  for (int r = 0; r < range.count; ++r) {
    const Row& row = rows[r];
    const bool masked = row.sum == 0.0f;
    store_rows(scratch.o + r * scratch.width, scratch.width, 1, shape.head_dim,
               masked ? 0.0f : 1.0f / row.sum,
               head_rows<T>(call.o, shape.o_stride, range.batch, row.head, row.query), shape.o_stride.seq);
    if (call.lse) {
      call.lse[(range.batch * shape.heads + row.head) * shape.seq_q + row.query] =
          masked ? -__builtin_inff() : (row.max + __builtin_log2f(row.sum)) * kLn2;
    }
  }
}

}  // namespace

void attention_decode_rows(const AttentionForward& call, const TileRange& range,
                           const DecodeScratch& scratch) {
  visit_dtype(call.shape.dtype, [&](auto type) { decode_rows<decltype(type)>(call, range, scratch); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
