#pragma once
/// One training step, and the parts it is made of.

#include <memory>
#include <span>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/optim/param_store.hpp"
#include "tessera/optim/schedule.hpp"

namespace tessera {

struct EngineOptions {
  OptimizerConfig optimizer;
  LrScheduleConfig lr_schedule;
  std::int64_t steps = 1000;            ///< length of the run: where the learning rate ends
  std::int64_t micro_batch_size = 0;    ///< samples computed at once; 0 = the whole batch
  DType compute = DType::f32;           ///< dtype of weights and activations
  std::int64_t max_skipped_steps = 20;  ///< non-finite steps in a row before update() gives up
  bool trainable = true;  ///< false: no gradients, no optimizer state; forward and evaluate only

  /// The options a configuration asks for.
  static EngineOptions from(const Config& config);
};

/// Wall-clock seconds of the parts of the last step.
struct StepTimes {
  double forward = 0, backward = 0, update = 0;
};

struct UpdateResult {
  double grad_norm = 0;  ///< before clipping; not finite if the step was skipped
  double lr = 0;
  bool skipped = false;
};

struct StepReport {
  double loss = 0;  ///< mean over target tokens
  UpdateResult update;
  std::int64_t tokens = 0;  ///< positions computed
  StepTimes times;
};

class Engine {
 public:
  /// Gives the model's parameters memory and first values (keyed by ctx.seed).
  Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx);
  ~Engine();

  /// forward_backward, then update.
  StepReport step(const Batch& batch);

  /// Adds the gradient of `factor` times the batch's mean loss (over its target tokens) to the gradient;
  /// returns that mean loss. Any number of calls may precede update(). Errors: InvalidArgument or DataError
  /// for a batch that does not fit the model.
  double forward_backward(const Batch& batch, double factor = 1.0);

  enum class Output { logits, token_losses };
  /// Computes the batch in training mode and keeps its tapes for one backward() or discard(). Returns fp32
  /// logits [batch, seq, vocab] or losses [batch, seq] (0 where the label is ignored).
  Tensor forward(const Batch& batch, Output output);
  /// Adds the gradient for `upstream`, the gradient of the caller's loss by what forward() returned (same
  /// shape).
  void backward(const Tensor& upstream);
  /// Drops the tapes of forward() and every gradient since the last update.
  void discard();
  /// Clips, updates the weights with what was accumulated, clears the gradient. A gradient that is not finite
  /// changes nothing and is counted. Errors: TrainingError after max_skipped_steps such steps in a row.
  UpdateResult update();

  /// Mean loss over the batch's target tokens, dropout off, nothing recorded.
  double evaluate(const Batch& batch);

  Model& model() { return *model_; }
  ParamStore& params() { return *params_; }
  Optimizer& optimizer() { return *optimizer_; }
  const ExecCtx& ctx() const { return ctx_; }
  const EngineOptions& options() const { return options_; }
  /// Updates tried so far, skipped ones included.
  std::int64_t steps_done() const { return steps_done_; }
  std::int64_t steps_skipped() const { return steps_skipped_; }
  /// Continues a run: what a checkpoint recorded.
  void set_progress(std::int64_t steps_done, std::int64_t steps_skipped);

 private:
  struct Kept {  ///< one micro-batch between forward() and backward()
    std::int64_t first = 0;
    MicroBatch input;
    std::unique_ptr<Tape> tape;
    Var output;
  };
  Forward context(const MicroBatch& input, Tape* tape, bool training) const;
  /// fn(first sample, micro-batch) for each micro-batch of `batch`.
  template <typename Fn>
  void for_each_micro_batch(const Batch& batch, Fn&& fn);
  void check_batch(const Batch& batch, bool needs_labels) const;

  ExecCtx ctx_;
  EngineOptions options_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ParamStore> params_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule lr_schedule_;
  WeightDecaySchedule weight_decay_schedule_;
  std::vector<Kept> kept_;
  StepTimes times_;
  std::int64_t steps_done_ = 0, steps_skipped_ = 0, skipped_in_a_row_ = 0;
  std::int64_t samples_this_step_ = 0;  ///< of earlier calls: keys dropout of later ones
};

/// The batch as device tensors, rows position-major.
MicroBatch to_micro_batch(const ExecCtx& ctx, const Batch& batch);

}  // namespace tessera
