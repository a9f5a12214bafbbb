#include "tessera/engine/trainer.hpp"

#include <algorithm>
#include <deque>
#include <fstream>

#include "engine/bytes_text.hpp"
#include "engine/peak_flops.hpp"
#include "engine/profiler.hpp"
#include "engine/ranks.hpp"
#include "engine/resume.hpp"
#include "engine/run_data.hpp"
#include "engine/run_folder.hpp"
#include "engine/throughput.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/comm/nccl.hpp"
#include "tessera/data/loader.hpp"
#include "tessera/engine/background_save.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/run_facts.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/watchdog.hpp"

namespace tessera {
namespace {

/// One training run on one rank, from the opened folder to the last checkpoint.
class TrainingRun {
 public:
  TrainingRun(const Config& config, RunTokenizer tokenizer, const TrainHooks& hooks, const Logger& log,
              std::shared_ptr<Communicator> world, const TrainOptions& options)
      : config_(config),
        tokenizer_(std::move(tokenizer)),
        hooks_(hooks),
        log_(log),
        world_(std::move(world)),
        first_(world_->rank() == 0) {
    const std::string found = choose_checkpoint(options.restarted);
    on_every_rank(host_, *world_,
                  [&] { engine_ = build_engine(config, true, world_, {}, options.gemm_tables); });
    tell_notes();
    const int queues = world_->options().cuda_connections;
    if (const std::string note = note_on_connections(queues, engine_->mesh().shape());
        !engine_->ctx().device().is_cpu() && !note.empty() && first_)
      log_.warning(note);
    start_from(found);
    open_all_data(found);
    choose_saving();
    on_every_rank(host_, *world_, [&] {
      if (!first_) return;
      folder_->check_still_ours();
      metrics_ = folder_->open_metrics(state_.step, found);
    });
  }

  TrainResult train() {
    result_.step = state_.step;
    if (state_.step >= config_.training.steps) return result_;
    announce();
    DataLoader loader(data_.train, loader_options(state_.consumed_samples));
    finished_s_ = now_s();
    while (engine_->progress().steps < config_.training.steps && !result_.interrupted) {
      if (profiler_) profiler_->before_step(engine_->progress().steps + 1);
      launch_step(loader);
      tell_notes();
      const std::int64_t step = engine_->progress().steps;
      const bool last = step == config_.training.steps;
      const bool save_due = config_.checkpoint.every > 0 && step % config_.checkpoint.every == 0;
      // A device that works on its own runs a step while the next one is launched, unless something is due
      // after it.
      const bool ahead = engine_->ctx().stream->is_asynchronous() && !last && !save_due &&
                         !evaluation_due(step) && !(profiler_ && profiler_->is_edge(step));
      finish_steps(ahead ? 1 : 0);
      if (result_.interrupted) finish_steps(0);
      if (profiler_) report_profile(step);
      const bool save_now = result_.interrupted && (result_.preempted || config_.checkpoint.on_interrupt);
      if (last || save_due || save_now) {
        save(last || save_now);
      } else {
        take_saved();
      }
    }
    finish_saving();
    result_.step = state_.step;
    return result_;
  }

 private:
  void tell_notes() {
    for (const EngineNote& note : engine_->take_notes()) {
      if (!first_) continue;
      if (note.warning) {
        log_.warning(note.text);
      } else {
        log_.info(note.text);
      }
    }
  }

  /// Opens the run's folder. Returns the checkpoint to go on from, or nothing.
  std::string choose_checkpoint(bool restarted) {
    const std::string offered = on_first_rank(host_, *world_, [&] {
      folder_.emplace(config_, log_,
                      RunFolderOptions{.restarted = restarted, .on_wait = heartbeat_of(*world_)});
      return join_paths(folder_->checkpoints_to_try());
    });
    const WholeCheckpoint found = first_whole(split_paths(offered), *world_);
    return on_first_rank(host_, *world_, [&] {
      folder_->settle(found);
      if (!found.dir) {
        check_weights();
        return std::string();
      }
      const RunState saved = read_run_state(CheckpointReader(*found.dir));
      folder_->check_same_run(saved.config, *found.dir);
      check_same_tokenizer(saved, config_, tokenizer_, *found.dir);
      return found.dir->string();
    });
  }

