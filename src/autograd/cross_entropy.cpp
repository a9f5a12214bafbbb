#include "tessera/ops/cross_entropy.hpp"

#include "tessera/autograd/functions.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

class CrossEntropyFunction final : public Function {
 public:
  CrossEntropyFunction(Tensor logits, Tensor labels, Tensor lse)
      : logits_(std::move(logits)), labels_(std::move(labels)), lse_(std::move(lse)) {}
  const char* name() const override { return "cross_entropy"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dlogits = logits_.is_unique() ? std::move(logits_) : ops::contiguous(ctx, logits_);
    logits_ = Tensor();
    ops::cross_entropy_backward_in_place(ctx, dlogits, labels_, lse_, grads[0]);
    return {std::move(dlogits)};
  }

 private:
  Tensor logits_, labels_, lse_;
};

}  // namespace

Var cross_entropy(const ExecCtx& ctx, Var logits, const Tensor& labels) {
  ops::CrossEntropy out = ops::cross_entropy(ctx, logits.value(), labels);
  return record({logits}, out.loss,
                [&] { return std::make_unique<CrossEntropyFunction>(logits.value(), labels, out.lse); });
}

}  // namespace tessera
