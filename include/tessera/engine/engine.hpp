#pragma once
/// One training step, and the parts it is made of.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/config_optimizer.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/device/graph.hpp"
#include "tessera/engine/agreement.hpp"
#include "tessera/engine/loss_term.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/optim/param_store.hpp"
#include "tessera/optim/schedule.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {

struct Config;
class HostCopy;
class LossPlan;
class Stage;
struct StageOptions;

/// How an engine takes part in a job of several ranks.
struct EngineLayout {
  std::shared_ptr<ProcessMesh> mesh;  ///< null = alone
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;  ///< pieces of the model per pipeline stage
  int zero_stage = 1;
  std::int64_t bucket_elements = 0;  ///< see ParamStoreOptions
};

struct EngineOptions {
  OptimizerConfig optimizer = {};  ///< split_main_weights only where `compute` is bf16
  LrScheduleConfig lr_schedule = {};
  std::int64_t steps = 1000;          ///< length of the run: where the learning rate ends
  std::int64_t micro_batch_size = 0;  ///< samples computed at once; 0 = the whole batch
  std::int64_t micro_batches = 0;     ///< cut every batch into so many parts instead, as even as possible
  DType compute = DType::f32;         ///< dtype of weights and activations
  LossScale loss_scale = {};
  std::int64_t max_skipped_steps = 20;  ///< non-finite steps in a row before update() gives up
  bool trainable = true;  ///< false: no gradients, no optimizer state; forward and evaluate only
  GraphUse cuda_graph = GraphUse::off;  ///< CUDA: whether the passes of a step are launched as one graph
  EngineLayout layout = {};
  ParamGroups groups = {};  ///< none: ParamGroups::by_decay

  /// The options a configuration asks for.
  static EngineOptions from(const Config& config);
};

/// What came of trying whether the passes of a step serve better as a graph (GraphUse::automatic).
struct GraphTrial {
  bool used = false;                ///< from now on
  std::string refusal;              ///< why they cannot be one; empty if they can
  double plain_s = 0, graph_s = 0;  ///< passes of a batch either way; of all ranks the sums

  /// A line for the log.
  std::string text() const;
};

/// Seconds of the parts of a step, measured where the work runs.
struct StepTimes {
  double forward = 0, backward = 0, update = 0;
  double bubble = 0;  ///< waiting for other stages of the pipeline
};

/// What one step sent and waited for along one axis ("tp", "tp_block" where key-value heads have copies,
/// "dp", "pp", "embedding", "world").
struct AxisTraffic {
  std::string axis;
  std::uint64_t bytes_sent = 0;
  double wait_s = 0;  ///< communication that nothing hid
};

struct UpdateResult {
  double grad_norm = 0;  ///< before clipping; not finite if the step was skipped
  double lr = 0;         ///< the schedule's; if the caller gave rates, that of the first group
  bool skipped = false;
  double loss_scale = 1;  ///< of the next step (fp16)
};

struct StepReport {
  double loss = 0;              ///< mean over target tokens, and the model's extra losses
  std::vector<LossTerm> terms;  ///< what it is made of: the tokens' loss, then the extra ones
  UpdateResult update;
  std::int64_t tokens = 0;  ///< positions computed, over all data ranks
  StepTimes times;
  std::vector<AxisTraffic> traffic;  ///< of this rank; empty for one rank
};

