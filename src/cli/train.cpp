#include <unistd.h>

#include <csignal>
#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/progress.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/engine/trainer.hpp"

namespace tessera::cli {
namespace {

/// SIGINT and SIGTERM end the run after the step; a second one ends the process at once.
volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int signal_number) {
  if (stop_requested != 0) _exit(128 + signal_number);
  stop_requested = signal_number;
}

/// The handler gets a stack of its own: while oneDNN's sgemm runs, the stack pointer may point into the heap
/// (seen with 2.6.3), and a handler's frame there would overwrite other people's memory.
class StopSignals {
 public:
  StopSignals() : stack_(std::size_t{1} << 16) {
    stop_requested = 0;
    stack_t own{};
    own.ss_sp = stack_.data();
    own.ss_size = stack_.size();
    sigaltstack(&own, &old_stack_);
    struct sigaction action {};
    action.sa_handler = request_stop;
    action.sa_flags = SA_ONSTACK | SA_RESTART;
    sigaction(SIGINT, &action, &old_int_);
    sigaction(SIGTERM, &action, &old_term_);
  }
  ~StopSignals() {
    sigaction(SIGINT, &old_int_, nullptr);
    sigaction(SIGTERM, &old_term_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  std::vector<char> stack_;
  stack_t old_stack_{};
  struct sigaction old_int_ {
  }, old_term_{};
};

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
};

void run_train(const TrainArguments& arguments, Program& program) {
  Config config = load_config(arguments.config, arguments.overrides);
  if (config.device.threads == 0) config.device.threads = program.environment.threads.value_or(0);
  TESSERA_ENSURE(ConfigError, program.environment.world_size.value_or(1) == 1, "WORLD_SIZE is ",
                 program.environment.world_size.value_or(1),
                 ": this version trains in one process. Start it without a launcher");
  const StopSignals signals;
  Progress progress(config.logging.every, isatty(STDERR_FILENO) != 0);
  TrainHooks hooks;
  hooks.on_start = [&](const RunInfo& info) { progress.start(info); };
  hooks.on_step = [&](const StepRecord& record) { progress.step(record); };
  hooks.on_evaluation = [&](std::int64_t step, double loss) { progress.evaluation(step, loss); };
  hooks.on_checkpoint = [&](const std::filesystem::path& path) { progress.note("saved " + path.string()); };
  hooks.should_stop = [] { return stop_requested != 0; };
  const TrainResult result = train(config, hooks, program.log);
  progress.finish();
  if (result.interrupted) {
    std::cerr << "interrupted after step " << result.step
              << (result.checkpoint ? "; the last checkpoint is " + result.checkpoint->string()
                                    : "; nothing was saved")
              << std::endl;
    program.exit_code = 128 + stop_requested;
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

}  // namespace

void add_train(CLI::App& app, Program& program) {
  auto* command =
      app.add_subcommand("train", "Train a model as a YAML file says; goes on where the run's folder ends");
  auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "configuration file (docs/configuration.md)")->required();
  command->add_option("overrides", arguments->overrides, "section.key=value, e.g. training.steps=100");
  command->callback([arguments, &program] { run_train(*arguments, program); });
}

}  // namespace tessera::cli
