#include "nn/cached_attention.hpp"

#include <algorithm>
#include <vector>

#include "tessera/ops/attention.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/rope.hpp"
#include "tessera/ops/sampling.hpp"

namespace tessera::nn {
namespace {

/// What is kept of an encoder's result, [rows, kv_heads, positions, head_dim], as [positions, rows, kv_heads,
/// head_dim] of a pass's rows.
Tensor rows_of(const Tensor& kept, const CachePass& pass, std::int64_t batch) {
  return kept.narrow(0, pass.row0, batch).transpose(1, 2).transpose(0, 1);
}

/// Calls body(row, count, length) for neighbouring rows that are equally long.
template <typename Body>
void for_equal_lengths(const CachePass& pass, Body body) {
  const auto rows = static_cast<std::int64_t>(pass.lengths.size());
  for (std::int64_t row = 0, end = 0; row < rows; row = end) {
    const std::int64_t length = pass.lengths[static_cast<std::size_t>(row)];
    end = row + 1;
    while (end < rows && pass.lengths[static_cast<std::size_t>(end)] == length) ++end;
    body(row, end - row, length);
  }
}

/// Single queries at places of their own: what each sees is a range of keys. `begin`: where it begins.
void see_own_keys(const CachePass& pass, const Tensor& begin, ops::AttentionOptions& attention) {
  attention.causal = false;
  attention.query_offset = pass.longest - 1;  // biases by distance change by one number for all keys of a row
  attention.key_end = pass.key_end;
  attention.window = 0;
  if (begin) attention.key_begin = begin;
}

/// The rows of a table of biases [2 capacity - 1, heads] for the last `seq` of `keys` positions.
Tensor bias_of(const Tensor& table, std::int64_t seq, std::int64_t keys) {
  return table.narrow(0, (table.size(0) + 1) / 2 - seq, seq + keys - 1);
}

/// Keys and values of a layer that a pass reads.
struct Kept {
  Tensor keys, values;
  Tensor pages;  ///< rows of the table where they lie in pages; else they are the input's own
};

/// Biases go by the distance from each query, so rows are computed with those that are as long.
Tensor attend_with_bias(const ExecCtx& ctx, const CachePass& pass, const Tensor& q, const Kept& kept,
                        ops::AttentionOptions attention, const Tensor& bias) {
  const std::int64_t seq = q.size(0), batch = q.size(1);
  if (pass.lengths.empty()) {
    TESSERA_CHECK(pass.begin == 0, "with biases by distance a text's first positions are computed at once");
    attention.bias = bias_of(bias, seq, seq);
    return ops::attention(ctx, q, kept.keys, kept.values, attention).o;
  }
  attention.causal = false;
  Tensor all;
  for_equal_lengths(pass, [&](std::int64_t row, std::int64_t count, std::int64_t length) {
    attention.bias = bias_of(bias, 1, length);
    attention.pages = kept.pages.narrow(0, row, count);
    attention.keys = length;
    const Tensor o = ops::attention(ctx, q.narrow(1, row, count), kept.keys, kept.values, attention).o;
    if (count == batch) {
      all = o;
      return;
    }
    if (!all) all = Tensor::empty(ctx, q.shape(), q.dtype());
    ops::copy(ctx, o, all.narrow(1, row, count));
  });
  return all;
}

}  // namespace

Tensor cached_self_attention(const Forward& forward, std::int64_t layer, const Tensor& qkv,
                             const SelfAttentionOptions& options, const Tensor& bias) {
  const ExecCtx& ctx = forward.exec;
  const CachePass& pass = *forward.cache;
  const KvCache& cache = *pass.cache;
  const std::int64_t seq = qkv.size(0), batch = qkv.size(1), heads = options.heads, kv = options.kv_heads;
  const std::int64_t total = length_of(forward);
  TESSERA_CHECK(total <= cache.capacity && pass.row0 + batch <= cache.rows, "the KV cache holds ",
                cache.capacity, " positions of ", cache.rows, " texts, ", total, " of ", pass.row0 + batch,
                " are needed");
  const Tensor packed = qkv.view({seq, batch, heads + 2 * kv, options.head_dim});
  if (options.rope != nullptr) {
    ops::rope_in_place(ctx, packed.narrow(2, 0, heads + kv), options.positions, *options.rope, false);
  }
  ops::AttentionOptions attention = options.attention;
  const bool single = !pass.lengths.empty();
  const bool windowed = single && attention.window > 0 && attention.window < pass.longest;
  const auto at = static_cast<std::size_t>(layer);
  const ops::CachePlace place{.key = cache.key[at],
                              .value = cache.value[at],
                              .pages = cache.pages.narrow(0, pass.row0, batch),
                              .lengths = pass.key_end,
                              .first = single ? -1 : pass.begin,
                              .window = windowed ? attention.window : 0};
  Kept kept{packed.narrow(2, heads, kv), packed.narrow(2, heads + kv, kv), {}};
  const Tensor begin = ops::append_to_cache(ctx, kept.keys, kept.values, place);
  // The first positions of texts attend to each other alone, and these are here.
  if (single || pass.begin > 0) kept = {place.key, place.value, place.pages};
  const Tensor q = packed.narrow(2, 0, heads);
  const Shape result{seq, batch, heads * options.head_dim};
  if (bias) return attend_with_bias(ctx, pass, q, kept, attention, bias).view(result);
  attention.pages = kept.pages;
  attention.keys = total;
  attention.query_offset = pass.begin;
  if (single) {
    see_own_keys(pass, begin, attention);
  } else if (pass.begin > 0) {
    attention.key_end = pass.key_end;
  }
  return ops::attention(ctx, q, kept.keys, kept.values, attention).o.view(result);
}

Tensor cached_cross_attention(const Forward& forward, std::int64_t layer, const Tensor& q, const Tensor& kv,
                              const SelfAttentionOptions& options) {
  const ExecCtx& ctx = forward.exec;
  const CachePass& pass = *forward.cache;
  const std::int64_t seq = q.size(0), batch = q.size(1), length = pass.encoder_longest;
  TESSERA_CHECK(length <= pass.cache->encoder_capacity && pass.row0 + batch <= pass.cache->rows,
                "the KV cache holds ", pass.cache->encoder_capacity, " positions of an encoder for ",
                pass.cache->rows, " texts, ", length, " for ", pass.row0 + batch, " are needed");
  const auto kept = [&](const std::vector<Tensor>& side) {
    return rows_of(side[static_cast<std::size_t>(layer)], pass, batch).narrow(0, 0, length);
  };
  const Tensor keys = kept(pass.cache->cross_key), values = kept(pass.cache->cross_value);
  if (kv) {
    const Tensor packed = kv.view({length, batch, 2 * options.kv_heads, options.head_dim});
    ops::copy(ctx, packed.narrow(2, 0, options.kv_heads), keys);
    ops::copy(ctx, packed.narrow(2, options.kv_heads, options.kv_heads), values);
  }
  ops::AttentionOptions attention = options.attention;
  attention.key_begin = {};
  attention.key_end = pass.encoder_end;
  return ops::attention(ctx, q.view({seq, batch, options.heads, options.head_dim}), keys, values, attention)
      .o.view(q.shape());
}

}  // namespace tessera::nn