  /// Before they are read, where the data's tokenizer is known by then.
  void check_weights() const {
    if (config_.model.init_from && tokenizer_.record)
      check_weights_tokenizer(config_, *tokenizer_.record, log_);
  }

  void start_from(const std::string& checkpoint) {
    state_.config = config_;
    if (!checkpoint.empty()) {
      state_ = resume_engine(checkpoint, *engine_);
      state_.config = config_;
      result_.checkpoint = checkpoint;
      log_.info("resuming from ", checkpoint, " at step ", state_.step);
    } else if (config_.model.init_from) {
      const WeightFit fit = load_pretrained(*config_.model.init_from, config_.model, *engine_);
      const bool all = fit.drawn.empty() && fit.dropped.empty();
      log_.info("starting from the weights in ", *config_.model.init_from, all ? "" : "; ",
                all ? "" : fit.text());
    }
    on_every_rank(host_, *world_, [&] {
      if (!first_) return;
      folder_->check_still_ours();
      folder_->write_config();
      state_.run = folder_->run();
    });
  }

  /// One rank builds what indices are missing, the others read them. A disk that hangs is a call that hangs.
  void open_all_data(const std::string& resumed) {
    const FlightCall open(world_->flight(), "opening the data");
    on_first_rank(host_, *world_, [&] {
      const bool known = tokenizer_.record.has_value();
      check_run_data(config_, tokenizer_, log_, heartbeat_of(*world_));
      if (!known && resumed.empty()) check_weights();
      state_.tokenizer = tokenizer_.record;
      return open_data();
    });
    on_every_rank(host_, *world_, [&] {
      if (!first_) open_data();
    });
  }

  std::string open_data() {
    data_ = open_run_data(config_, tokenizer_, heartbeat_of(*world_));
    for (const std::string& warning : data_.warnings) log_.warning(warning);
    const bool apart = config_.data.names_splits();
    TESSERA_ENSURE(DataError, data_.train,
                   apart ? "data.train_path has" : "data.split " + config_.data.split + " leaves",
                   " no tokens for training");
    if (config_.training.eval_interval > 0 && !data_.valid) {
      log_.warning(apart ? "data.valid_path has" : "data.split " + config_.data.split + " leaves",
                   " no tokens for validation: nothing is evaluated");
    }
    return "";
  }

  DataLoaderOptions loader_options(std::int64_t consumed_samples) const {
    return {.global_batch_size = config_.training.global_batch_size,
            .micro_batch_size = config_.training.micro_batch_size,
            .data_parallel_rank = engine_->mesh().coordinates().dp,
            .data_parallel_size = engine_->mesh().shape().dp,
            .consumed_samples = consumed_samples,
            // Less than the others wait for this rank, so that they hear why it does not come.
            .timeout_s = 0.9 * config_.parallel.timeout_s};
  }

  void announce() {
    const TrainingConfig& t = config_.training;
    if (t.seq_length > config_.model.max_positions && first_) {
      log_.warning("training.seq_length ", t.seq_length, " is more than model.max_positions ",
                   config_.model.max_positions,
                   ": positions beyond are computed, but the model may know none of them");
    }
    RunInfo info{.parameters = parameter_count(config_.model),
                 .steps = t.steps,
                 .first_step = state_.step,
                 .tokens_per_step = t.global_batch_size * sample_lengths(config_).tokens,
                 .threads = engine_->ctx().stream->threads(),
                 .ranks = world_->size(),
                 .gemm_flops_per_s = std::nullopt};
    const double rate = measure_gemm_rate(engine_->ctx(), engine_->options().compute);
    rates_ = agree_on_rates(*world_, engine_->ctx(), engine_->options().compute, config_.logging, rate);
    info.gemm_flops_per_s = rates_.measured;
    const std::vector<std::int64_t>& window = config_.logging.profile;
    if (!window.empty() && state_.step + 1 < window[1]) profiler_.emplace(config_, *engine_, *world_, rate);
    if (first_) say_what_runs();
    if (first_ && hooks_.on_start) hooks_.on_start(info);
    if (data_.valid && t.eval_interval > 0)
      log_.info("each evaluation reads the same ", t.eval_iters, " batches of the validation split");
  }

