#include <algorithm>
#include <functional>

#include "parallel/arriving.hpp"
#include "parallel/linear_weights.hpp"
#include "parallel/rows_of.hpp"
#include "tessera/ops/cross_entropy.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/gemm.hpp"

namespace tessera {
namespace {

/// Rows of logits that exist at a time: the same on every tensor rank, which exchange numbers for each part.
std::int64_t rows_at_once(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& weight,
                          const Placement& vocabulary) {
  constexpr std::int64_t kLeast = 512;
  const std::int64_t columns = part_of(vocabulary.global()[0], 0, tp.size()).count;
  const auto row_bytes = columns * static_cast<std::int64_t>(size_of(weight.dtype()));
  return std::max(kLeast, ctx.logit_bytes / row_bytes / kLeast * kLeast);
}

/// Loss of every row into `loss`; returns its log-sum-exp over the whole vocabulary. logits: this rank's
/// columns, from token `first` on. Two numbers per row and rank are exchanged.
Tensor loss_into(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& logits, std::int64_t first,
                 const Tensor& labels, const Tensor& loss) {
  if (!tp.active()) return ops::cross_entropy_into(ctx, logits, labels, loss);
  const Tensor part = ops::cross_entropy_part(ctx, logits, labels, first);
  const Tensor parts = Tensor::empty(ctx, {tp.size(), 2, part.size(1)}, DType::f32);
  tp.comm->all_gather(ctx, part, parts).wait(ctx);
  return ops::combine_cross_entropy_into(ctx, parts, labels, loss);
}

/// What a cap makes of logits, and of their gradient. Its passes want logits without padding between rows.
class LogitCap {
 public:
  explicit LogitCap(float cap) : cap_(cap) {}
  std::int64_t row_padding() const { return cap_ > 0.0f ? 1 : kHeadRowPadding; }

  /// The capped logits; those given are overwritten.
  Tensor apply(const ExecCtx& ctx, const Tensor& logits) {
    if (cap_ == 0.0f) return logits;
    ops::axpby(ctx, 1.0f / cap_, logits, 0.0f, logits);
    reduced_ = logits;
    Tensor capped = ops::activation(ctx, reduced_, ops::ActivationKind::tanh);
    ops::axpby(ctx, cap_, capped, 0.0f, capped);
    return capped;
  }
  /// The gradient of capped logits to that of the logits, in place.
  void backward(const ExecCtx& ctx, const Tensor& grad) const {
    if (cap_ > 0.0f) ops::activation_backward_into(ctx, reduced_, grad, grad, ops::ActivationKind::tanh);
  }

 private:
  float cap_;
  Tensor reduced_;  // logits / cap
};

class VocabCrossEntropy final : public Function {
 public:
  VocabCrossEntropy(Tensor logits, Tensor labels, Tensor lse, std::int64_t first)
      : logits_(std::move(logits)), labels_(std::move(labels)), lse_(std::move(lse)), first_(first) {}
  const char* name() const override { return "vocab_cross_entropy"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dlogits = logits_.is_unique() ? std::move(logits_) : ops::contiguous(ctx, logits_);
    logits_ = Tensor();
    ops::cross_entropy_backward_in_place(ctx, dlogits, labels_, lse_, grads[0], first_);
    return {std::move(dlogits)};
  }

 private:
  Tensor logits_, labels_, lse_;
  std::int64_t first_;
};

class VocabLinearCrossEntropy final : public Function {
 public:
  VocabLinearCrossEntropy(detail::Arriving dx, const Shape& x_shape, Tensor upstream,
                          const detail::LinearWeights& weights)
      : dx_(std::move(dx)), x_shape_(x_shape), upstream_(std::move(upstream)), weights_(weights) {}
  const char* name() const override { return "vocab_linear_cross_entropy"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    TESSERA_CHECK(grads[0].raw() == upstream_.raw(),
                  "linear_cross_entropy was told another upstream gradient than it is given");
    const Tensor dx = dx_.take(ctx);
    return {dx ? dx.view(x_shape_) : Tensor()};
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  detail::Arriving dx_;
  Shape x_shape_;
  Tensor upstream_;
  detail::LinearWeights weights_;
};

/// The head of a vocabulary and its loss, a part of the rows at a time.
class ChunkedHead {
 public:
  struct Input {
    Tensor x, labels;
    Tensor upstream;  // undefined: the losses alone
    bool wanted;      // the gradient of x
  };
  ChunkedHead(const ExecCtx& ctx, const TensorParallel& tp, const detail::LinearWeights& weights, float cap)
      : ctx_(ctx), tp_(tp), weights_(weights), cap_(cap) {}

