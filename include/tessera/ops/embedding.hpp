#pragma once
#include "tessera/base/philox.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// dropout(table[tokens] + position_table[positions]) as [..., c] in dtype `out`. tokens int32 of any shape
/// below the table's rows; position_table and positions may both be undefined. Token values are the caller's
/// promise (data/ checks them on the host).
Tensor embedding(const ExecCtx& ctx, const Tensor& tokens, const Tensor& table, const Tensor& positions,
                 const Tensor& position_table, DType out, const DropoutSpec& dropout = {});

/// dtable = beta dtable + scattered rows of dy (dropout as in forward), in a fixed order. fp32.
void embedding_backward(const ExecCtx& ctx, const Tensor& index, const Tensor& dy, const Tensor& dtable,
                        float beta, const DropoutSpec& dropout = {});

}  // namespace tessera::ops