  void say_what_runs() const {
    for (const std::string& line : model_lines(config_)) log_.info(line);
    for (const std::string& line : training_lines(config_, engine_->mesh().shape().dp)) log_.info(line);
    rates_.peak ? log_.info(rates_.note) : log_.warning(rates_.note);
  }

  /// A step that runs, and the state of the run after it.
  struct Launched {
    std::int64_t step = 0, consumed_samples = 0;
    double begin_s = 0, data_s = 0;
  };

  void launch_step(DataLoader& loader) {
    Launched launched{.begin_s = now_s()};
    const auto batch = next_batch(loader);
    TESSERA_ENSURE(DataError, batch, "the training data ended at step ", engine_->progress().steps, " of ",
                   config_.training.steps);
    launched.data_s = now_s() - launched.begin_s;
    {
      const TraceSpan span(*engine_->ctx().stream, [&] {
        return Work{WorkKind::scope, "launch step " + std::to_string(engine_->progress().steps + 1)};
      });
      engine_->launch_step(*batch);
    }
    launched.step = engine_->progress().steps;
    launched.consumed_samples = loader.consumed_samples();
    launched_.push_back(launched);
  }

  std::optional<Batch> next_batch(DataLoader& loader) {
    const TraceSpan span(*engine_->ctx().stream, [] { return Work{WorkKind::data, "next batch"}; });
    return loader.next();
  }

  /// Takes the results of all steps but the last `remain`.
  void finish_steps(std::size_t remain) {
    while (launched_.size() > remain) {
      finish_step(launched_.front());
      launched_.pop_front();
    }
  }

  void finish_step(const Launched& launched) {
    const StepReport step = take_result(launched.step);
    // While another step was under way this one began when that ended.
    const double begin_s = std::max(launched.begin_s, finished_s_);
    finished_s_ = now_s();
    const double step_s = finished_s_ - begin_s;
    if (profiler_) profiler_->add_step({launched.step, begin_s, finished_s_});
    state_.step = launched.step;
    state_.skipped = engine_->progress().skipped;
    state_.consumed_samples = launched.consumed_samples;
    state_.tokens += step.tokens;
    if (step.update.skipped && first_) {
      log_.warning("step ", state_.step, " was skipped: loss ", step.loss, ", gradient norm ",
                   step.update.grad_norm);
    }
    StepRecord record{.step = state_.step,
                      .loss = step.loss,
                      .grad_norm = step.update.grad_norm,
                      .lr = step.update.lr,
                      .tokens = state_.tokens,
                      .tokens_per_s = static_cast<double>(step.tokens) / step_s,
                      .mfu = std::nullopt,
                      .mfu_of_measured = std::nullopt,
                      .step_ms = step_s * 1e3,
                      .data_ms = launched.data_s * 1e3,
                      .forward_ms = step.times.forward * 1e3,
                      .backward_ms = step.times.backward * 1e3,
                      .update_ms = step.times.update * 1e3,
                      .communication_share = 0,
                      .peak_mem_bytes = most_over_ranks(peak_memory_bytes(engine_->ctx())),
                      .skipped = state_.skipped,
                      .losses = {},
                      .loss_scale = std::nullopt,
                      .eval_loss = std::nullopt,
                      .eval_losses = {},
                      .bubble_ms = std::nullopt};
    record.losses = parts_of(step.terms);
    if (config_.training.precision == Precision::fp16) record.loss_scale = step.update.loss_scale;
    if (world_->size() > 1) {
      record.bubble_ms = step.times.bubble * 1e3;
      for (const AxisTraffic& t : step.traffic) {
        record.traffic.push_back({t.axis, static_cast<std::int64_t>(t.bytes_sent), t.wait_s * 1e3});
        if (t.axis != "pp") record.communication_share += t.wait_s / step_s;
      }
    }
    const double flops = record.tokens_per_s * engine_->model().flops_per_token(sample_lengths(config_));
    if (flops > 0.0 && rates_.peak) record.mfu = flops / *rates_.peak;
    if (flops > 0.0) record.mfu_of_measured = flops / rates_.measured;
    if (evaluation_due(state_.step)) {
      const std::vector<LossTerm> terms = evaluate();
      record.eval_loss = result_.eval_loss = total_of(terms);
      record.eval_losses = parts_of(terms);
    }
    result_.train_loss = step.loss;
    if (first_) report(record);
    if (hooks_.on_progress) hooks_.on_progress(state_.step);
    agree_to_stop();
  }

