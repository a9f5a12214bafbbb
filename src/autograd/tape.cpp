#include "tessera/autograd/tape.hpp"

#include "tessera/ops/elementwise.hpp"

namespace tessera {

Tape* tape_of(const std::vector<Var>& inputs) {
  Tape* tape = nullptr;
  for (const Var& input : inputs) {
    if (input.tape() == nullptr) continue;
    TESSERA_CHECK(tape == nullptr || tape == input.tape(),
                  "the inputs of one operation are on different tapes");
    tape = input.tape();
  }
  return tape;
}

Var Tape::input(Tensor value, bool requires_grad) {
  Var var(std::move(value));
  var.tape_ = this;
  var.requires_grad_ = requires_grad;
  if (requires_grad) {
    var.node_ = static_cast<int>(nodes_.size());
    nodes_.push_back({nullptr, {}, Tensors(1)});
  }
  return var;
}

std::vector<Var> Tape::add(std::unique_ptr<Function> function, const std::vector<Var>& inputs,
                           Tensors outputs) {
  TESSERA_CHECK(!walked_, "this tape was walked backwards already: record on a new one");
  Node node;
  bool wanted = false;
  for (const Var& input : inputs) {
    node.inputs.push_back(input.requires_grad() ? Edge{input.node_, input.slot_} : Edge{});
    wanted |= input.requires_grad();
  }
  for (Parameter* parameter : function->parameters()) {
    ++uses_[parameter];
    wanted = true;
  }
  std::vector<Var> results;
  for (std::size_t slot = 0; slot < outputs.size(); ++slot) {
    Var result(std::move(outputs[slot]));
    result.tape_ = this;
    result.requires_grad_ = wanted;
    result.node_ = wanted ? static_cast<int>(nodes_.size()) : -1;
    result.slot_ = static_cast<int>(slot);
    results.push_back(std::move(result));
  }
  if (wanted) {
    node.function = std::move(function);
    node.grads.resize(results.size());
    nodes_.push_back(std::move(node));
  }
  return results;
}

void Tape::accumulate(const ExecCtx& ctx, const Edge& edge, Tensor grad) {
  Tensor& slot = nodes_[static_cast<std::size_t>(edge.node)].grads[static_cast<std::size_t>(edge.slot)];
  // Rows may be apart, as those of padded logits are.
  const auto dense = [&](const Tensor& t) { return t.is_contiguous() ? t : ops::contiguous(ctx, t); };
  if (!slot) {
    slot = std::move(grad);
  } else if (slot.is_unique() && slot.is_contiguous()) {
    ops::axpby(ctx, 1.0f, dense(grad), 1.0f, slot);
  } else {
    slot = ops::add(ctx, dense(slot), dense(grad), slot.dtype());
  }
}

void Tape::count_down(const Function& function) {
  for (Parameter* parameter : function.parameters()) {
    if (--uses_[parameter] == 0 && ready_) ready_(*parameter);
  }
}

void Tape::backward(const ExecCtx& ctx, const Var& root, Tensor grad, WeightGradients weights) {
  TESSERA_CHECK(grad, "the value to differentiate was given no gradient");
  Tensors grads;
  grads.push_back(std::move(grad));
  backward(ctx, std::vector<Var>{root}, std::move(grads), weights);
}

void Tape::backward(const ExecCtx& ctx, const std::vector<Var>& roots, Tensors grads,
                    WeightGradients weights) {
  TESSERA_CHECK(!walked_, "this tape was walked backwards already");
  TESSERA_CHECK_EQ(roots.size(), grads.size(), "gradients for the values to differentiate");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    TESSERA_CHECK(roots[i].tape() == this, "the value to differentiate is not on this tape");
    TESSERA_CHECK(!grads[i] || !roots[i] || grads[i].shape() == roots[i].value().shape(),
                  "gradient of shape ", grads[i].shape(), " for a value of shape ", roots[i].value().shape());
  }
  walked_ = true;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (roots[i].requires_grad() && grads[i])
      accumulate(ctx, {roots[i].node_, roots[i].slot_}, std::move(grads[i]));
  }
  grads.clear();
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    if (nodes_[i].function) walk(ctx, std::move(nodes_[i]), weights);
  }
}

void Tape::walk(const ExecCtx& ctx, Node node, WeightGradients weights) {
  bool reached = false;
  for (const Tensor& g : node.grads) reached |= static_cast<bool>(g);
  if (!reached) {  // no contribution will come from here, and none must be waited for
    count_down(*node.function);
    return;
  }
  const bool immediate = weights == WeightGradients::immediate;
  Tensors grads = immediate ? node.function->backward(ctx, std::move(node.grads))
                            : node.function->backward_input(ctx, std::move(node.grads));
  TESSERA_ENSURE(InternalError, grads.size() == node.inputs.size(), node.function->name(), " returned ",
                 grads.size(), " gradients for ", node.inputs.size(), " inputs");
  for (std::size_t j = 0; j < grads.size(); ++j) {
    if (node.inputs[j].node >= 0 && grads[j]) accumulate(ctx, node.inputs[j], std::move(grads[j]));
  }
  if (immediate) {
    count_down(*node.function);
  } else if (!node.function->parameters().empty()) {
    deferred_.push_back(std::move(node.function));
  }
}

void Tape::run_weight_gradients(const ExecCtx& ctx) {
  std::vector<std::unique_ptr<Function>> deferred = std::exchange(deferred_, {});
  for (auto& function : deferred) {
    function->backward_weight(ctx);
    count_down(*function);
    function.reset();
  }
}

const Tensor& Tape::grad(const Var& input) const { return nodes_[index_of(input)].grads[0]; }

Tensor Tape::take_grad(const Var& input) { return std::exchange(nodes_[index_of(input)].grads[0], Tensor()); }

std::size_t Tape::index_of(const Var& input) const {
  TESSERA_CHECK(input.tape() == this && input.requires_grad(),
                "only inputs that require a gradient have one");
  const auto index = static_cast<std::size_t>(input.node_);
  TESSERA_CHECK(!nodes_[index].function && nodes_[index].grads.size() == 1,
                "gradients are kept for inputs of the tape only");
  return index;
}

std::vector<Parameter*> Tape::parameters() const {
  std::vector<Parameter*> list;
  for (const auto& [parameter, uses] : uses_) list.push_back(parameter);
  return list;
}

}  // namespace tessera