  /// The losses. The weights' gradients are added up; `ready` gets that of x, before the last product.
  Tensor run(const Input& in, const std::function<void(Tensor)>& ready) const {
    const std::int64_t rows = in.x.size(0), vocab_begin = detail::first_row(tp_, weights_.weight.placement());
    Tensor loss = Tensor::empty(ctx_, {rows}, DType::f32);
    Tensor dx = in.wanted ? Tensor::empty(ctx_, in.x.shape(), in.x.dtype()) : Tensor();
    const std::int64_t most = rows_at_once(ctx_, tp_, weights_.weight.value(), weights_.weight.placement());
    for (std::int64_t first = 0; first < rows; first += most) {
      const std::int64_t count = std::min(most, rows - first);
      const Tensor x = in.x.narrow(0, first, count), labels = in.labels.narrow(0, first, count);
      LogitCap cap(cap_);
      const Tensor logits =
          cap.apply(ctx_, ops::linear(ctx_, x, weights_.weight.value(),
                                      weights_.bias ? weights_.bias->value() : Tensor(), cap.row_padding()));
      const Tensor lse = loss_into(ctx_, tp_, logits, vocab_begin, labels, loss.narrow(0, first, count));
      if (!in.upstream) continue;
      ops::cross_entropy_backward_in_place(ctx_, logits, labels, lse, in.upstream.narrow(0, first, count),
                                           vocab_begin);
      cap.backward(ctx_, logits);
      if (in.wanted) {
        // NOLINTNEXTLINE(bugprone-use-after-move): it is moved in the last round
        const Tensor part = dx.narrow(0, first, count);
        ops::matmul_into(ctx_, logits, weights_.weight.value(), part, 0.0f, false, false);
      }
      // On its way during the last product, until backward asks for it.
      if (in.wanted && first + count == rows) ready(std::move(dx));
      weights_.add_gradients(ctx_, logits, [&] { return x; });
    }
    return loss;
  }

 private:
  const ExecCtx& ctx_;
  const TensorParallel& tp_;
  detail::LinearWeights weights_;
  float cap_;
};

}  // namespace

Var vocab_cross_entropy(const ExecCtx& ctx, const TensorParallel& tp, Var logits, const Placement& vocabulary,
                        const Tensor& labels) {
  TESSERA_CHECK_EQ(logits.value().size(-1), vocabulary.local()[0], "columns of logits and rows of the table");
  const std::int64_t first = detail::first_row(tp, vocabulary);
  Tensor loss = Tensor::empty(ctx, {labels.numel()}, DType::f32);
  const Tensor lse = loss_into(ctx, tp, logits.value(), first, labels, loss);
  return record({logits}, std::move(loss),
                [&] { return std::make_unique<VocabCrossEntropy>(logits.value(), labels, lse, first); });
}

Var own_vocab_logits(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                     Parameter* bias, float cap) {
  const Var logits = column_linear(ctx, tp, x, weight, bias, LogitCap(cap).row_padding());
  return cap > 0.0f ? softcap(ctx, logits, cap) : logits;
}

Var vocab_logits(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                 Parameter* bias, float softcap) {
  const Var logits = own_vocab_logits(ctx, tp, x, weight, bias, softcap);
  if (!tp.active()) return logits;
  const std::int64_t vocab_size = weight.placement().global()[0];
  std::vector<std::int64_t> counts;
  for (int r = 0; r < tp.size(); ++r) counts.push_back(part_of(vocab_size, r, tp.size()).count);
  return gather_features(ctx, tp, logits, counts);
}

Var vocab_linear_cross_entropy(const ExecCtx& ctx, const TensorParallel& tp, const Var& x_var,
                               Parameter& weight, const Tensor& labels, const Tensor& upstream,
                               Parameter* bias, float softcap, const LabelledRows& labelled) {
  const bool recorded = x_var.tape() != nullptr;
  if (recorded && !upstream)
    return vocab_cross_entropy(ctx, tp, own_vocab_logits(ctx, tp, x_var, weight, bias, softcap),
                               weight.placement(), labels);
  const Tensor whole =
      tp.sharded_sequence() ? detail::gather_positions(ctx, tp, x_var.value()).take(ctx) : x_var.value();
  const Tensor x = whole.view({-1, whole.size(-1)});
  TESSERA_CHECK_EQ(labels.numel(), x.size(0), "one label per row");
  TESSERA_CHECK(!recorded || upstream.numel() == x.size(0), "one upstream gradient per row");
  const ChunkedHead head(ctx, tp, {weight, bias}, softcap);
  const auto spread = [&](Tensor of_rows) {
    return labelled ? detail::rows_of(ctx, of_rows, labelled.places) : std::move(of_rows);
  };
  detail::Arriving dx;
  const Tensor loss = spread(
      head.run({.x = labelled ? detail::rows_of(ctx, x, labelled.rows) : x,
                .labels = labelled ? labelled.labels : labels,
                .upstream = !recorded  ? Tensor()
                            : labelled ? detail::rows_of(ctx, upstream, labelled.rows)
                                       : upstream,
                .wanted = recorded && x_var.requires_grad()},
               [&](Tensor of_rows) { dx = detail::sum_partial(ctx, tp, spread(std::move(of_rows))); }));
  return record({x_var}, loss, [&] {
    return std::make_unique<VocabLinearCrossEntropy>(std::move(dx), x_var.value().shape(), upstream,
                                                     detail::LinearWeights{weight, bias});
  });
}

}  // namespace tessera
