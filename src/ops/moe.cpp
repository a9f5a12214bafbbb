#include "tessera/ops/moe.hpp"

#include <limits>

#include "kernels/api/moe.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

/// Its elements, contiguous. Errors: InvalidArgument unless it has `count` of type T.
template <typename T>
T* elements_of(const Tensor& t, std::int64_t count, const char* what) {
  detail::check_contiguous(t, what);
  TESSERA_CHECK(t.dtype() == dtype_of<T>::value && t.numel() == count, what, " must be ", count,
                " values of ", dtype_of<T>::value, ", not ", t.shape(), " of ", t.dtype());
  return t.data<T>();
}
template <typename T>
T* elements_if_any(const Tensor& t, std::int64_t count, const char* what) {
  return t ? elements_of<T>(t, count, what) : nullptr;
}

/// Sizes of a router's logits and of its choice, which go together.
struct RouteSizes {
  std::int64_t tokens, experts, topk;
};

RouteSizes sizes_of(const Tensor& logits, std::int64_t topk) {
  detail::check_contiguous_floats(logits, "logits");
  TESSERA_CHECK(logits.rank() == 2, "logits of a router are [tokens, experts], not ", logits.shape());
  TESSERA_CHECK(topk >= 1 && topk <= logits.size(1), "a router of ", logits.size(1),
                " experts cannot choose topk = ", topk, " of them");
  return {logits.size(0), logits.size(1), topk};
}
std::int64_t topk_of(const Routing& routing) {
  TESSERA_CHECK(routing.expert && routing.expert.rank() == 2, "a routing's experts are [tokens, topk], not ",
                routing.expert.shape());
  return routing.expert.size(1);
}

void check_batch(std::int64_t tokens, std::int64_t batch) {
  TESSERA_CHECK(batch >= 1 && tokens % batch == 0, tokens, " tokens are no whole positions of ", batch,
                " samples");
}

}  // namespace

Routing route(const ExecCtx& ctx, const Tensor& logits, const RouteOptions& options, bool z,
              const Tensor& counted) {
  const auto [tokens, experts, topk] = sizes_of(logits, options.topk);
  Routing routing{Tensor::empty(ctx, {tokens, topk}, DType::f32),
                  Tensor::empty(ctx, {tokens, topk}, DType::i32), Tensor::empty(ctx, {tokens}, DType::f32)};
  if (z) routing.z = Tensor::empty(ctx, {tokens}, DType::f32);
  const kernels::RouteForward params{
      .tokens = tokens,
      .experts = experts,
      .topk = topk,
      .dtype = logits.dtype(),
      .logits = logits.raw(),
      .normalized = options.normalized,
      .weight = routing.weight.data<float>(),
      .expert = routing.expert.data<std::int32_t>(),
      .lse = routing.lse.data<float>(),
      .z = z ? routing.z.data<float>() : nullptr,
      .counted = elements_if_any<std::int32_t>(counted, tokens, "counted tokens")};
  TESSERA_DISPATCH(ctx, route_forward, params);
  return routing;
}

RouteSums route_sums(const ExecCtx& ctx, const Tensor& logits, const Routing& routing, std::int64_t batch,
                     const Tensor& counted) {
  const auto [tokens, experts, topk] = sizes_of(logits, topk_of(routing));
  check_batch(tokens, batch);
  RouteSums sums{Tensor::empty(ctx, {batch, experts}, DType::f32),
                 Tensor::empty(ctx, {batch, experts}, DType::f32)};
  const kernels::RouteSums params{
      .tokens = tokens,
      .experts = experts,
      .topk = topk,
      .batch = batch,
      .dtype = logits.dtype(),
      .logits = logits.raw(),
      .expert = elements_of<std::int32_t>(routing.expert, tokens * topk, "a routing's experts"),
      .lse = elements_of<float>(routing.lse, tokens, "a routing's log-sum-exp"),
      .counted = elements_if_any<std::int32_t>(counted, tokens, "counted tokens"),
      .probability = sums.probability.data<float>(),
      .chosen = sums.chosen.data<float>()};
  TESSERA_DISPATCH(ctx, route_sums, params);
  return sums;
}

Balance balance(const ExecCtx& ctx, const RouteSums& sums, std::int64_t topk) {
  TESSERA_CHECK(sums.chosen && sums.chosen.rank() == 2, "sums of a routing are [batch, experts], not ",
                sums.chosen.shape());
  const std::int64_t batch = sums.chosen.size(0), experts = sums.chosen.size(1);
  TESSERA_CHECK(topk >= 1 && topk <= experts, "a router of ", experts, " experts cannot choose topk = ", topk,
                " of them");
  Balance result{Tensor::empty(ctx, {batch}, DType::f32), Tensor::empty(ctx, {batch, experts}, DType::f32)};
  const kernels::BalanceForward params{
      .batch = batch,
      .experts = experts,
      .topk = topk,
      .probability = elements_of<float>(sums.probability, batch * experts, "sums of probabilities"),
      .chosen = elements_of<float>(sums.chosen, batch * experts, "numbers of choices"),
      .factor = result.factor.data<float>(),
      .value = result.value.data<float>()};
  TESSERA_DISPATCH(ctx, balance_forward, params);
  return result;
}

