#pragma once
/// The ops that fuse a linear with an activation, with memory for their results.

#include "tessera/ops/gemm.hpp"

namespace tessera::test {

inline ops::LinearActivation linear_with_activation(const ExecCtx& ctx, const Tensor& x, const Tensor& weight,
                                                    const Tensor& bias, ops::ActivationKind kind,
                                                    bool keep_pre = true) {
  Shape shape = x.shape();
  shape[-1] = weight.size(0);
  const auto room = [&] { return Tensor::empty(ctx, shape, x.dtype()); };
  ops::LinearActivation result{keep_pre ? room() : Tensor(), room()};
  ops::linear_with_activation_into(ctx, x, weight, bias, kind, result);
  return result;
}

inline Tensor linear_backward_input(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight,
                                    const Tensor& pre, ops::ActivationKind kind) {
  Shape shape = dy.shape();
  shape[-1] = weight.size(1);
  Tensor dpre = Tensor::empty(ctx, shape, dy.dtype());
  ops::linear_backward_input_into(ctx, dy, weight, pre, kind, dpre);
  return dpre;
}

}  // namespace tessera::test
