#pragma once
#include "tessera/autograd/tape.hpp"
#include "tessera/ops/gemm.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera::detail {

/// Weight and optional bias of y = x weight^T + bias, as a Function's second phase sees them.
struct LinearWeights {
  Parameter& weight;
  Parameter* bias;

  /// Adds dy^T x to the weight's gradient and the column sums of dy to the bias's, as far as they are
  /// trained; `x()` is called only for the former.
  template <typename Input>
  void add_gradients(const ExecCtx& ctx, const Tensor& dy, Input&& x) const {
    const bool with_bias = bias && bias->trained();
    if (weight.trained() && with_bias) {
      ops::linear_backward_weight(ctx, dy, x(), weight.grad(), weight.next_beta(), bias->grad(),
                                  bias->next_beta());
    } else if (weight.trained()) {
      ops::linear_backward_weight(ctx, dy, x(), weight.grad(), weight.next_beta());
    } else if (with_bias) {
      ops::column_sum(ctx, dy, bias->grad(), bias->next_beta());
    }
  }
  std::vector<Parameter*> trained() const {
    std::vector<Parameter*> list;
    if (weight.trained()) list.push_back(&weight);
    if (bias && bias->trained()) list.push_back(bias);
    return list;
  }
};

}  // namespace tessera::detail
