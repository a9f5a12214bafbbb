#pragma once
/// Reverse-mode differentiation over coarse nodes. A Function is one node with an explicit contract; a Tape
/// is the list of nodes of one micro-batch, walked backwards once. Recording follows the value: what is
/// computed from a Var on a tape is recorded there, what is computed from plain Tensors never is.
///
/// A Function of your own:
///   class Square : public Function {
///    public:
///     explicit Square(Tensor x) : x_(std::move(x)) {}
///     const char* name() const override { return "square"; }
///     Tensors backward_input(const ExecCtx& ctx, Tensors grads) override { return {times(ctx, 2, x_,
///     grads[0])}; }
///    private:
///     Tensor x_;
///   };
///   Var square(const ExecCtx& ctx, const Var& x) {
///     Tensor y = times(ctx, 1, x.value(), x.value());
///     return record({x}, y, [&] { return std::make_unique<Square>(x.value()); });
///   }

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/autograd/parameter.hpp"

namespace tessera {

class Tape;
using Tensors = std::vector<Tensor>;

/// A value, and where on a tape it was computed (or no tape: a constant).
class Var {
 public:
  Var() = default;
  Var(Tensor value) : value_(std::move(value)) {}

  const Tensor& value() const { return value_; }
  Tape* tape() const { return tape_; }
  /// Whether a gradient flows back through this value.
  bool requires_grad() const { return requires_grad_; }
  explicit operator bool() const { return static_cast<bool>(value_); }
  /// How the value can be computed again from what is kept anyway; empty = it cannot. A Function that needs
  /// this value later may keep this instead (selective recomputation).
  const std::function<Tensor(const ExecCtx&)>& recipe() const { return recipe_; }
  void set_recipe(std::function<Tensor(const ExecCtx&)> recipe) { recipe_ = std::move(recipe); }
  /// Gives the value up, so that its memory may be overwritten by the new owner; this Var keeps its place on
  /// the tape.
  Tensor take() { return std::exchange(value_, Tensor()); }

 private:
  friend class Tape;
  Tensor value_;
  std::function<Tensor(const ExecCtx&)> recipe_;
  Tape* tape_ = nullptr;
  int node_ = -1;
  int slot_ = 0;
  bool requires_grad_ = false;
};

/// An input that a Function needs in its backward: kept, or how to compute it again.
class SavedInput {
 public:
  SavedInput() = default;
  explicit SavedInput(const Var& x) : value_(x.recipe() ? Tensor() : x.value()), recipe_(x.recipe()) {}
  /// Computed anew at each call, if there is a recipe.
  Tensor get(const ExecCtx& ctx) const { return recipe_ ? recipe_(ctx) : value_; }

 private:
  Tensor value_;
  std::function<Tensor(const ExecCtx&)> recipe_;
};

/// One differentiable operation as recorded: it keeps what its backward needs, and nothing else.
class Function {
 public:
  virtual ~Function() = default;
  virtual const char* name() const = 0;
  /// Phase 1, called once: from the gradients of the outputs (undefined = zero) to those of the inputs
  /// (undefined where there is none). A tensor in `grads` may be overwritten if it is_unique(). What phase 2
  /// needs is kept.
  virtual Tensors backward_input(const ExecCtx& ctx, Tensors grads) = 0;
  /// Phase 2, called once after phase 1, at once or later: adds to the gradients of parameters().
  virtual void backward_weight(const ExecCtx& ctx) { (void)ctx; }
  /// Both phases, where nothing is deferred. Overridden where communication of the input gradient can run
  /// during the weight gradient.
  virtual Tensors backward(const ExecCtx& ctx, Tensors grads) {
    Tensors result = backward_input(ctx, std::move(grads));
    backward_weight(ctx);
    return result;
  }
  /// The trained parameters phase 2 contributes to.
  virtual std::vector<Parameter*> parameters() const { return {}; }
};

class Tape {
 public:
  enum class WeightGradients { immediate, deferred };

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Starts a tape at `value`. With requires_grad, grad() gives its gradient after backward.
  Var input(Tensor value, bool requires_grad);
  /// Adds a node. Called through `record` by differentiable functions.
  std::vector<Var> add(std::unique_ptr<Function> function, const std::vector<Var>& inputs, Tensors outputs);

  /// Called once for each trained parameter recorded here, when it has received its last contribution from
  /// this tape (if no use of it leads to the root, when that is known).
  void on_gradient_ready(std::function<void(Parameter&)> callback) { ready_ = std::move(callback); }

  /// Walks the tape backwards from `root` with gradient `grad` (shape of root), freeing nodes as it goes.
  /// Deferred: weight gradients wait for run_weight_gradients(). Errors: InvalidArgument if root is not on
  /// this tape, or the tape was walked already.
  void backward(const ExecCtx& ctx, const Var& root, Tensor grad,
                WeightGradients weights = WeightGradients::immediate);
  /// From several values at once. An undefined gradient is zero; a root may have given its value up
  /// (Var::take).
  void backward(const ExecCtx& ctx, const std::vector<Var>& roots, Tensors grads,
                WeightGradients weights = WeightGradients::immediate);
  void run_weight_gradients(const ExecCtx& ctx);
  /// Gradient of a Var made by input(); undefined if none reached it.
  const Tensor& grad(const Var& input) const;
  /// The same, given up by the tape: its memory lives no longer than the caller wants, and may be
  /// overwritten.
  Tensor take_grad(const Var& input);
  /// Nodes recorded so far.
  std::size_t size() const { return nodes_.size(); }
  /// The trained parameters recorded so far, in no particular order.
  std::vector<Parameter*> parameters() const;

 private:
  struct Edge {
    int node = -1;
    int slot = 0;
  };
  struct Node {
    std::unique_ptr<Function> function;  ///< null for an input
    std::vector<Edge> inputs;            ///< node -1: no gradient wanted
    Tensors grads;                       ///< of the outputs, as they arrive
  };
  void accumulate(const ExecCtx& ctx, const Edge& edge, Tensor grad);
  /// Runs the backward of one node and passes its gradients on.
  void walk(const ExecCtx& ctx, Node node, WeightGradients weights);
  /// Where in nodes_ a Var made by input() is.
  std::size_t index_of(const Var& input) const;
  /// One use less of each of its parameters; reports those whose last one it was.
  void count_down(const Function& function);

  std::vector<Node> nodes_;
  std::vector<std::unique_ptr<Function>> deferred_;
  std::unordered_map<Parameter*, int> uses_;
  std::function<void(Parameter&)> ready_;
  bool walked_ = false;
};

/// The tape the inputs are on, or null. Errors: InvalidArgument if they are on different ones.
Tape* tape_of(const std::vector<Var>& inputs);

/// Outputs as Vars, recorded on the inputs' tape, if there is one, with the Function `make()` builds.
template <typename Make>
std::vector<Var> record(const std::vector<Var>& inputs, Tensors outputs, Make&& make) {
  if (Tape* tape = tape_of(inputs)) return tape->add(make(), inputs, std::move(outputs));
  return {outputs.begin(), outputs.end()};
}
template <typename Make>
Var record(const std::vector<Var>& inputs, Tensor output, Make&& make) {
  if (Tape* tape = tape_of(inputs)) return std::move(tape->add(make(), inputs, {std::move(output)})[0]);
  return output;
}

}  // namespace tessera
