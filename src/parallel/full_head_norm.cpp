#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/norm.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera {
namespace {

/// The queries or the keys of a packed qkv: features [first, first + count) of each position.
struct FeatureRun {
  std::int64_t first = 0, count = 0;
  Parameter* weight = nullptr;
  ops::AddNorm saved = {};
  Tensor dy = {};
};

/// Features that all ranks together norm. A key that several ranks hold is counted as often, here as in the
/// sums: their quotient is the mean over different ones all the same.
std::int64_t whole_width(const TensorParallel& tp, const FeatureRun& run) { return run.count * tp.size(); }

void add_over_ranks(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& sums) {
  if (tp.active()) tp.comm->all_reduce(ctx, sums).wait(ctx);
}

class FullHeadNorm final : public Function {
 public:
  FullHeadNorm(const TensorParallel& tp, std::vector<FeatureRun> runs, const ops::NormOptions& options)
      : tp_(tp), runs_(std::move(runs)), options_(options) {}
  const char* name() const override { return "full_head_norm"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dqkv = grads[0].is_unique() ? std::move(grads[0]) : ops::contiguous(ctx, grads[0]);
    for (FeatureRun& run : runs_) {
      const Tensor place = dqkv.narrow(2, run.first, run.count);
      const Tensor weight = run.weight->main();
      run.dy = ops::contiguous(ctx, place);
      const Tensor y = ops::norm_again(ctx, run.saved, weight, Tensor(), options_);
      const Tensor sums = ops::row_products(ctx, run.dy, y);
      add_over_ranks(ctx, tp_, sums);
      const Tensor dx = ops::norm_again(ctx, {run.dy, {}, {}, run.saved.rstd}, weight, Tensor(), options_);
      ops::norm_projection(ctx, run.saved, sums, whole_width(tp_, run), dx);
      ops::copy(ctx, dx, place);
    }
    return {std::move(dqkv)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    for (FeatureRun& run : runs_) {
      if (!run.weight->trained()) continue;
      const float beta = run.weight->next_beta();
      ops::norm_weight_grad(ctx, run.saved, run.dy, run.weight->grad(), Tensor(), beta, options_);
    }
  }
  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    for (const FeatureRun& run : runs_) {
      if (run.weight->trained()) list.push_back(run.weight);
    }
    return list;
  }

 private:
  TensorParallel tp_;
  std::vector<FeatureRun> runs_;
  ops::NormOptions options_;
};

}  // namespace

Var full_head_norm(const ExecCtx& ctx, const TensorParallel& tp, Var qkv, const HeadNormOptions& options) {
  const std::int64_t queries = options.heads * options.head_dim, keys = options.kv_heads * options.head_dim;
  Tensor value = qkv.take();
  TESSERA_CHECK(value.rank() == 3 && value.size(2) == queries + 2 * keys, "packed qkv of shape ",
                value.shape(), " for ", options.heads, " + 2 x ", options.kv_heads, " heads of ",
                options.head_dim);
  if (!value.is_unique()) value = ops::contiguous(ctx, value);
  const ops::NormOptions norm{
      .rms = true, .eps = options.eps, .out = value.dtype(), .zero_centered = options.zero_centered};
  std::vector<FeatureRun> runs = {{0, queries, &options.query_weight}, {queries, keys, &options.key_weight}};
  for (FeatureRun& run : runs) {
    const Tensor place = value.narrow(2, run.first, run.count);
    const Tensor x = ops::contiguous(ctx, place);
    const Tensor sums = ops::row_products(ctx, x, x);
    add_over_ranks(ctx, tp, sums);
    ops::inverse_roots(ctx, sums, whole_width(tp, run), norm.eps);
    run.saved = {x, {}, {}, sums};
    ops::copy(ctx, ops::norm_again(ctx, run.saved, run.weight->main(), Tensor(), norm), place);
  }
  return record({qkv}, std::move(value),
                [&] { return std::make_unique<FullHeadNorm>(tp, std::move(runs), norm); });
}

}  // namespace tessera
