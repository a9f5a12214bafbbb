#pragma once
/// Optimizer: one update of all main weights of a ParamStore.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/optim/param_store.hpp"

namespace tessera {

struct StepResult {
  double grad_norm = 0.0;    ///< before clipping; not finite when skipped
  double clip_factor = 1.0;  ///< what the gradient was multiplied by
  bool skipped = false;      ///< the gradient was not finite: nothing was changed
};

/// A piece of optimizer state, as checkpoints name it: "adam_m.<parameter>", "adam_v.<parameter>" or
/// "momentum.<parameter>", fp32 in the parameter's shape.
struct NamedTensor {
  std::string name;
  Tensor tensor;
  const Parameter* parameter = nullptr;
};

/// AdamW, Adam or SGD with momentum, by OptimizerConfig. Parameters of rank <= 1 (biases, norms) and those
/// whose name matches one of config.no_decay get no weight decay.
class Optimizer {
 public:
  /// Keeps a reference to `store`. Errors: InvalidArgument if the store is not trainable; ConfigError for
  /// values that no update can use.
  Optimizer(const ExecCtx& ctx, ParamStore& store, const OptimizerConfig& config);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates main weights and model copy from store.gradients(), clipped to config.clip_grad (0 = off) by
  /// their global norm, as Megatron does: factor clip_grad / (norm + 1e-6) where that is below 1. A gradient
  /// that is not finite changes nothing. Either way the gradients are used up: the store is open for the next
  /// call. Errors: InvalidArgument if no call was finished since the last update.
  StepResult step(double lr, double weight_decay);

  /// Updates applied so far: skipped steps do not count. Adam's bias correction follows it.
  std::int64_t updates() const { return updates_; }
  /// For resuming. Errors: InvalidArgument if negative.
  void set_updates(std::int64_t updates);
  /// Views of the state, in registration order of the parameters; writing to them restores a checkpoint.
  std::vector<NamedTensor> state() const;
  /// Whether weight decay applies. Errors: InvalidArgument if the parameter is not in the store.
  bool decays(const Parameter& parameter) const;

 private:
  /// Neighbours in the flat buffers that are updated alike, by one kernel call; the gaps between them
  /// included.
  struct Range {
    std::int64_t begin = 0, count = 0;
    bool decay = false;
  };

  bool decay_rule(const Parameter& parameter) const;
  void find_ranges();
  double global_norm(const FlatGradient& gradient) const;
  void update(const Range& range, const FlatGradient& gradient, double grad_scale, double lr,
              double weight_decay) const;

  ExecCtx ctx_;
  ParamStore& store_;
  OptimizerConfig config_;
  std::vector<Range> ranges_;
  std::int64_t updates_ = 0;
  Tensor m_, v_, momentum_;
};

}  // namespace tessera