  /// One rank that was asked to stop stops all of them, after the same step.
  void agree_to_stop() {
    enum Asked : std::int64_t { nothing, interrupt, preempt };
    Asked own = hooks_.should_stop && hooks_.should_stop() ? interrupt : nothing;
    if (hooks_.should_preempt && hooks_.should_preempt()) own = preempt;
    const std::int64_t asked = most_over_ranks(own);
    if (asked != nothing) result_.interrupted = true;
    if (asked == preempt) result_.preempted = true;
  }

  StepReport take_result(std::int64_t step) {
    const TraceSpan span(*engine_->ctx().stream, [&] {
      return Work{WorkKind::scope, "finish step " + std::to_string(step)};
    });
    return engine_->finish_step();
  }

  void report_profile(std::int64_t step) {
    const std::optional<std::string> table = profiler_->after_step(step, result_.interrupted);
    if (table && first_ && hooks_.on_profile) hooks_.on_profile(*table);
  }

  bool evaluation_due(std::int64_t step) const {
    const TrainingConfig& t = config_.training;
    return data_.valid && t.eval_interval > 0 && (step % t.eval_interval == 0 || step == t.steps);
  }

  void report(const StepRecord& record) {
    folder_->refuse_if_seen_lost();
    {
      const FlightCall open(world_->flight(), "writing metrics.jsonl");
      metrics_->write(record);
    }
    if (hooks_.on_step) hooks_.on_step(record);
    if (record.eval_loss && hooks_.on_evaluation) hooks_.on_evaluation(record);
  }

  std::int64_t most_over_ranks(std::int64_t value) const {
    if (world_->size() == 1) return value;
    const Tensor most = Tensor::from(host_, std::vector<std::int64_t>{value}, {1});
    world_->all_reduce(host_, most, ReduceOp::max).wait(host_);
    return most.to_vector<std::int64_t>()[0];
  }

  /// The losses of a model with several.
  static std::vector<std::pair<std::string, double>> parts_of(const std::vector<LossTerm>& terms) {
    std::vector<std::pair<std::string, double>> parts;
    for (const LossTerm& term : terms) parts.emplace_back(term.name, term.mean());
    if (parts.size() == 1) parts.clear();
    return parts;
  }

  /// Losses over the same eval_iters batches every time, so that figures of one run compare: `announce`
  /// says so.
  std::vector<LossTerm> evaluate() {
    DataLoader loader(data_.valid, loader_options(0));
    std::vector<LossTerm> sums;
    for (std::int64_t i = 0; i < config_.training.eval_iters; ++i) {
      const auto batch = loader.next();
      if (!batch) break;
      const std::vector<LossTerm> terms = engine_->evaluate_terms(*batch);
      if (sums.empty()) {
        sums = terms;
        continue;
      }
      for (std::size_t t = 0; t < terms.size(); ++t) {
        sums[t].sum += terms[t].sum;
        sums[t].count += terms[t].count;
      }
    }
    TESSERA_ENSURE(DataError, !sums.empty() && sums[0].count > 0,
                   "the validation split holds less than one batch of ", config_.training.global_batch_size,
                   " samples: widen its share in data.split");
    return sums;
  }

  /// Whether checkpoints are written while training goes on; says so. Errors: ConfigError if they must be and
  /// a host has not the memory.
  void choose_saving() {
    constexpr std::int64_t kWorthwhile = 64'000'000;
    if (config_.checkpoint.async == AutoSwitch::off) return;
    const bool asked = config_.checkpoint.async == AutoSwitch::on;
    const BackgroundRoom room = background_room(*engine_);
    if (!asked && room.largest_bytes < kWorthwhile) return;
    const std::string need =
        detail::concat(bytes_text(room.needed_bytes), " of memory on ", room.host, " for a copy, of ",
                       bytes_text(room.free_bytes), " that are free");
    TESSERA_ENSURE(ConfigError, room.fits || !asked, "checkpoint.async: true needs ", need,
                   ", and more than half is not taken; set it to auto or false");
    if (first_ && room.fits) log_.info("checkpoints are written in the background: ", need);
    if (first_ && !room.fits)
      log_.info("training waits for its checkpoints: in the background they need ", need);
    if (room.fits) staging_.emplace();
  }

