#pragma once
#include "tessera/base/philox.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// a + b in dtype `out`; contiguous tensors of one shape.
Tensor add(const ExecCtx& ctx, const Tensor& a, const Tensor& b, DType out);
/// y = alpha x + beta y; dtypes may differ. With beta 0, y is only written.
void axpby(const ExecCtx& ctx, float alpha, const Tensor& x, float beta, const Tensor& y);
/// A contiguous copy in another dtype.
Tensor cast(const ExecCtx& ctx, const Tensor& x, DType dtype);
/// A contiguous tensor with the elements of a strided view of rank <= 4.
Tensor contiguous(const ExecCtx& ctx, const Tensor& x);
/// Copies between views of one shape (rank <= 4) and dtype.
void copy(const ExecCtx& ctx, const Tensor& source, const Tensor& target);
/// Zero where dropped, x / (1 - p) where kept; the same call is its own backward.
Tensor dropout(const ExecCtx& ctx, const Tensor& x, const DropoutSpec& spec);
void fill_zero(const ExecCtx& ctx, const Tensor& x);
void fill_constant(const ExecCtx& ctx, const Tensor& x, float value);
/// x *= factor[0], both fp32; the factor is read where x is.
void scale_by(const ExecCtx& ctx, const Tensor& x, const Tensor& factor);

/// Where a local matrix lies in its global one.
struct Region {
  std::int64_t row0 = 0, col0 = 0, global_cols = 0;
};
/// Normal numbers keyed by (key, global element index): any shard of a tensor gets the values the whole would
/// have. x: fp32 matrix or vector (a vector is one column).
void fill_normal(const ExecCtx& ctx, const Tensor& x, float std, const RngKey& key, const Region& region);

}  // namespace tessera::ops