/// One rank's part of training. With several ranks every one calls the same members in the same order, each
/// with the batch of its data rank: ranks that differ in other axes give the same batch. Losses are those of
/// the whole batch over all data ranks, and every rank gets them. Members that take a batch begin with
/// agree_on(): ranks that call something else, hold another batch than their peers, or cannot use theirs are
/// an error on every rank.
class Engine {
 public:
  /// Gives the model's parameters memory and first values (keyed by ctx.seed). `model` holds this rank's
  /// pieces.
  Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx);
  ~Engine();

  /// A call with the facts of this engine: step and what is frozen.
  BatchCall about(BatchCall call) const;
  /// agree() of agreement.hpp about such a call, with what is wrong with this rank's batch, if anything is. A
  /// batch whose global_targets are known is not agreed on again.
  void agree_on(Batch& batch, BatchCall call, bool needs_labels) const;

  /// forward_backward, then update.
  StepReport step(const Batch& batch);
  /// The same in two halves: on a GPU launch_step() returns while the step runs, so that the next one can be
  /// launched before finish_step() waits for the result of the oldest. Nothing in a step waits for the GPU.
  void launch_step(const Batch& batch);
  StepReport finish_step();
  std::size_t steps_under_way() const { return steps_.size(); }

  /// Adds the gradient of `factor` times the batch's loss (the mean over its target tokens, and the model's
  /// extra losses times their weights) to the gradient;
  /// returns that loss. Any number of calls may precede update(). A data rank may have no samples
  /// (batch.batch 0) while others do. Errors: InvalidArgument or DataError for a batch that does not fit the
  /// model.
  double forward_backward(const Batch& batch, double factor = 1.0);

  /// A gradient that was computed and belongs to nothing yet: add_call() adds it, times a factor, drop_call()
  /// forgets it. Until the next update(), which forgets all that are left.
  struct Call {
    std::int64_t number = 0;
    double loss = 0;  ///< mean over the batch's target tokens; 0 if the loss is the caller's
  };
  /// forward_backward for a factor that is known later.
  Call open_call(const Batch& batch);
  /// Errors: InvalidArgument for a call that was added, dropped, or made before the last update.
  void add_call(std::int64_t number, double factor = 1.0);
  void drop_call(std::int64_t number);

  enum class Output { logits, token_losses };
  /// A loss of the caller's: gets micro-batch and output, fp32 [samples.count, seq, vocab] or
  /// [samples.count, seq] (0 where the label is ignored), and returns the gradient of the micro-batch's loss
  /// by it. Called on every rank with the head.
  using LossFunction = std::function<Tensor(int micro_batch, const Part& samples, const Tensor& output)>;
  /// The same with such a loss, averaged over micro-batches and data ranks, each by its number of samples. It
  /// is asked within the pipeline's schedule, so no more is kept than with the model's own loss.
  Call open_call(const Batch& batch, Output output, const LossFunction& loss);

  /// Computes the batch in training mode and keeps its tapes for one backward(); several may be kept. Returns
  /// fp32 logits [batch, seq, vocab] or losses [batch, seq] (0 where the label is ignored) of this data rank;
  /// undefined on ranks without the head.
  Tensor forward(const Batch& batch, Output output);
  /// Names the last forward().
  std::int64_t last_forward() const { return forwards_; }
  /// Adds the gradient for `upstream`, the gradient of the caller's loss by what forward() returned (same
  /// shape; undefined on ranks without the head). It is averaged over data ranks, each by its number of
  /// samples. `number`: of last_forward(), left out: the last one. Errors, on every rank: InvalidArgument for
  /// one that was used, dropped, or made before the last update, or for ranks that call something else; see
  /// agree_on_backward().
  void backward(const Tensor& upstream, std::optional<std::int64_t> number = {});
  /// Drops the tapes of one forward().
  void drop_forward(std::int64_t number);
  /// Drops all tapes of forward() and every gradient since the last update.
  void discard();

  /// What is frozen from the next call on besides parameters of frozen groups: Tessera's names (those of
  /// other stages too), each with the caller's own, for messages. Finished calls keep the gradients they
  /// gave, and the next update acts on what they trained; open calls and tapes of forward() are dropped.
  /// Local; the next call throws InvalidArgument on every rank unless all have been given the same. No step
  /// is under way.
  void set_frozen(std::map<std::string, std::string> names);
  /// What forward() returns, dropout off, nothing recorded.
  Tensor predict(const Batch& batch, Output output);
  /// Whether this rank has the model's head: where outputs are.
  bool holds_head() const;

  /// Clips, updates the weights with what was accumulated, clears the gradient. A gradient that is not finite
  /// changes nothing and is counted. Errors: TrainingError after max_skipped_steps such steps in a row;
  /// InvalidArgument, on every rank, where ranks come with different rates, after calls with other factors,
  /// or call something else.
  UpdateResult update();
  /// The same with the caller's rates, one for each of the optimizer's groups. `agreed`: ranks have compared
  /// them already.
  UpdateResult update(std::span<const UpdateRates> rates, bool agreed = false);

  /// Optimizer::grad_norm(). Collective.
  double grad_norm();

  /// The loss of the batch, as a step trains it, dropout off, nothing recorded.
  double evaluate(const Batch& batch);
  /// The same term by term, over all data ranks: so that several batches can be added up.
  std::vector<LossTerm> evaluate_terms(const Batch& batch);
  /// What the last loss that was read of a step or call is made of: the tokens' loss, then the model's extra
  /// ones.
  const std::vector<LossTerm>& terms() const { return terms_; }

  Model& model() { return *model_; }
  ParamStore& params() { return *params_; }
  /// Cuts every batch from now on into so many parts, as even as possible; 0: by options().micro_batch_size.
  void set_micro_batches(std::int64_t count) { options_.micro_batches = count; }
  Optimizer& optimizer() { return *optimizer_; }
  const ExecCtx& ctx() const { return ctx_; }
  /// Nothing until the third step with options.cuda_graph automatic on a GPU, in which it happens.
  const std::optional<GraphTrial>& graph_trial() const { return graph_trial_; }
  /// What became known since the last call and a log should say: the trial's outcome; once, that a batch of a
  /// new shape runs piece by piece for a turn.
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }
  /// How the passes were launched; all zeros without a graph.
  StreamGraph::Stats graph_stats() const { return graph_ ? graph_->stats() : StreamGraph::Stats(); }
  ProcessMesh& mesh() const { return *mesh_; }
  /// The order in which this rank's last forward_backward ran.
  const std::vector<ExecutedAction>& executed() const { return executor_.executed(); }
  const EngineOptions& options() const { return options_; }
  /// Who is told what this rank does from now on (tessera/device/trace.hpp); null: nobody.
  void set_trace(const std::shared_ptr<Trace>& trace);
  /// Updates tried so far, skipped ones included.
  std::int64_t steps_done() const { return steps_done_; }
  std::int64_t steps_skipped() const { return steps_skipped_; }
  /// Continues a run: what a checkpoint recorded.
  void set_progress(std::int64_t steps_done, std::int64_t steps_skipped);
  /// Of dropout from the next call on. The same on every rank.
  void set_seed(std::uint64_t seed) { ctx_.seed = seed; }
  /// Samples of the calls since the last update, over all data ranks: they key the next call's dropout.
  std::int64_t accumulated_samples() const { return samples_this_step_; }
  void set_accumulated_samples(std::int64_t samples) { samples_this_step_ = samples; }

 private:
  struct Forwarded;
  std::unique_ptr<Stage> make_stage(const Batch& batch, LossPlan loss, StageOptions options);
  /// The model's own loss, extra ones included.
  LossPlan own_loss(const Batch& batch) const;
  Schedule schedule(int micro_batches, bool forward_only) const;
  void begin_call(int micro_batches);
  void run(Stage& stage, bool forward_only);
  void check_batch(const Batch& batch, bool needs_labels) const;
  /// The forward that backward() is for, with what it is given. Errors: as backward().
  Forwarded& forwarded_for(std::int64_t number, const Tensor& upstream) const;
  /// A checked batch that ranks have agreed on: agree_on() unless that was done before.
  Batch agreed(const Batch& batch, const char* call, bool needs_labels) const;
  void count_samples(const Batch& batch);
  Tensor outputs_of(Stage& stage, const Batch& batch, Output output) const;
  std::vector<AxisTraffic> traffic() const;
  std::vector<AxisTraffic> since(const std::vector<AxisTraffic>& before) const;
  /// Passes whose loss was not read yet.
  struct PassesUnderWay;
  PassesUnderWay launch_passes(const Batch& batch);
  void tell_of_new_shape(const std::string& shape);
  PassesUnderWay launch_once(const Batch& batch, StreamGraph* graph,
                             const std::function<void()>& before_launch = nullptr);
  PassesUnderWay try_graph(const Batch& batch);
  std::string why_not_graph(const Batch& batch, const std::vector<std::uint64_t>& expected);
  std::vector<std::uint64_t> result_of(const PassesUnderWay& passes) const;
  double sum_over_ranks(double value) const;
  std::vector<double> sum_over_ranks(std::vector<double> values) const;
  double read_loss(const PassesUnderWay& passes);
  /// Terms with what all ranks added up. Collective.
  std::vector<LossTerm> read_terms(std::vector<LossTerm> terms, const std::vector<HostCopy>& sums) const;
  void check_can_update() const;
  void forget_calls();
  void after_update();
  void launch_update();
  void settle_trained();
  /// The rate of the oldest update under way.
  double scheduled_lr() const { return lr_schedule_.at(optimizer_->updates()); }
  UpdateResult finish_update(double lr);
  struct StepUnderWay;

  ExecCtx ctx_;
  /// When all is gone but the context, what libraries keep for its stream goes.
  struct StreamEnd {
    const ExecCtx& ctx;
    ~StreamEnd();
  };
  StreamEnd stream_end_{ctx_};
  ExecCtx host_ = ExecCtx::cpu(1);  ///< of numbers that ranks tell each other
  EngineOptions options_;
  std::shared_ptr<ProcessMesh> mesh_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ParamStore> params_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule lr_schedule_;
  WeightDecaySchedule weight_decay_schedule_;
  PipelineExecutor executor_;
  std::unique_ptr<StreamGraph> graph_;  ///< of the passes; null where there will be none
  std::int64_t passes_launched_ = 0;
  std::vector<LossTerm> terms_;  ///< of the last loss that was read
  std::optional<GraphTrial> graph_trial_;
  bool told_of_new_shape_ = false;
  std::vector<std::string> notes_;
  std::map<std::int64_t, std::unique_ptr<Forwarded>> forwarded_;  ///< between forward() and backward()
  std::int64_t forwards_ = 0;
  std::map<std::string, std::string> frozen_;  ///< by set_frozen
  std::uint64_t frozen_hash_ = 0;
  bool frozen_changed_ = false;           ///< since the last update, on every rank alike
  std::map<std::int64_t, Tensor> calls_;  ///< open; undefined: its gradient is still in the buckets
  std::int64_t last_call_ = 0;
  std::vector<double> factors_;  ///< of the calls added since the last update, for agree_on_update()
  std::deque<std::unique_ptr<StepUnderWay>> steps_;
  std::int64_t steps_done_ = 0, steps_skipped_ = 0, skipped_in_a_row_ = 0;
  std::int64_t samples_this_step_ = 0;  ///< of earlier calls, over all data ranks: keys dropout of later ones
};

/// The batch as device tensors, rows position-major.
MicroBatch to_micro_batch(const ExecCtx& ctx, const Batch& batch);

}  // namespace tessera
