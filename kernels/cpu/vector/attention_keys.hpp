#pragma once
/// Keys or values of one sample and KV head, wherever they lie: a stride apart, or in pages.

#include "kernels/cpu/vector/attention_block.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

template <typename T>
struct KeyRows {
  const T* base = nullptr;  ///< of key 0, or of page 0
  std::int64_t stride = 0;
  const std::int32_t* pages = nullptr;  ///< of the sample; null = none
  std::int64_t page = 0;                ///< elements from one page to the next
  std::int64_t keys = 0, head_dim = 0;

  VEC_LAMBDA const T* at(std::int64_t key) const {
    if (pages == nullptr) return base + key * stride;
    return base + pages[key / kCachePage] * page + key % kCachePage * stride;
  }
  /// How many of the `most` keys from `key` on lie a stride apart.
  VEC_LAMBDA int run(std::int64_t key, int most) const {
    if (pages == nullptr) return most;
    return static_cast<int>(smaller<std::int64_t>(most, kCachePage - key % kCachePage));
  }
  /// Fetches a key that is needed soon. What a hardware prefetcher follows ends with the page.
  VEC_LAMBDA void fetch(std::int64_t key) const {
    if (pages != nullptr && key < keys) prefetch_row(at(key), head_dim);
  }
};

template <typename T>
KeyRows<T> rows_of(const AttentionShape& shape, const void* base, const HeadStrides& stride,
                   std::int64_t page, std::int64_t batch, std::int64_t kv_head) {
  return {head_rows<T>(base, stride, batch, kv_head, 0),
          stride.seq,
          shape.pages ? shape.pages + batch * shape.page_entries : nullptr,
          page,
          shape.seq_k,
          shape.head_dim};
}
template <typename T>
KeyRows<T> keys_of(const AttentionForward& call, std::int64_t batch, std::int64_t kv_head) {
  return rows_of<T>(call.shape, call.k, call.shape.k_stride, call.shape.k_page, batch, kv_head);
}
template <typename T>
KeyRows<T> values_of(const AttentionForward& call, std::int64_t batch, std::int64_t kv_head) {
  return rows_of<T>(call.shape, call.v, call.shape.v_stride, call.shape.v_page, batch, kv_head);
}

/// pack_rows of the `count` keys from `key` on.
template <typename T>
inline void pack_keys(const KeyRows<T>& rows, std::int64_t key, int count, std::int64_t d, float* to,
                      std::int64_t width) {
  for (int i = 0; i < count;) {
    const int together = rows.run(key + i, count - i);
    for (int next = 0; next < kPrefetchRows; ++next) rows.fetch(key + i + together + next);
    pack_rows(rows.at(key + i), rows.stride, together, d, to + i * width, width);
    i += together;
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
