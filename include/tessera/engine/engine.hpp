#pragma once
/// One training step, and the parts it is made of.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/config_optimizer.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/engine/agreement.hpp"
#include "tessera/engine/loss_term.hpp"
#include "tessera/engine/open_calls.hpp"
#include "tessera/engine/step_graph.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/optim/param_store.hpp"
#include "tessera/optim/schedule.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {

struct Config;
class HostCopy;
class LossPlan;
class ShardFlow;
class Stage;
struct StageOptions;

/// How an engine takes part in a job of several ranks.
struct EngineLayout {
  std::shared_ptr<ProcessMesh> mesh;  ///< null = alone
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;  ///< pieces of the model per pipeline stage
  int zero_stage = 1;
  int zero_group = 0;                                 ///< data ranks that share out together; 0 = all
  ZeroReshard zero_reshard = ZeroReshard::automatic;  ///< stage 3
  ContextMethod context_method = ContextMethod::automatic;
  DType gradient_dtype = DType::f32;  ///< StoreGroups::sent
  std::int64_t bucket_elements = 0;   ///< see ParamStoreOptions
};

struct EngineOptions {
  OptimizerConfig optimizer = {};  ///< split_main_weights only where `compute` is bf16
  OffloadConfig offload = {};
  LrScheduleConfig lr_schedule = {};
  std::int64_t steps = 1000;          ///< length of the run: where the learning rate ends
  std::int64_t micro_batch_size = 0;  ///< samples computed at once; 0 = the whole batch
  std::int64_t micro_batches = 0;     ///< cut every batch into so many parts instead, as even as possible
  DType compute = DType::f32;         ///< dtype of weights and activations
  LossScale loss_scale = {};
  std::int64_t max_skipped_steps = 20;  ///< non-finite steps in a row before update() gives up
  bool trainable = true;  ///< false: no gradients, no optimizer state; forward and evaluate only
  AutoSwitch cuda_graph = AutoSwitch::off;  ///< CUDA: whether the passes of a step are launched as one graph
  EngineLayout layout = {};
  ParamGroups groups = {};  ///< none: ParamGroups::by_decay

  /// The options a configuration asks for.
  static EngineOptions from(const Config& config);
};

/// Seconds of the parts of a step, measured where the work runs.
struct StepTimes {
  double forward = 0, backward = 0, update = 0;
  double bubble = 0;  ///< waiting for other stages of the pipeline
};

/// What one step sent and waited for along one axis ("tp", "tp_block" where key-value heads have copies,
/// "dp", "ep", "edp", "pp", "embedding", "world").
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
  /// The order in which this rank's passes ran.
  std::vector<ExecutedAction> executed;
};

/// Where a run is: what a checkpoint records of an engine, the same on every rank.
struct EngineProgress {
  std::int64_t steps = 0;    ///< updates tried, skipped ones included; keys dropout
  std::int64_t skipped = 0;  ///< of these
  /// Of calls since the last update, over all data ranks; keys the next call's dropout.
  std::int64_t samples = 0;
  std::uint64_t seed = 0;  ///< of dropout
};

/// What became known and a log should say.
struct EngineNote {
  std::string text;
  bool warning = false;
};

