#include <numeric>

#include "parallel/expert_exchange.hpp"
#include "parallel/linear_weights.hpp"
#include "parallel/overlap.hpp"
#include "parallel/rows_of.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/experts.hpp"

namespace tessera {
namespace {

/// Rows in the order of their experts, and the experts' products over them.
class Groups {
 public:
  Groups(ExpertWeights experts, std::vector<std::int64_t> counts)
      : experts_(std::move(experts)), counts_(std::move(counts)) {}

  std::int64_t rows() const { return std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0}); }
  const std::vector<Parameter*>& fc1() const { return experts_.fc1; }
  const std::vector<Parameter*>& fc2() const { return experts_.fc2; }

  /// x weight^T (or, `transposed`, x weight), each row with its expert's.
  Tensor multiply(const ExecCtx& ctx, const Tensor& x, const std::vector<Parameter*>& weights,
                  bool transposed) const {
    Tensor y = Tensor::empty(ctx, {x.size(0), weights[0]->shape()[transposed ? 1 : 0]}, x.dtype());
    each([&](std::size_t e, std::int64_t first, std::int64_t count) {
      if (count > 0)
        ops::matmul_into(ctx, x.narrow(0, first, count), weights[e]->value(), y.narrow(0, first, count), 0.0f,
                         false, !transposed);
    });
    return y;
  }
  /// Adds dy^T x of each expert's rows to its gradient; zeros for one that nobody has chosen.
  void add_gradients(const ExecCtx& ctx, const Tensor& dy, const Tensor& x,
                     const std::vector<Parameter*>& weights) const {
    each([&](std::size_t e, std::int64_t first, std::int64_t count) {
      Parameter& weight = *weights[e];
      if (!weight.trained()) return;
      const float beta = weight.next_beta();
      if (count > 0) {
        ops::linear_backward_weight(ctx, dy.narrow(0, first, count), x.narrow(0, first, count), weight.grad(),
                                    beta);
      } else if (beta == 0.0f) {
        ops::fill_zero(ctx, weight.grad());
      }
    });
  }
  std::vector<Parameter*> trained() const {
    std::vector<Parameter*> list;
    for (const auto* weights : {&experts_.fc1, &experts_.fc2}) {
      for (Parameter* each : *weights) {
        if (each->trained()) list.push_back(each);
      }
    }
    return list;
  }

 private:
  void each(const auto& act) const {
    std::int64_t first = 0;
    for (std::size_t e = 0; e < counts_.size(); ++e) {
      act(e, first, counts_[e]);
      first += counts_[e];
    }
  }

  ExpertWeights experts_;
  std::vector<std::int64_t> counts_;
};

class ExpertMlp final : public Function {
 public:
  /// `rows`: those of x that came from all ranks; undefined where none travel.
  ExpertMlp(const Var& x, Tensor weight, ops::SlotOrder order, ExpertExchange exchange, Groups groups,
            Tensor rows, Tensor pre, ops::ActivationKind kind)
      : x_(exchange.travels() ? SavedInput() : SavedInput(x)),
        x_shape_(x.value().shape()),
        x_grad_(x.requires_grad()),
        weight_(std::move(weight)),
        order_(std::move(order)),
        exchange_(std::move(exchange)),
        groups_(std::move(groups)),
        rows_(std::move(rows)),
        pre_(std::move(pre)),
        kind_(kind) {}
  const char* name() const override { return "expert_mlp"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor dy = detail::rows_of(ctx, detail::as_rows(ops::contiguous(ctx, grads[0])), order_.token);
    dy_ = exchange_.to_experts(ctx, dy);
    const Tensor dhidden = groups_.multiply(ctx, dy_, groups_.fc2(), true);
    hidden_ = ops::activation(ctx, pre_, kind_);
    // A weight's gradient is that of its expert's result, times the result: without fc2 on both sides.
    const Tensor weights = exchange_.to_experts(ctx, detail::rows_of(ctx, weight_.view({-1}), order_.slot));
    const Tensor dots = exchange_.to_tokens(ctx, ops::weigh_rows(ctx, dhidden, hidden_, weights));
    const Tensor dweight = detail::rows_of(ctx, dots, order_.row).view(weight_.shape());
    dpre_ = ops::activation_backward(ctx, pre_, dhidden, kind_);
    pre_ = Tensor();
    if (!x_grad_) return {Tensor(), dweight};
    const Tensor dx = exchange_.to_tokens(ctx, groups_.multiply(ctx, dpre_, groups_.fc1(), true));
    return {ops::combine_slots(ctx, dx, order_.row, {}, weight_.size(-1)).view(x_shape_), dweight};
  }

  void backward_weight(const ExecCtx& ctx) override {
    groups_.add_gradients(ctx, dy_, hidden_, groups_.fc2());
    groups_.add_gradients(
        ctx, dpre_,
        exchange_.travels() ? rows_ : detail::rows_of(ctx, detail::as_rows(x_.get(ctx)), order_.token),
        groups_.fc1());
  }
  std::vector<Parameter*> parameters() const override { return groups_.trained(); }

 private:
  SavedInput x_;
  Shape x_shape_;
  bool x_grad_;
  Tensor weight_;
  ops::SlotOrder order_;
  ExpertExchange exchange_;
  Groups groups_;
  Tensor rows_, pre_;
  ops::ActivationKind kind_;
  Tensor dy_, hidden_, dpre_;  // for phase 2
};

}  // namespace

Var expert_mlp(const ExecCtx& ctx, const Var& x, const Var& weight, const Tensor& expert,
               const ExpertWeights& experts, ops::ActivationKind kind, const ExpertParallel& parallel) {
  const Tensor rows = detail::as_rows(x.value());
  TESSERA_CHECK(weight.value().numel() == expert.numel() && expert.numel() == rows.size(0) * expert.size(-1),
                "weights of ", weight.value().shape(), " and experts of ", expert.shape(), " for ",
                rows.size(0), " tokens");
  const auto held = static_cast<std::int64_t>(experts.fc1.size());
  const ops::SlotOrder order = ops::sort_slots(ctx, expert, held * parallel.size());
  ExpertExchange exchange(ctx, parallel, order, held);
  Groups groups(experts, exchange.counts());
  Tensor came = exchange.to_experts(ctx, detail::rows_of(ctx, rows, order.token));
  const Tensor pre = groups.multiply(ctx, came, groups.fc1(), false);
  if (!exchange.travels() || groups.trained().empty()) came = Tensor();
  const Tensor results =
      exchange.to_tokens(ctx, groups.multiply(ctx, ops::activation(ctx, pre, kind), groups.fc2(), false));
  Tensor y =
      ops::combine_slots(ctx, results, order.row, weight.value(), expert.size(-1)).view(x.value().shape());
  return record({x, weight}, std::move(y), [&] {
    return std::make_unique<ExpertMlp>(x, weight.value(), order, std::move(exchange), std::move(groups), came,
                                       pre, kind);
  });
}

}  // namespace tessera
