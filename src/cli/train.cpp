#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/progress.hpp"
#include "cli/signal_handlers.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/trainer.hpp"
#include "tessera/engine/tune.hpp"
#include "tessera/engine/watchdog.hpp"
#include "tessera/launch/launch.hpp"
#include "tessera/launch/progress.hpp"
#include "tessera/launch/settings.hpp"
#include "tessera/launch/world.hpp"

namespace tessera::cli {
namespace {

/// What signals asked for. Ctrl-C, or a request to make room: both end the run after the step. SIGUSR2: a
/// dump of what this rank does; the watchdog's thread looks here.
std::atomic<bool> interrupt_requested = false, preemption_requested = false, dump_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void request_dump(int) { dump_requested = true; }

bool take_dump_request() { return dump_requested.exchange(false); }

void request_interrupt(int signal_number) {
  if (interrupt_requested || preemption_requested) _exit(exit_code::kSignal + signal_number);
  interrupt_requested = true;
}

/// A scheduler may send several of them, to the launcher and to each rank: only Ctrl-C ends a save.
void request_preemption(int) { preemption_requested = true; }

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  int max_restarts = 0;
};

/// Starts the processes a layout needs on this machine; each of them runs this command again.
void start_processes(const TrainArguments& arguments, const Config& config, std::int64_t processes,
                     Program& program) {
  LaunchProgram self;
  self.command = with_self({"tessera", "train", arguments.config}, program);
  self.command.insert(self.command.end(), arguments.overrides.begin(), arguments.overrides.end());
  self.environment = inherited_environment();
  self.python = program.environment.python.value_or("");
  LaunchOptions options = local_launch(static_cast<int>(processes), self,
                                       (std::filesystem::path(config.logging.dir) / "ranks").string());
  options.max_restarts = arguments.max_restarts;
  // Saving may take as long as ranks wait for each other; Ctrl-C, or a second one, ends it.
  options.first_save_s = config.parallel.timeout_s;
  if (config.checkpoint.on_interrupt) options.grace_s = std::max(options.grace_s, config.parallel.timeout_s);
  const LaunchResult result = launch(options, program.log);
  program.exit_code = result.exit_code;
  print_report(result);
}

void report(const TrainResult& result, const Config& config) {
  if (result.interrupted) {
    std::cerr << (result.preempted ? "preempted after step " : "interrupted after step ") << result.step
              << (result.checkpoint ? "; the last checkpoint is " + result.checkpoint->string()
                                    : "; nothing was saved")
              << std::endl;
  } else if (result.train_loss || result.eval_loss) {
    std::cout << "done: step " << result.step;
    if (result.train_loss) std::cout << ", loss " << *result.train_loss;
    if (result.eval_loss) std::cout << ", validation loss " << *result.eval_loss;
    std::cout << ", " << config.logging.dir << std::endl;
  } else {
    std::cout << "nothing to do: " << config.logging.dir << " has reached step " << result.step
              << " already (raise training.steps to go on)" << std::endl;
  }
}

/// CPU threads of this process: what is asked for, or this machine's cores shared out among its processes.
std::int64_t threads_of(const Config& config, const Environment& environment) {
  if (config.device.threads > 0) return config.device.threads;
  if (environment.threads) return *environment.threads;
  const std::int64_t local = environment.local_world_size.value_or(environment.world_size.value_or(1));
  if (local <= 1) return 0;
  return std::max<std::int64_t>(1, ExecCtx::cpu().stream->threads() / local);
}

void run_train(const TrainArguments& arguments, Program& program) {
  const Environment& environment = program.environment;
  Config config = load_run_config(arguments.config, arguments.overrides,
                                  environment.launched() ? Logger::silent() : program.log);
  check_no_decay(config);
  if (!environment.launched()) {
    const bool cuda = !device_of(config.device).is_cpu();
    const std::int64_t processes = processes_needed(config, cuda ? cuda_devices().count : 1);
    if (processes > 1) {
      resolve_layout(config, processes);
      check_run_folder(config);
      settle_recompute(config, processes);  // what fits nowhere is refused here
      return start_processes(arguments, config, processes, program);
    }
  }
  config.parallel = resolve_layout(config, environment.world_size.value_or(1));
  config.device.threads = threads_of(config, environment);
  if (!config.device.index) config.device.index = environment.local_rank.value_or(0);
  const std::string open = warning_of_open_world(environment);
  if (!open.empty() && environment.rank == 0) program.log.warning(open);
  const auto world = connect_world(environment, config.parallel.timeout_s);
  // Not before: who waits for a rank that a signal has ended already would wait for long.
  interrupt_requested = preemption_requested = false;
  SignalHandlers signals({{SIGINT, request_interrupt},
                          {SIGTERM, request_preemption},
                          {SIGUSR1, request_preemption},
                          {SIGUSR2, request_dump}});
  const bool first = world->rank() == 0;
  Progress progress(config.logging.every, isatty(STDERR_FILENO) != 0);
  TrainHooks hooks;
  hooks.on_start = [&](const RunInfo& info) { progress.start(info); };
  hooks.on_step = [&](const StepRecord& record) { progress.step(record); };
  hooks.on_evaluation = [&](const StepRecord& record) { progress.evaluation(record); };
  hooks.on_checkpoint = [&](const std::filesystem::path& path) { progress.note("saved " + path.string()); };
  hooks.on_profile = [&](const std::string& table) { progress.note("\n" + table); };
  hooks.should_stop = [] { return interrupt_requested.load(); };
  hooks.should_preempt = [] { return preemption_requested.load(); };
  hooks.on_hang = [](const std::string& message) { exit_code::end_hung("error: " + message); };
  hooks.on_dump = exit_code::say;
  hooks.dump_asked = take_dump_request;
  const ProgressReporter progress_of_job(environment);
  hooks.on_progress = [&](std::int64_t step) { progress_of_job.step(step); };
  hooks.on_saved = [&](std::int64_t step, double seconds) { progress_of_job.saved(step, seconds); };
  const bool restarted = environment.launched() && environment.restart > 0;
  const TrainResult result = train(config, hooks, first ? program.log : Logger::silent(), world,
                                   {.restarted = restarted, .gemm_tables = gemm_tables(program.environment)});
  if (result.interrupted) {
    program.exit_code = result.preempted ? exit_code::kPreempted : exit_code::kSignal + SIGINT;
  }
  if (environment.launched()) signals.ignore_late_ones();
  if (!first) return;
  progress.finish();
  report(result, config);
}

}  // namespace

void add_train(CLI::App& app, Program& program) {
  auto* command =
      app.add_subcommand("train", "Train a model as a YAML file says; goes on where the run's folder ends");
  auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "configuration file (docs/configuration.md)")->required();
  command->add_option("overrides", arguments->overrides, "section.key=value, e.g. training.steps=100");
  command->add_option(
      "--max_restarts,--max-restarts", arguments->max_restarts,
      "where the layout has several processes: start all again after a failure, so many times");
  command->callback([arguments, &program] { run_train(*arguments, program); });
}

}  // namespace tessera::cli