/// One rank's part of training. With several ranks every one calls the same members in the same order, each
/// with the batch of its data rank: ranks that differ in other axes give the same batch. Losses are those of
/// the whole batch over all data ranks, and every rank gets them. Members that take a batch begin with
/// agree(): ranks that call something else, hold another batch than their peers, or cannot use theirs are
/// an error on every rank.
class Engine {
 public:
  /// Gives the model's parameters memory and first values (keyed by ctx.seed). `model` holds this rank's
  /// pieces.
  Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx);
  ~Engine();

  /// `call` with the facts of this engine, for agree() and take_batch() of agreement.hpp: step, what is
  /// frozen and, of a batch, what is wrong with this rank's. Errors, of one rank: what is wrong with the
  /// batch.
  BatchCall about(BatchCall call, const Batch* batch = nullptr, bool needs_labels = false) const;

  /// forward_backward, then update.
  StepReport step(const Batch& batch);
  /// The same in two halves: on a GPU launch_step() returns while the step runs, so that the next one can be
  /// launched before finish_step() waits for the result of the oldest. Nothing in a step waits for the GPU.
  void launch_step(const Batch& batch);
  StepReport finish_step();

  /// Adds the gradient of `factor` times the batch's loss (the mean over its target tokens, and the model's
  /// extra losses times their weights) to the gradient;
  /// returns that loss. Any number of calls may precede update(). A data rank may have no samples
  /// (batch.batch 0) while others do. Errors: InvalidArgument or DataError for a batch that does not fit the
  /// model.
  double forward_backward(const Batch& batch, double factor = 1.0);

  /// forward_backward for a factor that is known later: OpenCall::add().
  OpenCall open_call(const Batch& batch);

  /// sample_logits: of a head for whole samples beside that for tokens. Where the model has no other
  /// (Model::reads_whole_samples), all outputs are of samples.
  enum class Output { logits, token_losses, sample_logits };
  /// A loss of the caller's: gets micro-batch and output, fp32 [samples.count, seq, vocab] or
  /// [samples.count, seq] (0 where the label is ignored), and returns the gradient of the micro-batch's loss
  /// by it. Called on every rank with the head.
  using LossFunction = std::function<Tensor(int micro_batch, const Part& samples, const Tensor& output)>;
  /// The same with such a loss, averaged over micro-batches and data ranks, each by its number of samples. It
  /// is asked within the pipeline's schedule, so no more is kept than with the model's own loss.
  OpenCall open_call(const Batch& batch, Output output, const LossFunction& loss);

  /// Computes the batch in training mode and keeps its tapes for OpenForward::backward(); several may be
  /// kept. Not `recorded`: dropout is off, and nothing is kept but the output. Of samples' logits beside
  /// those of tokens it is the first of two calls: both compute the same samples, with the same dropout.
  OpenForward forward(const Batch& batch, Output output, bool recorded = true);
  /// Drops all tapes of forward() and every gradient since the last update.
  void discard();

  /// What is frozen from the next call on besides parameters of frozen groups: Tessera's names (those of
  /// other stages too), each with the caller's own, for messages. Finished calls keep the gradients they
  /// gave, and the next update acts on what they trained; open calls and tapes of forward() are dropped.
  /// Local; the next call throws InvalidArgument on every rank unless all have been given the same. No step
  /// is under way.
  void set_frozen(std::map<std::string, std::string> names);

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
  /// How the passes are launched: EngineOptions::cuda_graph.
  const StepGraph& graph() const { return graph_; }
  /// Since the last call: files the backend could not read and fast ways that were refused, as warnings; what
  /// graph() found out.
  std::vector<EngineNote> take_notes();
  ProcessMesh& mesh() const { return *mesh_; }
  const EngineOptions& options() const { return options_; }
  /// Who is told what this rank does from now on (tessera/device/trace.hpp); null: nobody.
  void set_trace(const std::shared_ptr<Trace>& trace);
  /// To be written to where a run is continued.
  EngineProgress& progress() { return progress_; }
  const EngineProgress& progress() const { return progress_; }

 private:
  friend class OpenCall;
  friend class OpenForward;
  std::unique_ptr<Stage> make_stage(const Batch& batch, LossPlan loss, StageOptions options);
  /// The model's own loss, extra ones included.
  LossPlan own_loss(const Batch& batch) const;
  Schedule schedule(int micro_batches, bool forward_only) const;
  void begin_call(int micro_batches);
  void run(Stage& stage, bool forward_only);
  void run(Stage& stage, const Schedule& schedule);
  friend class DryRank;
  void check_batch(const Batch& batch, bool needs_labels) const;
  OpenCall opened(double loss);
  void add(OpenCall::State& call, double factor);
  void backward(OpenForward::State& forward, const Tensor& upstream);
  /// Of tapes for backward() with `upstream`. Errors: as OpenForward::backward.
  void check_upstream(const OpenForward::State& forward, const Tensor& upstream) const;
  /// A checked batch that ranks have agreed on; one whose global_targets are known was agreed on before.
  Batch agreed(const Batch& batch, const char* call, bool needs_labels) const;
  bool holds_head() const;
  ContextParallel context() const;
  void count_samples(const Batch& batch);
  Tensor outputs_of(Stage& stage, const Batch& batch, Output output) const;
  /// Passes whose loss was not read yet.
  struct PassesUnderWay;
  PassesUnderWay launch_passes(const Batch& batch);
  class PassesTurn;
  /// Why a graph of the passes is recorded for each call; empty if it need not be.
  std::string why_never_repeated() const;
  std::int64_t call_of_step(const Batch& batch) const;
  std::vector<std::uint64_t> result_of(const PassesUnderWay& passes) const;
  double read_loss(const PassesUnderWay& passes);
  /// Terms with what all ranks added up. Collective.
  std::vector<LossTerm> read_terms(std::vector<LossTerm> terms, const std::vector<HostCopy>& sums) const;
  void check_can_update() const;
  void forget_calls();
  void after_update();
  void launch_update();
  void settle_trained();
  /// The rate of the oldest update in flight.
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
  std::unique_ptr<ShardFlow> flow_;  ///< null where gradients are whole
  StepGraph graph_;
  std::vector<LossTerm> terms_;                ///< of the last loss that was read
  std::map<std::string, std::string> frozen_;  ///< by set_frozen
  std::uint64_t frozen_hash_ = 0;
  bool frozen_changed_ = false;             ///< since the last update, on every rank alike
  std::vector<std::string> offload_notes_;  ///< not taken yet
  std::set<OpenCall::State*> open_calls_;
  std::set<OpenForward::State*> open_forwards_;
  std::int64_t forwards_ = 0;    ///< so far: ranks compare which one a backward is for
  std::vector<double> factors_;  ///< of the calls added since the last update, for agree_on_update()
  std::deque<std::unique_ptr<StepUnderWay>> steps_;
  EngineProgress progress_;
  std::int64_t skipped_in_a_row_ = 0;
};

/// All weights of this rank's pieces at hand until the result goes, for what is no pass of a call, such as
/// generation. Collective over the data ranks where these share weights out (ZeRO stage 3), else nothing.
inline WeightWalk::Hold hold_weights(Engine& engine) { return WeightWalk::Hold(engine.params().walk()); }

/// The batch as device tensors, rows position-major: all of it, or what a context rank holds. `counts`:
/// MicroBatch::counted is wanted.
MicroBatch to_micro_batch(const ExecCtx& ctx, const Batch& batch, const SequencePart& part = {},
                          bool counts = false);

/// What an engine of this model returns: [samples, seq_length, vocabulary], [samples, seq_length], or of
/// samples [samples, classes], [samples].
Shape output_shape(const Model& model, Engine::Output output, std::int64_t samples, std::int64_t seq_length);

}  // namespace tessera
