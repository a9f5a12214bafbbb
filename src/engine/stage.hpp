#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engine/loss_plan.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {

class ShardFlow;
class StepMemory;

/// What the model reads, of which nothing but the number counts.
Batch blank_batch(const MicroBatchSize& size, const Model& model);

struct StageOptions {
  bool training = true;             ///< dropout is active
  bool record = true;               ///< backward follows
  std::uint32_t step = 0;           ///< keys dropout
  std::int64_t samples_before = 0;  ///< of the same step, in the global batch
  std::int64_t micro_batch_size = 1;
  std::int64_t micro_batches = 0;  ///< so many parts, as even as possible, instead of parts of that size
  /// Not 0: so many samples are cut as the data rank with most of them has, so that all make the same passes.
  std::int64_t most_samples = 0;
  std::function<void(Parameter&)> on_gradient_ready = nullptr;
  ContextParallel context = {};  ///< who holds which positions
  ShardFlow* flow = nullptr;     ///< what must follow each pass
  /// Not 0: others wait for what this rank's experts make of their tokens. A micro-batch without samples is
  /// then computed as one of padding, of so many positions where the batch has no length.
  std::int64_t padding_length = 0;
};

/// This rank's pieces of the model at work on one batch: what the pipeline executor calls.
class Stage final : public StageProgram {
 public:
  /// `batch` must outlive the stage.
  Stage(const ExecCtx& ctx, Model& model, const Batch& batch, LossPlan loss, StageOptions options);

  /// Reads what differs from call to call in `memory`, which outlives the stage, adds losses up there, and
  /// takes times that can be read of every launch: for passes that a graph repeats.
  void keep_in(const StepMemory& memory, const std::shared_ptr<DeviceClock>& clock);
  /// What takes these times; null without keep_in().
  const std::shared_ptr<DeviceClock>& clock() const { return forward_spans_.clock(); }
  /// A micro-batch as the device or the host would get it.
  MicroBatch make_micro_batch(const ExecCtx& ctx, int index) const;

  LossPlan& loss() { return loss_; }
  const LossPlan& loss() const { return loss_; }
  int micro_batches() const { return static_cast<int>(inputs_.size()); }
  /// Those that have samples, and those that are computed.
  int full_micro_batches() const;
  int computed_micro_batches() const { return fills() ? micro_batches() : full_micro_batches(); }
  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override;
  std::vector<Tensor> backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) override;
  void weight_gradient(int chunk, int micro_batch) override;
  std::vector<Port> inputs(int chunk, int micro_batch) const override;
  std::vector<Port> outputs(int chunk, int micro_batch) const override;

  /// First sample of a micro-batch, and how many it has.
  Part samples(int micro_batch) const;
  /// Time spent computing.
  const Spans& forward_spans() const { return forward_spans_; }
  const Spans& backward_spans() const { return backward_spans_; }

 private:
  std::vector<Tensor> run_forward(int chunk, int micro_batch, std::vector<Tensor> inputs);
  std::vector<Tensor> run_backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights);
  bool fills() const { return options_.padding_length > 0; }
  /// Whether it is of padding alone.
  bool is_padding(int micro_batch) const { return fills() && samples(micro_batch).count == 0; }
  bool computes(int micro_batch) const { return fills() || samples(micro_batch).count > 0; }
  std::int64_t padding_length() const;
  /// The samples of a micro-batch, or those that stand in for them.
  Batch piece_of(int micro_batch) const;
  MicroBatchSize size_of(int micro_batch) const;
  /// One piece and micro-batch between F and its last backward action.
  struct Kept {
    std::unique_ptr<Tape> tape = std::make_unique<Tape>();
    std::vector<Var> inputs, outputs;  ///< by port; of the last piece: what it returned
    Tensor upstream;                   ///< of the last piece, where it is known by then
    std::vector<Var> losses;           ///< extra ones ...
    Tensors loss_gradients;            ///< ... and their gradients
    bool last = false;                 ///< piece of the model
  };
  const MicroBatch& input_of(int micro_batch);
  Kept& kept(int chunk, int micro_batch);
  /// What the last piece returned goes to the loss.
  void finish(int micro_batch, Kept& own);
  void take_extra(const ExtraLosses& losses, Kept& own);
  std::vector<Tensor> input_gradients(int chunk, int micro_batch, Kept& own) const;

  const ExecCtx& ctx_;
  Model& model_;
  const Batch& batch_;
  LossPlan loss_;
  StageOptions options_;
  const StepMemory* memory_ = nullptr;
  std::vector<std::unique_ptr<MicroBatch>> inputs_;
  std::map<std::pair<int, int>, Kept> kept_;
  Spans forward_spans_{ctx_.stream}, backward_spans_{ctx_.stream};
};

}  // namespace tessera
