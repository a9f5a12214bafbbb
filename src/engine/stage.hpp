#pragma once
#include <map>
#include <memory>
#include <vector>

#include "engine/timer.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {

struct StageOptions {
  Model::Output output = Model::Output::losses;
  bool training = true;             ///< dropout is active
  bool record = true;               ///< backward follows
  std::uint32_t step = 0;           ///< keys dropout
  std::int64_t samples_before = 0;  ///< of the same step, in the global batch
  std::int64_t micro_batch_size = 1;
  std::int64_t micro_batches = 0;  ///< so many parts, as even as possible, instead of parts of that size
  bool keep_outputs = false;       ///< in outputs(), instead of adding up losses
  std::function<void(Parameter&)> on_gradient_ready = nullptr;
  /// Gets what the last piece returned for a micro-batch; returns its gradient.
  std::function<Tensor(int micro_batch, const Tensor& output)> loss_gradient = nullptr;
};

/// This rank's pieces of the model at work on one batch: what the pipeline executor calls.
class Stage final : public StageProgram {
 public:
  /// `batch` must outlive the stage.
  Stage(const ExecCtx& ctx, Model& model, const Batch& batch, StageOptions options);

  /// The gradient of each loss, known before the forward pass; otherwise it comes with set_upstream().
  /// `scale` (f32 [1] on the device, or undefined = 1) multiplies it.
  void set_loss_gradient(double gradient, Tensor scale) {
    loss_gradient_ = gradient;
    loss_scale_ = std::move(scale);
  }
  int micro_batches() const { return static_cast<int>(inputs_.size()); }
  /// Those that have samples.
  int full_micro_batches() const;
  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override;
  std::vector<Tensor> backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) override;
  void weight_gradient(int chunk, int micro_batch) override;
  std::vector<Port> inputs(int chunk, int micro_batch) const override;
  std::vector<Port> outputs(int chunk, int micro_batch) const override;

  /// Sum of the losses of all micro-batches so far, f64 [1]; undefined on ranks without the head.
  const Tensor& loss_sum() const { return loss_sum_; }
  /// What the last piece returned for each micro-batch, if options.keep_outputs; empty on ranks without the
  /// head.
  const std::vector<Tensor>& outputs() const { return outputs_; }
  /// First sample of a micro-batch, and how many it has.
  Part samples(int micro_batch) const;
  /// The gradient of outputs()[micro_batch], in its shape.
  void set_upstream(int micro_batch, Tensor gradient);
  /// Time spent computing.
  const Spans& forward_spans() const { return forward_spans_; }
  const Spans& backward_spans() const { return backward_spans_; }

 private:
  /// One piece and micro-batch between F and its last backward action.
  struct Kept {
    std::unique_ptr<Tape> tape = std::make_unique<Tape>();
    std::vector<Var> inputs, outputs;  ///< by port; of the last piece: what it returned
    Tensor upstream;
    bool last = false;  ///< piece of the model
  };
  const MicroBatch& input_of(int micro_batch);
  Kept& kept(int chunk, int micro_batch);
  void add_up(const Tensor& losses);
  /// The tensors of an empty micro-batch.
  std::vector<Tensor> nothing(const std::vector<Port>& ports) const;
  /// What the last piece returned is kept, asked about, or added up.
  void finish(int micro_batch, Kept& own, bool known, const Tensor& labels);
  std::vector<Tensor> input_gradients(int chunk, int micro_batch, Kept& own) const;

  const ExecCtx& ctx_;
  Model& model_;
  const Batch& batch_;
  StageOptions options_;
  std::vector<std::unique_ptr<MicroBatch>> inputs_;
  std::map<std::pair<int, int>, Kept> kept_;
  std::vector<Tensor> outputs_, upstream_;
  double loss_gradient_ = 0;
  Tensor loss_scale_, loss_sum_;
  Spans forward_spans_{ctx_.stream}, backward_spans_{ctx_.stream};
};

}  // namespace tessera
