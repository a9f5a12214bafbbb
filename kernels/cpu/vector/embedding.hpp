#pragma once
#include "kernels/api/embedding.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Columns a thread takes of the backward pass come in multiples of this: one draw of dropout bits in the
/// widest set.
namespace tessera::kernels::cpu {
inline constexpr std::int64_t kEmbeddingColumns = 64;
}

/// Rows [begin, end) of forward; columns [begin, end) of backward, begin a multiple of kEmbeddingColumns.
TESSERA_EACH_ISA(void embedding_forward_rows(const EmbeddingForward& params, std::int64_t begin,
                                             std::int64_t end);
                 void embedding_backward_columns(const EmbeddingBackward& params, std::int64_t begin,
                                                 std::int64_t end);)
