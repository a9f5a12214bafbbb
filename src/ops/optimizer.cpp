#include "tessera/ops/optimizer.hpp"

#include <algorithm>
#include <cstddef>

#include "kernels/api/optimizer.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

void check_flat(const Tensor& t, std::int64_t n, const char* what, DType dtype = DType::f32) {
  detail::check_contiguous(t, what);
  TESSERA_CHECK(t.numel() == n && t.dtype() == dtype, what, " must hold ", n, " values of ", dtype, ", not ",
                t.numel(), " of ", t.dtype());
}

/// The two parts of split main weights.
bfloat16* model_half(const Tensor& model, std::int64_t n) {
  check_flat(model, n, "the upper half of main weights", DType::bf16);
  return model.data<bfloat16>();
}
std::uint16_t* low_half(const Tensor& low, std::int64_t n) {
  check_flat(low, n, "the lower half of main weights", DType::u16);
  return low.data<std::uint16_t>();
}

/// Gives an update of params.n elements its weights.
template <typename Params>
void set_weights(Params& params, const MainWeights& weights) {
  if (weights.low) {
    TESSERA_CHECK(!weights.main, "main weights are whole or split, not both");
    params.model = model_half(weights.model, params.n);
    params.low = low_half(weights.low, params.n);
    return;
  }
  check_flat(weights.main, params.n, "main weights");
  params.main = weights.main.data<float>();
  if (!weights.model) return;
  detail::check_contiguous_floats(weights.model, "the model copy");
  TESSERA_CHECK_EQ(weights.model.numel(), params.n, "elements of the model copy");
  params.model = weights.model.raw();
  params.model_dtype = weights.model.dtype();
}

UpdateState* state_of(const Tensor& state) {
  TESSERA_CHECK(state && state.dtype() == DType::u8 && state.nbytes() == sizeof(UpdateState),
                "an update state comes from make_update_state");
  return static_cast<UpdateState*>(state.raw());
}

kernels::GroupFactors* factors_of(const Tensor& factors) {
  const auto size = static_cast<std::int64_t>(sizeof(kernels::GroupFactors));
  TESSERA_CHECK(factors && factors.dtype() == DType::u8 && factors.numel() > 0 && factors.numel() % size == 0,
                "factors of groups come from make_group_factors");
  return static_cast<kernels::GroupFactors*>(factors.raw());
}

int count_of(const Tensor& factors) {
  return static_cast<int>(factors.nbytes() / sizeof(kernels::GroupFactors));
}

kernels::GroupsOfElements groups_of(const ElementGroups& groups, std::int64_t n) {
  detail::check_contiguous(groups.of_block, "the groups of blocks");
  TESSERA_CHECK(groups.of_block.dtype() == DType::u8, "groups of blocks are u8, not ",
                groups.of_block.dtype());
  TESSERA_CHECK_EQ(groups.of_block.numel(), (n + kGroupBlock - 1) / kGroupBlock, "blocks that have a group");
  const kernels::GroupFactors* factors = factors_of(groups.factors);
  return {factors, count_of(groups.factors), static_cast<const std::uint8_t*>(groups.of_block.raw())};
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
  const kernels::BeginUpdate params{.state = state_of(state),
                                    .grad_scale = options.grad_scale,
                                    .clip_grad = options.clip_grad,
                                    .loss_scale = options.loss_scale};
  TESSERA_DISPATCH(ctx, begin_update, params);
}

Tensor make_group_factors(const ExecCtx& ctx, std::int64_t groups) {
  TESSERA_CHECK(groups >= 1 && groups <= kMostGroups, "an update takes 1 to ", kMostGroups, " groups, not ",
                groups);
  return Tensor::empty(ctx, {groups * static_cast<std::int64_t>(sizeof(kernels::GroupFactors))}, DType::u8);
}

void update_groups(const ExecCtx& ctx, const Tensor& state, const Tensor& factors,
                   const UpdateGroupsOptions& options) {
  kernels::UpdateGroups params{.state = state_of(state),
                               .decoupled = options.decoupled,
                               .base = options.base,
                               .num_rates = options.num_rates};
  TESSERA_CHECK(params.num_rates >= 1 && params.num_rates <= GroupRule::kRates, "an update needs 1 to ",
                GroupRule::kRates, " rates, not ", params.num_rates);
  kernels::GroupFactors* first = factors_of(factors);
  TESSERA_CHECK_EQ(static_cast<int>(options.rules.size()), count_of(factors), "rules of groups");
  constexpr std::size_t kMost = kernels::UpdateGroups::kMost;
  for (std::size_t done = 0; done < options.rules.size(); done += kMost) {
    const auto part = options.rules.subspan(done, std::min(kMost, options.rules.size() - done));
    params.factors = first + done;
    params.count = static_cast<int>(part.size());
    std::copy(part.begin(), part.end(), params.rules);
    TESSERA_DISPATCH(ctx, update_groups, params);
  }
}

void split_main(const ExecCtx& ctx, const Tensor& main, const Tensor& model, const Tensor& low) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  const kernels::SplitMain params{n, main.data<float>(), model_half(model, n), low_half(low, n)};
  TESSERA_DISPATCH(ctx, split_main, params);
}

void join_main(const ExecCtx& ctx, const Tensor& model, const Tensor& low, const Tensor& main) {
  const std::int64_t n = main.numel();
  check_flat(main, n, "main weights");
  const kernels::JoinMain params{n, model_half(model, n), low_half(low, n), main.data<float>()};
  TESSERA_DISPATCH(ctx, join_main, params);
}

void adam(const ExecCtx& ctx, const Tensor& state, const ElementGroups& groups, const Tensor& grad,
          const MainWeights& weights, const Tensor& m, const Tensor& v) {
  const std::int64_t n = grad.numel();
  check_flat(grad, n, "gradient");
  check_flat(m, n, "first moment");
  check_flat(v, n, "second moment");
  kernels::Adam params{.n = n,
                       .groups = groups_of(groups, n),
                       .state = state_of(state),
                       .grad = grad.data<float>(),
                       .m = m.data<float>(),
                       .v = v.data<float>()};
  set_weights(params, weights);
  TESSERA_DISPATCH(ctx, adam, params);
}

void sgd(const ExecCtx& ctx, const Tensor& state, const ElementGroups& groups, const Tensor& grad,
         const MainWeights& weights, const Tensor& buffer, bool nesterov) {
  const std::int64_t n = grad.numel();
  check_flat(grad, n, "gradient");
  TESSERA_CHECK(buffer || !nesterov, "nesterov needs the buffer of the momentum");
  if (buffer) check_flat(buffer, n, "momentum");
  kernels::Sgd params{.n = n,
                      .groups = groups_of(groups, n),
                      .nesterov = nesterov,
                      .state = state_of(state),
                      .grad = grad.data<float>(),
                      .buffer = buffer ? buffer.data<float>() : nullptr};
  set_weights(params, weights);
  TESSERA_DISPATCH(ctx, sgd, params);
}

}  // namespace tessera::ops
