#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/moe.hpp"
#include "tessera/parallel/experts.hpp"

namespace tessera {
namespace {

/// What each output of a router is, in the order of their gradients.
enum class Output { weight, balance, z };

class Route final : public Function {
 public:
  Route(Tensor logits, ops::Routing routing, const RouterOptions& options, Tensor factor,
        std::vector<Output> outputs)
      : logits_(std::move(logits)),
        routing_(std::move(routing)),
        options_{options.topk, options.normalized},
        factor_(std::move(factor)),
        counted_(options.counted),
        outputs_(std::move(outputs)) {}
  const char* name() const override { return "route"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    ops::RoutingGrads of;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      Tensor& grad = outputs_[i] == Output::weight    ? of.weight
                     : outputs_[i] == Output::balance ? of.balance
                                                      : of.z;
      if (grads[i]) grad = ops::contiguous(ctx, grads[i]);
    }
    const Shape shape = logits_.shape();
    const Tensor rows = logits_.view({-1, logits_.size(-1)});
    return {ops::route_backward(ctx, rows, routing_, options_, of, of.balance ? factor_ : Tensor(), counted_)
                .view(shape)};
  }

 private:
  Tensor logits_;
  ops::Routing routing_;
  ops::RouteOptions options_;
  Tensor factor_, counted_;
  std::vector<Output> outputs_;
};

}  // namespace

Routed route(const ExecCtx& ctx, const Var& logits_var, const RouterOptions& options) {
  const Tensor& logits = logits_var.value();
  TESSERA_CHECK(logits.rank() == 3 && logits.is_contiguous(),
                "a router's logits are [seq, batch, experts], not ", logits.shape());
  const Tensor rows = logits.view({-1, logits.size(2)});
  ops::Routing routing =
      ops::route(ctx, rows, {options.topk, options.normalized}, options.z, options.counted);
  Tensors values{routing.weight};
  std::vector<Output> outputs{Output::weight};
  Tensor factor;
  if (options.balance) {
    ops::RouteSums sums = ops::route_sums(ctx, rows, routing, logits.size(1), options.counted);
    for (Communicator* comm : options.positions) comm->all_reduce(ctx, sums.chosen).wait(ctx);
    ops::Balance balance = ops::balance(ctx, sums, options.topk);
    factor = std::move(balance.factor);
    values.push_back(std::move(balance.value));
    outputs.push_back(Output::balance);
  }
  if (options.z) {
    values.push_back(std::exchange(routing.z, Tensor()));
    outputs.push_back(Output::z);
  }
  const std::vector<Var> vars = record({logits_var}, std::move(values), [&] {
    return std::make_unique<Route>(logits, routing, options, factor, outputs);
  });
  Routed routed{.weight = vars[0], .expert = routing.expert, .balance = {}, .z = {}};
  if (options.balance) routed.balance = vars[1];
  if (options.z) routed.z = vars.back();
  return routed;
}

}  // namespace tessera
