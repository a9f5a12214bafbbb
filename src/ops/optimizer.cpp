#include "tessera/ops/optimizer.hpp"

#include <cmath>

#include "kernels/api/optimizer.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

bfloat16* model_copy(const Tensor& model, std::int64_t n) {
  if (!model) return nullptr;
  TESSERA_CHECK_EQ(model.numel(), n, "elements of the model copy");
  return model.data<bfloat16>();
}

void check_flat(const Tensor& t, std::int64_t n, const char* what) {
  detail::check_contiguous(t, what);
  TESSERA_CHECK(t.numel() == n && t.dtype() == DType::f32, what, " must hold ", n, " float32 values");
}

}  // namespace

void adam(const ExecCtx& ctx, const Tensor& grad, const Tensor& main, const Tensor& m, const Tensor& v,
          const Tensor& model, const AdamOptions& options) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  check_flat(grad, n, "gradient");
  check_flat(m, n, "first moment");
  check_flat(v, n, "second moment");
  const auto step = static_cast<double>(options.step);
  const kernels::Adam params{.n = n,
                             .lr = options.lr,
                             .beta1 = options.beta1,
                             .beta2 = options.beta2,
                             .eps = options.eps,
                             .weight_decay = options.weight_decay,
                             .decoupled = options.decoupled,
                             .correction1 = 1.0 - std::pow(options.beta1, step),
                             .correction2 = 1.0 - std::pow(options.beta2, step),
                             .grad_scale = static_cast<float>(options.grad_scale),
                             .grad = grad.data<float>(),
                             .main = main.data<float>(),
                             .m = m.data<float>(),
                             .v = v.data<float>(),
                             .model = model_copy(model, n)};
  TESSERA_DISPATCH(ctx, adam, params);
}

void sgd(const ExecCtx& ctx, const Tensor& grad, const Tensor& main, const Tensor& buffer,
         const Tensor& model, const SgdOptions& options) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  check_flat(grad, n, "gradient");
  TESSERA_CHECK(static_cast<bool>(buffer) == (options.momentum != 0),
                "momentum needs its buffer, and only then");
  if (buffer) check_flat(buffer, n, "momentum");
  const kernels::Sgd params{.n = n,
                            .lr = static_cast<float>(options.lr),
                            .momentum = static_cast<float>(options.momentum),
                            .weight_decay = static_cast<float>(options.weight_decay),
                            .nesterov = options.nesterov,
                            .grad_scale = static_cast<float>(options.grad_scale),
                            .grad = grad.data<float>(),
                            .main = main.data<float>(),
                            .buffer = buffer ? buffer.data<float>() : nullptr,
                            .model = model_copy(model, n)};
  TESSERA_DISPATCH(ctx, sgd, params);
}

}  // namespace tessera::ops
