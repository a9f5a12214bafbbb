#include "tessera/ops/optimizer.hpp"

#include <cstddef>

#include "kernels/api/optimizer.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

void* model_copy(const Tensor& model, std::int64_t n) {
  if (!model) return nullptr;
  detail::check_contiguous_floats(model, "the model copy");
  TESSERA_CHECK_EQ(model.numel(), n, "elements of the model copy");
  return model.raw();
}

void check_flat(const Tensor& t, std::int64_t n, const char* what) {
  detail::check_contiguous(t, what);
  TESSERA_CHECK(t.numel() == n && t.dtype() == DType::f32, what, " must hold ", n, " float32 values");
}

UpdateState* state_of(const Tensor& state) {
  TESSERA_CHECK(state && state.dtype() == DType::u8 && state.nbytes() == sizeof(UpdateState),
                "an update state comes from make_update_state");
  return static_cast<UpdateState*>(state.raw());
}

/// The field at `offset` as a tensor of one element that shares the state's memory.
Tensor field(const Tensor& state, std::size_t offset, DType dtype) {
  state_of(state);
  return state.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size_of(dtype)))
      .reinterpret(dtype);
}

}  // namespace

Tensor make_update_state(const ExecCtx& ctx, const UpdateState& first) {
  Tensor state = Tensor::empty(ctx, {static_cast<std::int64_t>(sizeof first)}, DType::u8);
  state.copy_from_host(&first);
  return state;
}

Tensor squares_of(const Tensor& state) { return field(state, offsetof(UpdateState, squares), DType::f64); }
Tensor loss_scale_of(const Tensor& state) {
  return field(state, offsetof(UpdateState, loss_scale), DType::f32);
}

void begin_update(const ExecCtx& ctx, const Tensor& state, const BeginUpdateOptions& options) {
  kernels::BeginUpdate params{.state = state_of(state),
                              .grad_scale = options.grad_scale,
                              .clip_grad = options.clip_grad,
                              .beta1 = options.beta1,
                              .beta2 = options.beta2,
                              .loss_scale = options.loss_scale,
                              .base = options.base,
                              .rates = {},
                              .num_rates = static_cast<int>(options.rates.size())};
  TESSERA_CHECK(params.num_rates >= 1 && params.num_rates <= kernels::BeginUpdate::kRates,
                "an update needs 1 to ", kernels::BeginUpdate::kRates, " rates, not ", params.num_rates);
  std::copy(options.rates.begin(), options.rates.end(), params.rates);
  TESSERA_DISPATCH(ctx, begin_update, params);
}

void adam(const ExecCtx& ctx, const Tensor& state, const Tensor& grad, const Tensor& main, const Tensor& m,
          const Tensor& v, const Tensor& model, const AdamOptions& options) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  check_flat(grad, n, "gradient");
  check_flat(m, n, "first moment");
  check_flat(v, n, "second moment");
  const kernels::Adam params{.n = n,
                             .beta1 = options.beta1,
                             .beta2 = options.beta2,
                             .eps = options.eps,
                             .lr_factor = options.lr_factor,
                             .decay_factor = options.decay_factor,
                             .decoupled = options.decoupled,
                             .state = state_of(state),
                             .grad = grad.data<float>(),
                             .main = main.data<float>(),
                             .m = m.data<float>(),
                             .v = v.data<float>(),
                             .model = model_copy(model, n),
                             .model_dtype = model ? model.dtype() : DType::bf16};
  TESSERA_DISPATCH(ctx, adam, params);
}

void sgd(const ExecCtx& ctx, const Tensor& state, const Tensor& grad, const Tensor& main,
         const Tensor& buffer, const Tensor& model, const SgdOptions& options) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  check_flat(grad, n, "gradient");
  TESSERA_CHECK(static_cast<bool>(buffer) == (options.momentum != 0),
                "momentum needs its buffer, and only then");
  if (buffer) check_flat(buffer, n, "momentum");
  const kernels::Sgd params{.n = n,
                            .lr_factor = options.lr_factor,
                            .decay_factor = options.decay_factor,
                            .momentum = static_cast<float>(options.momentum),
                            .nesterov = options.nesterov,
                            .state = state_of(state),
                            .grad = grad.data<float>(),
                            .main = main.data<float>(),
                            .buffer = buffer ? buffer.data<float>() : nullptr,
                            .model = model_copy(model, n),
                            .model_dtype = model ? model.dtype() : DType::bf16};
  TESSERA_DISPATCH(ctx, sgd, params);
}

}  // namespace tessera::ops
