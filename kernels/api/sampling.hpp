#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
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

/// New keys and values behind those that each text has: kept[r, h, length[r] - 1, :] = x[r, h, :].
struct AppendToCache {
  std::int64_t rows = 0, heads = 0, head_dim = 0;
  DType dtype = DType::f32;
  const void *key = nullptr, *value = nullptr;
  std::int64_t x_row = 0, x_head = 0;  ///< elements between them; head_dim ones are contiguous
  void *kept_key = nullptr, *kept_value = nullptr;
  std::int64_t kept_row = 0, kept_head = 0, kept_position = 0;
  const std::int32_t* length = nullptr;  ///< [rows]
  /// Where the keys begin that a row's query sees of the last `window`: [rows] int32. Null: from the first
  /// on.
  std::int32_t* begin = nullptr;
  std::int64_t window = 0;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(append_to_cache, AppendToCache)
namespace tessera::kernels::cuda {
void sample_tokens(const SampleTokens& params, const Launch& launch);
}
