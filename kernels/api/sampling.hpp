#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/cache_page.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/sampling.hpp"

namespace tessera::kernels {

/// A token of each row of logits.
struct SampleTokens {
  std::int64_t rows = 0, cols = 0, ld = 0;
  DType dtype = DType::f32;
  const void* logits = nullptr;  ///< [rows, cols], ld elements apart
  SamplingRow* row = nullptr;    ///< [rows]
  /// [rows, words()]: bit t says that a text has token t, or that t is a stop token. Null: no row asks.
  std::uint32_t* seen = nullptr;
  const std::uint32_t* stops = nullptr;
  std::uint64_t* weights = nullptr;  ///< scratch [rows, cols]; null: every row is greedy
  std::int32_t* token = nullptr;     ///< [rows]
  std::int32_t* position = nullptr;  ///< [rows]: one more each
  std::int32_t* length = nullptr;    ///< [rows]: one more each
  DrawnToken* drawn = nullptr;       ///< [rows]

  TESSERA_INLINE std::int64_t words() const { return (cols + 31) / 32; }
};

/// New keys and values of texts in the pages of their rows: x[i, r, h, :] becomes position p of row r, which
/// is row p % kCachePage of page pages[r, p / kCachePage].
struct AppendToCache {
  std::int64_t positions = 1, rows = 0, heads = 0, head_dim = 0;
  DType dtype = DType::f32;
  const void *key = nullptr, *value = nullptr;
  std::int64_t x_position = 0, x_row = 0,
               x_head = 0;  ///< elements between them; head_dim ones are contiguous
  void *kept_key = nullptr, *kept_value = nullptr;
  std::int64_t kept_page = 0, kept_head = 0, kept_position = 0;
  const std::int32_t* pages = nullptr;  ///< [rows, page_entries]
  std::int64_t page_entries = 0;
  /// p is first + i; below 0 there is one position, the last of each row's `length`.
  std::int64_t first = -1;
  /// [rows]: positions from there on are nobody's and are not written. Null: all are.
  const std::int32_t* length = nullptr;
  /// Where the keys begin that a row's query sees of the last `window`: [rows] int32. Null: from the first
  /// on.
  std::int32_t* begin = nullptr;
  std::int64_t window = 0;

  /// The position that x[i, r] becomes; -1 = none.
  TESSERA_INLINE std::int64_t position_of(std::int64_t i, std::int64_t r) const {
    if (first < 0) return std::int64_t{length[r]} - 1;
    return length == nullptr || first + i < length[r] ? first + i : -1;
  }
  /// The first element of position p of row r, in kept_key and kept_value.
  TESSERA_INLINE std::int64_t kept(std::int64_t r, std::int64_t p) const {
    return pages[r * page_entries + p / kCachePage] * kept_page + p % kCachePage * kept_position;
  }
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(append_to_cache, AppendToCache)
namespace tessera::kernels::cuda {
void sample_tokens(const SampleTokens& params, const Launch& launch);
}
