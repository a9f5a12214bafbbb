#include "tessera/autograd/recompute.hpp"

#include <algorithm>

#include "tessera/autograd/activation_offload.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

std::vector<std::int64_t> shares_of(std::int64_t n, const Communicator& ranks) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks.size(); ++r) counts.push_back(part_of(n, r, ranks.size()).count);
  return counts;
}

/// An input as it is kept: whole (or its recipe), or this rank's share of its elements; either may be in host
/// memory.
class KeptInput {
 public:
  KeptInput(const ExecCtx& ctx, const Var& x, const Communicator* ranks)
      : shape_(x.value().shape()), requires_grad_(x.requires_grad()), shared_(ranks != nullptr) {
    if (!x || x.recipe() || (ranks == nullptr && !ctx.activations)) {
      shared_ = false;
      whole_ = SavedInput(x);
      return;
    }
    Tensor kept = x.value().is_contiguous() ? x.value() : ops::contiguous(ctx, x.value());
    if (shared_) {
      const Part part = part_of(kept.numel(), ranks->rank(), ranks->size());
      kept = ops::contiguous(ctx, kept.view({-1}).narrow(0, part.begin, part.count));  // a view keeps all
    }
    if (ctx.activations) {
      away_ = ctx.activations->keep(kept);
    } else {
      share_ = kept;
    }
  }

  bool requires_grad() const { return requires_grad_; }

  /// The input; there once `pending` is, where something is pending.
  Tensor restore(const ExecCtx& ctx, Communicator* ranks, Pending& pending) const {
    if (!share_ && !away_) return whole_.get(ctx);
    const Tensor kept = away_ ? ctx.activations->restore(away_) : share_;
    if (!shared_) return kept;
    Tensor whole = Tensor::empty(ctx, shape_, kept.dtype());
    pending = ranks->all_gather(ctx, kept, whole.view({-1}), shares_of(shape_.numel(), *ranks));
    return whole;
  }

 private:
  SavedInput whole_;
  Tensor share_;
  std::shared_ptr<ActivationOffload::Kept> away_;
  Shape shape_;
  bool requires_grad_;
  bool shared_;
};

class RecomputeFunction final : public Function {
 public:
  RecomputeFunction(std::vector<KeptInput> inputs, std::size_t outputs, std::vector<Parameter*> parameters,
                    RecomputedPart part, Communicator* ranks)
      : inputs_(std::move(inputs)),
        outputs_(outputs),
        parameters_(std::move(parameters)),
        part_(std::move(part)),
        ranks_(ranks) {}
  const char* name() const override { return "recompute"; }

  Tensors backward(const ExecCtx& ctx, Tensors grads) override {
    Tensors result = run(ctx, std::move(grads), Tape::WeightGradients::immediate);
    tape_.reset();
    return result;
  }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    return run(ctx, std::move(grads), Tape::WeightGradients::deferred);
  }
  void backward_weight(const ExecCtx& ctx) override {
    tape_->run_weight_gradients(ctx);
    tape_.reset();
  }
  std::vector<Parameter*> parameters() const override { return parameters_; }

 private:
  Tensors run(const ExecCtx& ctx, Tensors grads, Tape::WeightGradients weights) {
    tape_ = std::make_unique<Tape>();
    std::vector<Var> inputs = restore(ctx);
    std::vector<Var> outputs = part_(inputs);
    check(outputs);
    // Only what the recorded Functions keep may live from here on.
    for (Var& input : inputs) input.take();
    std::vector<Var> roots;
    Tensors root_grads;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].take();
      if (!grads[i] || !outputs[i].requires_grad()) continue;
      roots.push_back(std::move(outputs[i]));
      root_grads.push_back(std::move(grads[i]));
    }
    tape_->backward(ctx, roots, std::move(root_grads), weights);
    Tensors result;
    for (const Var& input : inputs)
      result.push_back(input.requires_grad() ? tape_->take_grad(input) : Tensor());
    return result;
  }

  std::vector<Var> restore(const ExecCtx& ctx) {
    Tensors values;
    std::vector<Pending> pending(inputs_.size());
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      values.push_back(inputs_[i].restore(ctx, ranks_, pending[i]));
    std::vector<Var> inputs;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      pending[i].wait(ctx);
      inputs.push_back(values[i] ? tape_->input(std::move(values[i]), inputs_[i].requires_grad()) : Var());
    }
    inputs_.clear();
    return inputs;
  }

  void check(const std::vector<Var>& outputs) const {
    TESSERA_CHECK_EQ(outputs.size(), outputs_, "values that a recomputed part gave again");
    for (const Var& output : outputs) {
      TESSERA_CHECK(output.tape() == nullptr || output.tape() == tape_.get(),
                    "a recomputed part gave a value that it did not compute from its inputs");
    }
    for (const Parameter* used : tape_->parameters()) {
      TESSERA_CHECK(std::find(parameters_.begin(), parameters_.end(), used) != parameters_.end(),
                    "a recomputed part uses parameter ", used->name(), ", which its caller did not name");
    }
  }

  std::vector<KeptInput> inputs_;
  std::size_t outputs_;
  std::vector<Parameter*> parameters_;
  RecomputedPart part_;
  Communicator* ranks_;
  std::unique_ptr<Tape> tape_;  // from phase 1 to phase 2
};

}  // namespace

std::vector<Var> recompute(const ExecCtx& ctx, const std::vector<Var>& inputs,
                           std::vector<Parameter*> parameters, RecomputedPart fn, Communicator* partition,
                           const std::function<bool(std::size_t)>& differs) {
  if (partition != nullptr && partition->size() == 1) partition = nullptr;
  const auto keep = [&] {
    std::vector<KeptInput> kept;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      kept.emplace_back(ctx, inputs[i], differs && differs(i) ? nullptr : partition);
    return kept;
  };
  std::vector<KeptInput> kept;
  if (ctx.activations && tape_of(inputs) != nullptr) {
    ctx.activations->begin_part();
    kept = keep();
  }
  std::vector<Var> constants;
  for (const Var& input : inputs) constants.emplace_back(input.value());
  Tensors outputs;
  for (Var& output : fn(constants)) {
    TESSERA_CHECK(output.tape() == nullptr,
                  "a recomputed part uses a value on a tape that is not among its inputs");
    outputs.push_back(output.take());
  }
  constants.clear();
  std::erase_if(parameters, [](const Parameter* p) { return !p->trained(); });
  const std::size_t count = outputs.size();
  return record(inputs, std::move(outputs), [&] {
    if (kept.empty()) kept = keep();
    return std::make_unique<RecomputeFunction>(std::move(kept), count, std::move(parameters), std::move(fn),
                                               partition);
  });
}

}  // namespace tessera
