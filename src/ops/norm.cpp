#include "tessera/ops/norm.hpp"

#include "kernels/api/norm.hpp"
#include "kernels/api/split_norm.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::ops {
namespace {

using detail::check_contiguous;
using detail::check_contiguous_floats;
using detail::check_same_shape;

kernels::NormKind kind_of(const NormOptions& options) {
  return options.rms ? kernels::NormKind::rms : kernels::NormKind::layer;
}

/// What normalised values are multiplied by.
Tensor factor_of(const ExecCtx& ctx, const Tensor& weight, const NormOptions& options) {
  if (!options.zero_centered) return weight;
  Tensor factor = Tensor::empty(ctx, weight.shape(), DType::f32);
  fill_constant(ctx, factor, 1.0f);
  axpby(ctx, 1.0f, weight, 1.0f, factor);
  return factor;
}

float* floats(const Tensor& t) { return t ? t.data<float>() : nullptr; }

/// The norm of `residual`, with results still to be filled in.
kernels::AddNormForward describe(const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                 const NormOptions& options) {
  check_contiguous_floats(residual, "residual");
  detail::check_one_short(residual.dtype(), options.out, "a norm");
  const std::int64_t cols = residual.size(-1);
  TESSERA_CHECK(weight && weight.shape() == Shape{cols} && weight.dtype() == DType::f32,
                "norm weight of shape ", weight.shape(), " for ", cols, " features");
  TESSERA_CHECK(!bias || (bias.shape() == weight.shape() && bias.dtype() == weight.dtype()),
                "norm bias must be like its weight");
  return {.rows = cols == 0 ? 0 : residual.numel() / cols,
          .cols = cols,
          .kind = kind_of(options),
          .eps = options.eps,
          .residual_dtype = residual.dtype(),
          .dtype = options.out,
          .residual = residual.raw(),
          .weight = floats(weight),
          .bias = floats(bias)};
}

/// Checks, and makes the tensors of `grad`.
kernels::AddNormBackward describe_backward(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight,
                                           const Tensor& dy, const Tensor& dresidual, bool has_branch,
                                           const NormOptions& options, const DropoutSpec& dropout,
                                           AddNormGrad& grad) {
  check_contiguous(dy, "dy");
  check_same_shape(saved.residual, dy, "dy");
  TESSERA_CHECK_EQ(dy.dtype(), options.out, "dtype of the gradient of a norm");
  if (dresidual) {
    check_contiguous(dresidual, "dresidual");
    check_same_shape(dresidual, dy, "dresidual");
    TESSERA_CHECK_EQ(dresidual.dtype(), saved.residual.dtype(), "gradient of the residual");
  }
  // The gradient from above is dead after this call if nobody else holds it: write over it.
  grad.residual =
      dresidual && dresidual.is_unique() ? dresidual : Tensor::empty(ctx, dy.shape(), saved.residual.dtype());
  const bool same = !dropout.active() && options.out == saved.residual.dtype();
  if (has_branch) grad.branch = same ? grad.residual : Tensor::empty(ctx, dy.shape(), options.out);
  return {.rows = saved.rstd.numel(),
          .cols = dy.size(-1),
          .kind = kind_of(options),
          .residual_dtype = saved.residual.dtype(),
          .dtype = options.out,
          .residual_out = saved.residual.raw(),
          .mean = floats(saved.mean),
          .rstd = floats(saved.rstd),
          .weight = floats(weight),
          .dy = dy.raw(),
          .dresidual = dresidual.raw(),
          .dresidual_in = grad.residual.raw(),
          .dbranch = has_branch && !same ? grad.branch.raw() : nullptr,
          .dropout = dropout};
}

kernels::NormWeightGrad describe_sums(const AddNorm& saved, const Tensor& dy, const NormWeightSums& sums,
                                      const NormOptions& options, const Tensor& scratch) {
  return {.rows = saved.rstd.numel(),
          .cols = dy.size(-1),
          .kind = kind_of(options),
          .residual_dtype = saved.residual.dtype(),
          .dtype = dy.dtype(),
          .residual_out = saved.residual.raw(),
          .mean = floats(saved.mean),
          .rstd = floats(saved.rstd),
          .dy = dy.raw(),
          .dweight = floats(sums.dweight),
          .dbias = floats(sums.dbias),
          .beta = sums.beta,
          .scratch = floats(scratch)};
}

}  // namespace

AddNorm add_norm(const ExecCtx& ctx, const Tensor& residual, const Tensor& branch, const Tensor& weight,
                 const Tensor& bias, const NormOptions& options, const DropoutSpec& dropout) {
  AddNorm out;
  out.residual = residual;
  const Tensor factor = factor_of(ctx, weight, options);
  kernels::AddNormForward params = describe(residual, factor, bias, options);
  if (branch) {
    check_contiguous(branch, "branch");
    check_same_shape(residual, branch, "residual and branch");
    TESSERA_CHECK_EQ(branch.dtype(), options.out, "dtype of the branch");
    out.residual = Tensor::empty(ctx, residual.shape(), residual.dtype());
    params.branch = branch.raw();
    params.dropout = dropout;
    params.residual_out = out.residual.raw();
  }
  out.y = Tensor::empty(ctx, residual.shape(), options.out);
  if (!options.rms) out.mean = Tensor::empty(ctx, {params.rows}, DType::f32);
  out.rstd = Tensor::empty(ctx, {params.rows}, DType::f32);
  params.y = out.y.raw();
  params.mean = floats(out.mean);
  params.rstd = floats(out.rstd);
  TESSERA_DISPATCH(ctx, add_norm_forward, params);
  return out;
}