Tensor route_backward(const ExecCtx& ctx, const Tensor& logits, const Routing& routing,
                      const RouteOptions& options, const RoutingGrads& grads, const Tensor& factor,
                      const Tensor& counted) {
  const auto [tokens, experts, topk] = sizes_of(logits, options.topk);
  TESSERA_CHECK(static_cast<bool>(grads.balance) == static_cast<bool>(factor),
                "the gradient of a balance comes with the balance's factors");
  const std::int64_t batch = factor ? grads.balance.numel() : 1;
  check_batch(tokens, batch);
  Tensor logits_grad = Tensor::empty(ctx, logits.shape(), logits.dtype());
  const kernels::RouteBackward params{
      .tokens = tokens,
      .experts = experts,
      .topk = topk,
      .batch = batch,
      .dtype = logits.dtype(),
      .logits = logits.raw(),
      .normalized = options.normalized,
      .weight = elements_of<float>(routing.weight, tokens * topk, "a routing's weights"),
      .expert = elements_of<std::int32_t>(routing.expert, tokens * topk, "a routing's experts"),
      .lse = elements_of<float>(routing.lse, tokens, "a routing's log-sum-exp"),
      .weight_grad = elements_if_any<float>(grads.weight, tokens * topk, "the gradient of weights"),
      .factor = elements_if_any<float>(factor, batch * experts, "factors of a balance"),
      .balance_grad = elements_if_any<float>(grads.balance, batch, "the gradient of a balance"),
      .z_grad = elements_if_any<float>(grads.z, tokens, "the gradient of lse^2"),
      .counted = elements_if_any<std::int32_t>(counted, tokens, "counted tokens"),
      .logits_grad = logits_grad.raw()};
  TESSERA_DISPATCH(ctx, route_backward, params);
  return logits_grad;
}

SlotOrder sort_slots(const ExecCtx& ctx, const Tensor& expert, std::int64_t experts) {
  TESSERA_CHECK(expert && expert.rank() == 2 && expert.size(1) >= 1,
                "experts of slots are [tokens, topk], not ", expert.shape());
  const std::int64_t slots = expert.numel();
  TESSERA_CHECK(slots <= std::numeric_limits<std::int32_t>::max(), "experts ", expert.shape(),
                " of more slots than an int32 can number");
  TESSERA_CHECK(experts >= 1, "slots cannot be sorted by ", experts, " experts");
  SlotOrder order{Tensor::empty(ctx, {slots}, DType::i32), Tensor::empty(ctx, {slots}, DType::i32),
                  Tensor::empty(ctx, {slots}, DType::i32), Tensor::empty(ctx, {experts}, DType::i32)};
  const kernels::SortSlots params{.slots = slots,
                                  .experts = experts,
                                  .topk = expert.size(1),
                                  .expert = elements_of<std::int32_t>(expert, slots, "experts of slots"),
                                  .row = order.row.data<std::int32_t>(),
                                  .slot = order.slot.data<std::int32_t>(),
                                  .token = order.token.data<std::int32_t>(),
                                  .count = order.count.data<std::int32_t>()};
  TESSERA_DISPATCH(ctx, sort_slots, params);
  return order;
}

Tensor combine_slots(const ExecCtx& ctx, const Tensor& x, const Tensor& row, const Tensor& weight,
                     std::int64_t topk) {
  detail::check_contiguous_floats(x, "x");
  TESSERA_CHECK(x.rank() == 2 && topk >= 1 && x.size(0) % topk == 0, "rows ", x.shape(),
                " are no slots of whole tokens, of ", topk, " each");
  const std::int64_t slots = x.size(0), tokens = slots / topk, cols = x.size(1);
  Tensor y = Tensor::empty(ctx, {tokens, cols}, x.dtype());
  const kernels::CombineSlots params{.tokens = tokens,
                                     .topk = topk,
                                     .cols = cols,
                                     .dtype = x.dtype(),
                                     .x = x.raw(),
                                     .row = elements_of<std::int32_t>(row, slots, "rows of slots"),
                                     .weight = elements_if_any<float>(weight, slots, "weights of slots"),
                                     .y = y.raw()};
  TESSERA_DISPATCH(ctx, combine_slots, params);
  return y;
}

Tensor weigh_rows(const ExecCtx& ctx, const Tensor& x, const Tensor& y, const Tensor& weight) {
  detail::check_contiguous_floats(x, "x");
  detail::check_contiguous_floats(y, "y");
  detail::check_same_shape(x, y, "rows to weigh");
  TESSERA_CHECK(x.rank() == 2 && x.dtype() == y.dtype(), "rows to weigh are [rows, cols] of one dtype, not ",
                x.shape(), " of ", x.dtype(), " and ", y.dtype());
  const std::int64_t rows = x.size(0);
  Tensor dot = Tensor::empty(ctx, {rows}, DType::f32);
  const kernels::WeighRows params{.rows = rows,
                                  .cols = x.size(1),
                                  .dtype = x.dtype(),
                                  .x = x.raw(),
                                  .y = y.raw(),
                                  .weight = elements_of<float>(weight, rows, "weights of rows"),
                                  .dot = dot.data<float>()};
  TESSERA_DISPATCH(ctx, weigh_rows, params);
  return dot;
}

}  // namespace tessera::ops
