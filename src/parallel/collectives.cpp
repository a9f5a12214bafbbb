/// The conjugate pairs: a collective whose backward is another one.

#include "parallel/arriving.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

enum class Exchange { none, all_reduce, gather, reduce_scatter, own };

Tensor exchange(const ExecCtx& ctx, const TensorParallel& tp, Tensor x, Exchange kind,
                const detail::Where& where) {
  switch (kind) {
    case Exchange::none:
      break;
    case Exchange::all_reduce:
      return detail::all_reduce(ctx, tp, std::move(x), where).take(ctx);
    case Exchange::gather:
      return detail::gather_positions(ctx, tp, x, where).take(ctx);
    case Exchange::reduce_scatter:
      return detail::reduce_scatter_positions(ctx, tp, x, where).take(ctx);
    case Exchange::own:
      return detail::own_positions(ctx, tp, x);
  }
  return x;
}

struct Pair {
  const char* name;
  Exchange forward, backward;
};

class Conjugate final : public Function {
 public:
  Conjugate(const TensorParallel& tp, const Pair& pair) : tp_(tp), pair_(pair) {}
  const char* name() const override { return pair_.name; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {exchange(ctx, tp_, std::move(grads[0]), pair_.backward, detail::Where::current())};
  }

 private:
  TensorParallel tp_;
  Pair pair_;
};

Var apply(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, const Pair& pair) {
  if (!tp.active()) return x;
  Tensor y = exchange(ctx, tp, x.value(), pair.forward, detail::Where::current());
  return record({x}, std::move(y), [&] { return std::make_unique<Conjugate>(tp, pair); });
}

class GatherFeatures final : public Function {
 public:
  GatherFeatures(std::int64_t first, std::int64_t count) : first_(first), count_(count) {}
  const char* name() const override { return "gather_features"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return {ops::contiguous(ctx, grads[0].narrow(grads[0].rank() - 1, first_, count_))};
  }

 private:
  std::int64_t first_, count_;
};

}  // namespace

Var copy_to_tensor_ranks(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) {
  return apply(ctx, tp, x, {"copy_to_tensor_ranks", Exchange::none, Exchange::all_reduce});
}

Var reduce_from_tensor_ranks(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) {
  return apply(ctx, tp, x, {"reduce_from_tensor_ranks", Exchange::all_reduce, Exchange::none});
}

Var scatter_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) {
  return apply(ctx, tp, x, {"scatter_sequence", Exchange::own, Exchange::gather});
}

Var gather_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) {
  return apply(ctx, tp, x, {"gather_sequence", Exchange::gather, Exchange::reduce_scatter});
}

Var reduce_scatter_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) {
  return apply(ctx, tp, x, {"reduce_scatter_sequence", Exchange::reduce_scatter, Exchange::gather});
}

Var gather_features(const ExecCtx& ctx, const TensorParallel& tp, const Var& x,
                    std::span<const std::int64_t> counts) {
  TESSERA_CHECK_EQ(static_cast<int>(counts.size()), tp.size(), "one number of features per tensor rank");
  const auto own = static_cast<std::size_t>(tp.rank());
  const int last = x.value().rank() - 1;
  TESSERA_CHECK_EQ(x.value().size(last), counts[own], "features of this tensor rank");
  if (!tp.active()) return x;
  const Tensor part = x.value().is_contiguous() ? x.value() : ops::contiguous(ctx, x.value());
  Shape shape = part.shape();
  const std::int64_t rows = counts[own] == 0 ? 0 : part.numel() / counts[own];
  std::vector<std::int64_t> elements;
  std::int64_t total = 0, first = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    TESSERA_CHECK(counts[r] > 0, "tensor rank ", r, " has no features to gather");
    if (r < own) first += counts[r];
    total += counts[r];
    elements.push_back(rows * counts[r]);
  }
  const Tensor parts = Tensor::empty(ctx, {rows * total}, part.dtype());
  tp.comm->all_gather(ctx, part, parts, elements).wait(ctx);
  shape[last] = total;
  Tensor y = Tensor::empty(ctx, shape, part.dtype());
  const Tensor y_rows = y.view({rows, total});
  std::int64_t column = 0;
  for (const std::int64_t count : counts) {
    ops::copy(ctx, parts.narrow(0, rows * column, rows * count).view({rows, count}),
              y_rows.narrow(1, column, count));
    column += count;
  }
  return record({x}, std::move(y), [&] { return std::make_unique<GatherFeatures>(first, counts[own]); });
}

}  // namespace tessera
