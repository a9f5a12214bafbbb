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

void Tape::finish_weights(const ExecCtx& ctx, Function& function) {
  function.backward_weight(ctx);
  count_down(function);
}

void Tape::count_down(const Function& function) {
  for (Parameter* parameter : function.parameters()) {
    if (--uses_[parameter] == 0 && ready_) ready_(*parameter);
  }
}

void Tape::backward(const ExecCtx& ctx, const Var& root, Tensor grad, WeightGradients weights) {
  TESSERA_CHECK(root.tape() == this, "the value to differentiate is not on this tape");
  TESSERA_CHECK(!walked_, "this tape was walked backwards already");
  TESSERA_CHECK(grad.shape() == root.value().shape(), "gradient of shape ", grad.shape(),
                " for a value of shape ", root.value().shape());
  walked_ = true;
  if (root.requires_grad()) {
    nodes_[static_cast<std::size_t>(root.node_)].grads[static_cast<std::size_t>(root.slot_)] =
        std::move(grad);
  }
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    Node node = nodes_[i].function ? std::move(nodes_[i]) : Node{};
    bool reached = false;
    for (const Tensor& g : node.grads) reached |= static_cast<bool>(g);
    if (!node.function) continue;
    if (!reached) {  // no contribution will come from here, and none must be waited for
      count_down(*node.function);
      continue;
    }
    Tensors input_grads = node.function->backward_input(ctx, std::move(node.grads));
    TESSERA_ENSURE(InternalError, input_grads.size() == node.inputs.size(), node.function->name(),
                   " returned ", input_grads.size(), " gradients for ", node.inputs.size(), " inputs");
    for (std::size_t j = 0; j < input_grads.size(); ++j) {
      if (node.inputs[j].node >= 0 && input_grads[j])
        accumulate(ctx, node.inputs[j], std::move(input_grads[j]));
    }
    if (weights == WeightGradients::immediate) {
      finish_weights(ctx, *node.function);
    } else if (!node.function->parameters().empty()) {
      deferred_.push_back(std::move(node.function));
    }
  }
}

void Tape::run_weight_gradients(const ExecCtx& ctx) {
  for (auto& function : deferred_) {
    finish_weights(ctx, *function);
    function.reset();
  }
  deferred_.clear();
}

const Tensor& Tape::grad(const Var& input) const {
  TESSERA_CHECK(input.tape() == this && input.requires_grad(),
                "only inputs that require a gradient have one");
  const Node& node = nodes_[static_cast<std::size_t>(input.node_)];
  TESSERA_CHECK(!node.function && node.grads.size() == 1, "gradients are kept for inputs of the tape only");
  return node.grads[0];
}

}  // namespace tessera