Tensor norm_again(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight, const Tensor& bias,
                  const NormOptions& options) {
  const Tensor factor = factor_of(ctx, weight, options);
  kernels::AddNormForward params = describe(saved.residual, factor, bias, options);
  TESSERA_CHECK(saved.rstd && saved.rstd.numel() == params.rows, "statistics of shape ", saved.rstd.shape(),
                " for ", params.rows, " rows");
  TESSERA_CHECK(options.rms || (saved.mean && saved.mean.numel() == params.rows), "means of shape ",
                saved.mean.shape(), " for ", params.rows, " rows");
  Tensor y = Tensor::empty(ctx, saved.residual.shape(), options.out);
  params.y = y.raw();
  params.mean = options.rms ? nullptr : floats(saved.mean);
  params.rstd = floats(saved.rstd);
  params.known_statistics = true;
  TESSERA_DISPATCH(ctx, add_norm_forward, params);
  return y;
}

AddNormGrad add_norm_backward(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight,
                              const Tensor& dy, const Tensor& dresidual, bool has_branch,
                              const NormOptions& options, const DropoutSpec& dropout) {
  AddNormGrad grad;
  const Tensor factor = factor_of(ctx, weight, options);
  const kernels::AddNormBackward params =
      describe_backward(ctx, saved, factor, dy, dresidual, has_branch, options, dropout, grad);
  TESSERA_DISPATCH(ctx, add_norm_backward, params);
  return grad;
}

void norm_weight_grad(const ExecCtx& ctx, const AddNorm& saved, const Tensor& dy, const Tensor& dweight,
                      const Tensor& dbias, float beta, const NormOptions& options) {
  const Tensor scratch = Tensor::empty(ctx, {kernels::kNormGradParts, 2, dy.size(-1)}, DType::f32);
  const kernels::NormWeightGrad params = describe_sums(saved, dy, {dweight, dbias, beta}, options, scratch);
  TESSERA_DISPATCH(ctx, norm_weight_grad, params);
}

AddNormGrad add_norm_gradients(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight,
                               const Tensor& dy, const Tensor& dresidual, bool has_branch,
                               const NormWeightSums& sums, const NormOptions& options,
                               const DropoutSpec& dropout) {
  AddNormGrad grad;
  const Tensor factor = factor_of(ctx, weight, options);
  kernels::AddNormGradients params;
  params.input = describe_backward(ctx, saved, factor, dy, dresidual, has_branch, options, dropout, grad);
  ctx.stream->make_current();
  const int parts = ctx.device().is_cuda()
                        ? kernels::cuda::norm_gradient_parts(params.input.rows, params.input.cols)
                        : kernels::cpu::norm_gradient_parts(params.input.rows, params.input.cols);
  const Tensor scratch = Tensor::empty(ctx, {parts, 2, params.input.cols}, DType::f32);
  params.weight = describe_sums(saved, dy, sums, options, scratch);
  TESSERA_DISPATCH(ctx, add_norm_gradients, params);
  return grad;
}

Tensor row_products(const ExecCtx& ctx, const Tensor& a, const Tensor& b) {
  check_contiguous_floats(a, "a");
  check_contiguous(b, "b");
  check_same_shape(a, b, "a and b");
  TESSERA_CHECK_EQ(b.dtype(), a.dtype(), "dtypes of a and b");
  const std::int64_t cols = a.size(-1), rows = cols == 0 ? 0 : a.numel() / cols;
  Tensor out = Tensor::empty(ctx, {rows}, DType::f32);
  const kernels::RowProducts params{
      .rows = rows, .cols = cols, .dtype = a.dtype(), .a = a.raw(), .b = b.raw(), .out = floats(out)};
  TESSERA_DISPATCH(ctx, row_products, params);
  return out;
}

void inverse_roots(const ExecCtx& ctx, const Tensor& sums, std::int64_t width, float eps) {
  TESSERA_CHECK_EQ(sums.dtype(), DType::f32, "dtype of sums");
  const kernels::InverseRoots params{
      .n = sums.numel(), .width = static_cast<float>(width), .eps = eps, .values = floats(sums)};
  TESSERA_DISPATCH(ctx, inverse_roots, params);
}

void norm_projection(const ExecCtx& ctx, const AddNorm& saved, const Tensor& sums, std::int64_t width,
                     const Tensor& dx) {
  check_contiguous_floats(dx, "dx");
  check_same_shape(saved.residual, dx, "dx");
  TESSERA_CHECK_EQ(dx.dtype(), saved.residual.dtype(), "dtype of dx");
  TESSERA_CHECK_EQ(sums.numel(), saved.rstd.numel(), "sums");
  const kernels::NormProjection params{.rows = saved.rstd.numel(),
                                       .cols = dx.size(-1),
                                       .dtype = dx.dtype(),
                                       .width = static_cast<float>(width),
                                       .x = saved.residual.raw(),
                                       .rstd = floats(saved.rstd),
                                       .sums = floats(sums),
                                       .y = dx.raw()};
  TESSERA_DISPATCH(ctx, norm_projection, params);
}

}  // namespace tessera::ops