  SaveOptions save_options() {
    SaveOptions options;
    options.keep = static_cast<int>(config_.checkpoint.keep);
    // Before the folder gets its name, and before `latest` and older checkpoints are touched.
    options.on_phase = [this](SavePhase phase) {
      if (first_ && (phase == SavePhase::manifest_written || phase == SavePhase::published))
        folder_->check_still_ours();
    };
    return options;
  }

  /// At most one is written at a time: the one before comes to its end first. `at_end`: nothing is trained
  /// meanwhile.
  void save(bool at_end) {
    finish_saving();
    const double begin_s = now_s();
    on_every_rank(host_, *world_, [&] {
      if (!first_) return;
      folder_->check_still_ours();
      metrics_->sync();
    });
    if (staging_ && !at_end) {
      saving_.emplace(checkpoint_root(config_), *engine_, state_, save_options(), StateParts{}, *staging_);
      if (hooks_.on_saved) hooks_.on_saved(state_.step, now_s() - begin_s);
      return;
    }
    result_.checkpoint = save_engine(checkpoint_root(config_), *engine_, state_, save_options());
    if (hooks_.on_saved) hooks_.on_saved(state_.step, now_s() - begin_s);
    if (first_ && hooks_.on_checkpoint) hooks_.on_checkpoint(*result_.checkpoint);
  }

  /// Tells of a checkpoint that is in place by now, or fails as it has.
  void take_saved() {
    if (saving_ && most_over_ranks(first_ && saving_->settled() ? 1 : 0) > 0) finish_saving();
  }

  void finish_saving() {
    if (!saving_) return;
    result_.checkpoint = saving_->wait();
    saving_.reset();
    if (first_ && hooks_.on_checkpoint) hooks_.on_checkpoint(*result_.checkpoint);
  }

  const Config& config_;
  RunTokenizer tokenizer_;
  const TrainHooks& hooks_;
  const Logger& log_;
  const ExecCtx host_ = ExecCtx::cpu(1);
  std::shared_ptr<Communicator> world_;
  bool first_;
  std::optional<RunFolder> folder_;  // on rank 0
  std::unique_ptr<Engine> engine_;
  RunState state_;
  TrainResult result_;
  DatasetSplits data_;
  std::unique_ptr<MetricsFile> metrics_;  // on rank 0
  FlopRates rates_;
  std::optional<Profiler> profiler_;  // logging.profile
  std::deque<Launched> launched_;
  double finished_s_ = 0;                 // when the last result was taken
  std::optional<StagingMemory> staging_;  // where checkpoints are written in the background
  std::optional<BackgroundSave> saving_;
};

}  // namespace

TrainResult train(const Config& config, const TrainHooks& hooks, const Logger& log,
                  std::shared_ptr<Communicator> world, const TrainOptions& options) {
  refuse_without_data(config.model, "tessera train");
  if (!world) world = make_self_communicator("world");
  const Watchdog watchdog(world, {.timeout_s = config.parallel.timeout_s,
                                  .folder = std::filesystem::path(config.logging.dir) / "flight",
                                  .on_hang = hooks.on_hang,
                                  .dump_asked = hooks.dump_asked,
                                  .on_dump = hooks.on_dump});
  try {
    Config named = config;
    read_data_lists(named);
    agree_on_config(named, *world);
    Config settled = settle_recompute(named, world, log);
    const RunTokenizer tokenizer = tokenizer_of_run(settled, log);
    settled.data.tokenizer = tokenizer.name;
    return TrainingRun(settled, tokenizer, hooks, log, world, options).train();
  } catch (const CommunicationError&) {
    throw;  // the others know, or are the reason
  } catch (const std::exception& error) {
    world->abort(error.what());
    throw;
  }
}

std::filesystem::path checkpoint_root(const Config& config) {
  if (config.checkpoint.dir) return *config.checkpoint.dir;
  return std::filesystem::path(config.logging.dir) / "checkpoints";
}

}  // namespace tessera
