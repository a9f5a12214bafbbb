#pragma once
/// Optimizer: one update of all main weights of a ParamStore.

#include <cstdint>
#include <string>
#include <utility>
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

  /// Updates main weights and model copy from the store's gradients, clipped to config.clip_grad (0 = off) by
  /// their global norm, as Megatron does: factor clip_grad / (norm + 1e-6) where that is below 1. The norm is
  /// that of the whole model, each element counted once, summed in fp64 over the store's world; a gradient
  /// that is not finite on any rank changes nothing on all of them. Either way the gradients are used up: the
  /// store is open for the next call. Collective over the world; if the store is sharded the new weights are
  /// under way to the other data ranks when this returns. Errors: InvalidArgument if no call was finished
  /// since the last update; CommunicationError.
  StepResult step(double lr, double weight_decay);

  /// Updates applied so far: skipped steps do not count. Adam's bias correction follows it.
  std::int64_t updates() const { return updates_; }
  /// For resuming. Errors: InvalidArgument if negative.
  void set_updates(std::int64_t updates);
  /// Views of the state, in registration order of the parameters; writing to them restores a checkpoint.
  /// Errors: InvalidArgument if the store is sharded: this rank has pieces() of it.
  std::vector<NamedTensor> state() const;
  /// What this rank saves or loads of the state: see ParamStore::pieces. "adam_m" of all parameters, then
  /// "adam_v" (or "momentum").
  std::vector<StatePiece> pieces(PieceSet set) const;
  /// Bytes of the state.
  std::size_t persistent_bytes() const;
  /// Whether weight decay applies. Errors: InvalidArgument if the parameter is not in the store.
  bool decays(const Parameter& parameter) const;

 private:
  /// Neighbours in one bucket that are updated alike, by one kernel call; the gaps between them included.
  struct Range {
    FlatRun run;
    bool decay = false;
  };
  struct BucketWork {
    std::vector<Range> updates;
    std::vector<FlatRun> counted;  ///< added to the norm by this rank
  };

  bool decay_rule(const Parameter& parameter) const;
  void find_work();
  /// The state by kind, as checkpoints name it.
  std::vector<std::pair<std::string, Tensor>> buffers() const;
  double global_norm(double scale) const;
  void update(std::size_t bucket, const Range& range, double grad_scale, double lr,
              double weight_decay) const;

  ExecCtx ctx_;
  ParamStore& store_;
  OptimizerConfig config_;
  std::vector<BucketWork> work_;  // by bucket
  std::int64_t updates_ = 0;
  Tensor m_, v_, momentum_;
};

}  // namespace tessera
