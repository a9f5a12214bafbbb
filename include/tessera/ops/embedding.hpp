#pragma once
#include "tessera/base/philox.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

struct EmbeddingOptions {
  DType out = DType::f32;
  DropoutSpec dropout;
  std::int64_t first_token = 0;  ///< row i of the table is token first_token + i
};

/// dropout(table[tokens] + position_table[positions]) as [..., c]. tokens int32 of any shape; position_table
/// and positions may both be undefined. A token the table has no row for gives a row of zeros: another rank
/// has it, and the sum over ranks is the whole, bit for bit. That tokens are in the vocabulary at all is the
/// caller's promise (data/ checks them on the host).
Tensor embedding(const ExecCtx& ctx, const Tensor& tokens, const Tensor& table, const Tensor& positions,
                 const Tensor& position_table, const EmbeddingOptions& options);

/// dtable = beta dtable + scattered rows of dy (dropout as in forward), in a fixed order. fp32. Row i of
/// dtable belongs to index first + i; other indices are passed over, and so is the index `skip`.
void embedding_backward(const ExecCtx& ctx, const Tensor& index, const Tensor& dy, const Tensor& dtable,
                        float beta, const DropoutSpec& dropout = {}, std::int64_t first = 0,
                        std::int64_t skip = -1);

}  // namespace tessera::ops
