#pragma once
/// What a call of an engine leaves open: a gradient that waits for its factor, tapes that wait for theirs.
/// Both end with the object that stands for them, at the latest with the engine's next update(), which
/// changes what they were computed from. They are used and let go of where the engine is.

#include <memory>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

class Engine;

/// A gradient that was computed and belongs to nothing yet (Engine::open_call).
class OpenCall {
 public:
  OpenCall() = default;
  /// Mean over the batch's target tokens; 0 if the loss is the caller's.
  double loss() const;
  /// Adds `factor` times the gradient to the engine's. Errors: InvalidArgument if that was done before, or
  /// for a call that was made before the last update(), discard() or set_frozen().
  void add(double factor = 1.0);

 private:
  friend class Engine;
  struct State;
  std::shared_ptr<State> state_;
};

/// The tapes of a batch (Engine::forward).
class OpenForward {
 public:
  OpenForward() = default;
  /// fp32 logits [batch, seq, vocab] or losses [batch, seq] (0 where the label is ignored) of this data rank;
  /// undefined on ranks without the head. backward() does not need it.
  Tensor output;
  /// Adds the gradient for `upstream`, the gradient of the caller's loss by `output` (same shape; undefined
  /// on ranks without the head). It is averaged over data ranks, each by its number of samples. Errors, on
  /// every rank: InvalidArgument where that was done before, for a forward that was made before the last
  /// update(), discard() or set_frozen(), or for ranks that call something else; see agree_on_backward().
  void backward(const Tensor& upstream);

 private:
  friend class Engine;
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
