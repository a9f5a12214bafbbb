#include "tessera/ops/elementwise.hpp"

#include "kernels/api/elementwise.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

using detail::check_contiguous;
using detail::check_contiguous_floats;
using detail::check_same_shape;

Tensor add(const ExecCtx& ctx, const Tensor& a, const Tensor& b, DType out) {
  check_contiguous_floats(a, "a");
  check_contiguous_floats(b, "b");
  detail::check_float(out, "the sum");
  detail::check_one_short(a.dtype(), b.dtype(), "a sum");
  detail::check_one_short(a.dtype(), out, "a sum");
  detail::check_one_short(b.dtype(), out, "a sum");
  check_same_shape(a, b, "add");
  Tensor y = Tensor::empty(ctx, a.shape(), out);
  const kernels::Add params{a.numel(), a.dtype(), b.dtype(), out, a.raw(), b.raw(), y.raw()};
  TESSERA_DISPATCH(ctx, add, params);
  return y;
}

void axpby(const ExecCtx& ctx, float alpha, const Tensor& x, float beta, const Tensor& y) {
  check_contiguous_floats(x, "x");
  check_contiguous_floats(y, "y");
  TESSERA_CHECK_EQ(x.numel(), y.numel(), "axpby");
  const kernels::Axpby params{x.numel(), alpha, beta, x.dtype(), y.dtype(), x.raw(), y.raw()};
  TESSERA_DISPATCH(ctx, axpby, params);
}

Tensor cast(const ExecCtx& ctx, const Tensor& x, DType dtype) {
  Tensor y = Tensor::empty(ctx, x.shape(), dtype);
  axpby(ctx, 1.0f, x, 0.0f, y);
  return y;
}

Tensor contiguous(const ExecCtx& ctx, const Tensor& x) {
  Tensor y = Tensor::empty(ctx, x.shape(), x.dtype());
  copy(ctx, x, y);
  return y;
}

void copy(const ExecCtx& ctx, const Tensor& source, const Tensor& target) {
  check_same_shape(source, target, "copy");
  TESSERA_CHECK(source.dtype() == target.dtype() && source.rank() <= 4,
                "copies keep the dtype and take rank <= 4: ", source.dtype(), " to ", target.dtype(),
                ", rank ", source.rank());
  kernels::CopyStrided params;
  params.dtype = source.dtype();
  params.src = source.raw();
  params.dst = target.raw();
  const int skip = 4 - source.rank();
  for (int i = 0; i < source.rank(); ++i) {
    params.size[skip + i] = source.size(i);
    params.src_stride[skip + i] = source.strides()[i];
    params.dst_stride[skip + i] = target.strides()[i];
  }
  TESSERA_DISPATCH(ctx, copy_strided, params);
}

Tensor dropout(const ExecCtx& ctx, const Tensor& x, const DropoutSpec& spec) {
  check_contiguous_floats(x, "x");
  if (!spec.active()) return x;
  Tensor y = Tensor::empty(ctx, x.shape(), x.dtype());
  const std::int64_t cols = x.size(-1);
  TESSERA_CHECK(spec.feature0 % 4 == 0 && (spec.features == 0 || spec.feature0 + cols <= spec.features),
                "dropout of features ", spec.feature0, " to ", spec.feature0 + cols, " of ", spec.features,
                ": the first is a multiple of 4");
  const kernels::Dropout params{cols == 0 ? 0 : x.numel() / cols, cols, x.dtype(), x.raw(), y.raw(), spec};
  TESSERA_DISPATCH(ctx, dropout, params);
  return y;
}

void fill_zero(const ExecCtx& ctx, const Tensor& x) {
  check_contiguous(x, "x");
  const kernels::FillZero params{static_cast<std::int64_t>(x.nbytes()), x.raw()};
  TESSERA_DISPATCH(ctx, fill_zero, params);
}

void fill_constant(const ExecCtx& ctx, const Tensor& x, float value) {
  check_contiguous(x, "x");
  const kernels::FillConstant params{x.numel(), value, x.data<float>()};
  TESSERA_DISPATCH(ctx, fill_constant, params);
}

void scale_by(const ExecCtx& ctx, const Tensor& x, const Tensor& factor) {
  check_contiguous(x, "x");
  TESSERA_CHECK(factor.numel() == 1, "the factor is one element, not ", factor.shape());
  const kernels::ScaleBy params{x.numel(), factor.data<float>(), x.data<float>()};
  TESSERA_DISPATCH(ctx, scale_by, params);
}

void fill_normal(const ExecCtx& ctx, const Tensor& x, float std, const RngKey& key, const Region& region) {
  check_contiguous(x, "x");
  TESSERA_CHECK(x.rank() == 1 || x.rank() == 2, "normal numbers fill matrices and vectors, not rank ",
                x.rank());
  const std::int64_t cols = x.rank() == 2 ? x.size(1) : 1;
  const kernels::FillNormal params{
      x.size(0), cols, region.row0, region.col0,    region.global_cols > 0 ? region.global_cols : cols,
      0.0f,      std,  key,         x.data<float>()};
  TESSERA_DISPATCH(ctx, fill_normal, params);
}

}  // namespace tessera::ops
