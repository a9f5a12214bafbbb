#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels {

/// y[r] = dropout(table[tokens[r] - vocab_begin] + position_table[positions[r]]); zeros where the token is
/// outside the table's range: another rank owns it, and the sum over ranks is the whole.
struct EmbeddingForward {
  std::int64_t rows = 0, cols = 0;
  DType table_dtype = DType::f32;  ///< of table and position_table
  DType y_dtype = DType::f32;
  const std::int32_t* tokens = nullptr;  ///< [rows]
  const void* table = nullptr;           ///< [vocab_size, cols]
  std::int64_t vocab_begin = 0, vocab_size = 0;
  const std::int32_t* positions = nullptr;  ///< [rows]; null iff position_table is null
  const void* position_table = nullptr;     ///< [max_positions, cols] or null
  void* y = nullptr;                        ///< [rows, cols]
  DropoutSpec dropout = {};
};

/// dtable[index[r] - begin] += dropout-masked dy[r] for r in rising order (so the sum does not depend on
/// threads), where index[r] is not `skip`.
struct EmbeddingBackward {
  std::int64_t rows = 0, cols = 0;
  DType dy_dtype = DType::f32;
  const void* dy = nullptr;             ///< [rows, cols]
  const std::int32_t* index = nullptr;  ///< [rows]: tokens or positions
  std::int64_t begin = 0, count = 0;    ///< rows of dtable: index range [begin, begin + count)
  float* dtable = nullptr;              ///< [count, cols]
  std::int64_t skip = -1;               ///< an index that gives nothing; -1 = none
  float beta = 0.0f;                    ///< 0: dtable is cleared first; 1: added to
  DropoutSpec dropout = {};
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(embedding_forward, EmbeddingForward)
TESSERA_DECLARE_KERNEL(embedding_backward, EmbeddingBackward)
