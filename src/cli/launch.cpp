#include "tessera/launch/launch.hpp"

#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "base/suggest.hpp"
#include "cli/commands.hpp"
#include "launch/accelerate_flags.hpp"
#include "launch/environment.hpp"
#include "launch/host_secret.hpp"
#include "launch/hosts.hpp"
#include "launch/orders.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera::cli {
namespace {

struct LaunchArguments {
  LaunchSettings flags;
  launching::AccelerateFlags accelerate;
  std::string config_file;
  bool cpu = false, quiet = false, module = false, no_python = false, any_secret_mode = false;
  bool ordered = false;  ///< a launcher elsewhere has started this one and says what to do
};

/// A flag before the program that is none of ours.
[[noreturn]] void refuse_flag(const std::string& flag, const CLI::App& command) {
  const std::string foreign = launching::foreign_flag(flag);
  if (!foreign.empty()) throw ConfigError(foreign);
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw ConfigError("unknown flag '" + flag + "' before the program" + suggest(flag, known) +
                    " (flags after the program belong to it)");
}

/// The file with the settings under the flags: the one that is named ("none" for none), or the default one.
LaunchSettings read_file(const LaunchArguments& arguments, const LaunchProgram& program, const Logger& log) {
  if (arguments.config_file == "none") return {};
  if (!arguments.config_file.empty()) return read_launch_file(arguments.config_file);
  // As with Accelerate, the default file is for the machine with its GPUs.
  if (arguments.cpu) return {};
  const auto file = launching::default_launch_file(program.environment);
  if (!file) return {};
  log.info("settings from ", *file, " (--config_file none does without)");
  try {
    return read_launch_file(*file);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat(error.what(),
                                     "\n(the default file; name another with --config_file, or ",
                                     "give --config_file none)"));
  }
}

/// How many processes nobody has said, and GPUs that are not there.
void fit_to_machine(LaunchSettings& settings, const Logger& log) {
  const bool open = !settings.num_processes && settings.num_machines.value_or(1) == 1;
  if (settings.cpu.value_or(false) || !(open || expects_gpus(settings))) return;
  const CudaDevices devices = cuda_devices();
  if (expects_gpus(settings) && devices.count == 0) {
    log.warning("distributed_type ", *settings.distributed_type, " expects GPUs, and there are none here (",
                devices.why_none, "): the job runs on the CPU");
    settings.cpu = true;
  }
  if (open && devices.count > 1) {
    log.info("one process for each of the ", devices.count, " GPUs (--num_processes sets another number)");
    settings.num_processes = devices.count;
  }
}

/// Starts a launcher on each machine of the hostfile.
LaunchResult run_hosts(const LaunchSettings& settings, std::vector<launching::Host> hosts,
                       const LaunchProgram& what, const Program& program) {
  // What one of them would refuse is refused before any is started.
  LaunchSettings first = settings;
  first.machine_rank = 0;
  const LaunchOptions options = resolve_launch(first, what);
  launching::HostsJob job{
      std::move(hosts), settings,
      program.self,     std::filesystem::current_path().string(),
      what.environment, options.secret.empty() ? launching::random_secret() : options.secret};
  job.launcher.insert(job.launcher.end(), {"launch", "--ordered"});
  if (what.module) job.launcher.push_back("--module");
  if (what.no_python) job.launcher.push_back("--no_python");
  job.launcher.insert(job.launcher.end(), what.command.begin(), what.command.end());
  std::cout << std::flush;
  return launching::launch_on_hosts(job, program.log);
}

/// What only a hostfile gives a meaning to.
void check_hosts(const LaunchSettings& settings) {
  for (const auto& [name, value] : {std::pair{"include", settings.include}, {"exclude", settings.exclude}}) {
    TESSERA_ENSURE(ConfigError, !value || settings.hostfile, name,
                   " picks among the machines of a hostfile: give --hostfile");
  }
  const bool starts = settings.hostfile && !settings.machine_rank;
  TESSERA_ENSURE(
      ConfigError, starts || !(settings.ssh_port || settings.export_env),
      "ssh_port and export_env are for a hostfile's machines that are started from here: give --hostfile, "
      "without --machine_rank");
}

/// The settings that the launcher which started this one has sent, and what it wants this process to have.
LaunchSettings read_ordered(LaunchProgram& what) {
  LaunchSettings settings = launching::read_orders(STDIN_FILENO);
  // As if this process had them from the start: nobody has chosen them on this machine.
  launching::set_variables(what.environment, std::exchange(settings.environment, {}));
  return settings;
}

void run_launch(LaunchArguments arguments, const std::vector<std::string>& command, Program& program) {
  if (arguments.cpu) arguments.flags.cpu = true;
  if (arguments.quiet) arguments.flags.quiet = true;
  if (arguments.any_secret_mode) arguments.flags.allow_secret_mode = true;
  if (arguments.accelerate.multi_gpu && arguments.flags.num_processes.value_or(2) < 2) {
    throw ConfigError("--multi_gpu needs --num_processes of at least 2; for one process leave it out");
  }
  LaunchProgram what{arguments.module ? command : with_self(command, program), arguments.module,
                     inherited_environment(), program.environment.python.value_or(""), arguments.no_python};
  LaunchSettings settings =
      arguments.ordered ? read_ordered(what)
                        : overlay(read_file(arguments, what, program.log),
                                  overlay(launching::settings_of(arguments.accelerate), arguments.flags));
  check_hosts(settings);
  const bool elsewhere = settings.hostfile && !settings.machine_rank;
  std::vector<launching::Host> hosts;
  if (settings.hostfile) hosts = launching::resolve_hosts(settings);
  if (!elsewhere) fit_to_machine(settings, program.log);
  for (const std::string& warning : settings.warnings) program.log.warning(warning);
  if (elsewhere) {
    const LaunchResult result = run_hosts(settings, std::move(hosts), what, program);
    program.exit_code = result.exit_code;
    return print_report(result);
  }
  const LaunchOptions options = resolve_launch(settings, what);
  std::cout << std::flush;
  std::optional<launching::OrderedSignals> signals;
  if (arguments.ordered) signals.emplace(STDIN_FILENO);
  const LaunchResult result = launch(options, program.log);
  program.exit_code = result.exit_code;
  // Of launchers that were started from one place one is enough to say what all agree on.
  if (!arguments.ordered || options.machine_rank == 0 || !result.shared) print_report(result);
}

/// Accelerate takes its flags with '_' or '-'.
std::string both(const std::string& name) {
  std::string dashes = name;
  for (char& c : dashes) c = c == '_' ? '-' : c;
  return dashes == name ? "--" + name : "--" + name + ",--" + dashes;
}

}  // namespace

void print_report(const LaunchResult& result) {
  if (result.report.empty()) return;
  std::cerr << (result.exit_code == exit_code::kPreempted ? "" : "error: ") << result.report << std::endl;
}

std::vector<std::string> with_self(std::vector<std::string> command, const Program& program) {
  if (command.empty() || command.front() != "tessera") return command;
  command.erase(command.begin());
  command.insert(command.begin(), program.self.begin(), program.self.end());
  return command;
}

std::vector<std::string> inherited_environment() {
  std::vector<std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) variables.emplace_back(*entry);
  return variables;
}

namespace {

void add_accelerate_flags(CLI::App& command, launching::AccelerateFlags& flags) {
  const auto add = [&command](const std::string& name, auto& value, const std::string& text) {
    return command.add_option(both(name), value, text)->group("As in `accelerate launch`");
  };
  const auto add_switch = [&command](const std::string& name, bool& value, const std::string& text) {
    command.add_flag(both(name), value, text)->group("As in `accelerate launch`");
  };
  add_switch("multi_gpu", flags.multi_gpu, "plain data parallelism over GPUs");
  add_switch("use_megatron_lm", flags.use_megatron_lm, "tensor, pipeline and data parallelism");
  add_switch("use_deepspeed", flags.use_deepspeed,
             "data ranks share out state, gradients or weights, as zero_stage says");
  add("mixed_precision", flags.mixed_precision, "no, fp16 or bf16");
  add("gpu_ids", flags.gpu_ids, "GPUs of this machine, separated by commas, or all");
  add("gradient_accumulation_steps", flags.gradient_accumulation_steps, "calls of the model per update");
  add_switch("debug", flags.debug, "check collective operations while running");
  add_switch("enable_cpu_affinity", flags.enable_cpu_affinity, "each process keeps to its own cores");
  add_switch("same_network", flags.same_network, "accepted: launchers meet at main_process_ip anyway");
  add("rdzv_backend", flags.rdzv_backend, "static; c10d is the same here");
  add("rdzv_conf", flags.rdzv_conf, "timeout=SECONDS: as join_timeout_s");
  add("role", flags.role, "without effect");
  command.add_option("-t,--tee", flags.tee, "without effect")->group("As in `accelerate launch`");
  add("monitor_interval", flags.monitor_interval, "without effect");
  add("dynamo_backend", flags.dynamo_backend, "no; others are left out");
  add("dynamo_mode", flags.dynamo_mode, "without effect");
  add_switch("dynamo_use_fullgraph", flags.dynamo_use_fullgraph, "without effect");
  add_switch("dynamo_use_dynamic", flags.dynamo_use_dynamic, "without effect");
  add_switch("dynamo_use_regional_compilation", flags.dynamo_use_regional_compilation, "without effect");
  const auto add_keys = [&add](std::span<const launching::ScriptKey> keys, auto& values) {
    for (std::size_t i = 0; i < keys.size(); ++i)
      add(std::string(keys[i].name), values[i], std::string(keys[i].help));
  };
  add_keys(launching::deepspeed_keys(), flags.deepspeed);
  add("deepspeed_multinode_launcher", flags.deepspeed_multinode_launcher,
      "machines of a hostfile are reached over ssh, whatever it is");
  add_keys(launching::megatron_keys(), flags.megatron);
}

}  // namespace

void add_launch(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "launch",
      "Start a program as several processes that train together: launch [flags] PROGRAM|SCRIPT.py [args]");
  command->prefix_command();
  auto arguments = std::make_shared<LaunchArguments>();
  LaunchSettings& flags = arguments->flags;
  const auto add = [command](const std::string& name, auto& value, const std::string& text) {
    command->add_option(both(name), value, text);
  };
  add("num_processes", flags.num_processes, "processes on all machines together (1)");
  add("num_machines", flags.num_machines, "machines, each with a launcher of its own (1)");
  add("machine_rank", flags.machine_rank, "which of them this is, from 0");
  add("main_process_ip", flags.main_process_ip, "address of machine 0 that all can reach");
  add("main_process_port", flags.main_process_port,
      "port there; 0 = a free one, for one machine (29500 for several)");
  command->add_option(
      "-H,--hostfile,--deepspeed_hostfile,--deepspeed-hostfile", flags.hostfile,
      "file with a line 'NAME slots=N' for each machine: all are started from here, over ssh");
  command->add_option("-i,--include,--deepspeed_inclusion_filter,--deepspeed-inclusion-filter", flags.include,
                      "of the hostfile only NAME[:SLOT,SLOT...], several joined by '@'");
  command->add_option("-e,--exclude,--deepspeed_exclusion_filter,--deepspeed-exclusion-filter", flags.exclude,
                      "of the hostfile all but NAME[:SLOT,SLOT...], several joined by '@'");
  add("ssh_port", flags.ssh_port, "port of ssh on the hostfile's machines (ssh's own choice)");
  add("export_env", flags.export_env,
      "variables, joined by commas, that the hostfile's machines get from here");
  command->add_flag("--ordered", arguments->ordered)->group("");
  add("max_restarts", flags.max_restarts, "after a failure start everything again, so many times (0)");
  add("restart_delay_s", flags.restart_delay_s,
      "seconds before the first restart; doubled before each further one, 60 at most (1)");
  add("log_dir", flags.log_dir, "folder for what each rank writes: rank-0.log, rank-1.log, ...");
  add("threads_per_process", flags.threads_per_process, "CPU threads per process (the cores shared out)");
  add("num_cpu_threads_per_process", flags.threads_per_process, "the same");
  add("grace_s", flags.grace_s,
      "seconds to end in after SIGINT or SIGTERM before the kill, besides a step and a save (15)");
  add("join_timeout_s", flags.join_timeout_s,
      "seconds to wait for the launchers of the other machines (300)");
  add("secret_file", flags.secret_file, "file with the text that all machines of the job share");
  add("config_file", arguments->config_file,
      "YAML or JSON file of `tessera config` or `accelerate config`, or one with a section 'launch'; none = "
      "not even the default one");
  add_accelerate_flags(*command, arguments->accelerate);
  command->add_flag(both("allow_secret_mode"), arguments->any_secret_mode,
                    "take a secret_file that others can read (a mounted Kubernetes secret)");
  command->add_flag("--cpu", arguments->cpu, "use no GPU");
  command->add_flag("-q,--quiet", arguments->quiet, "show the output of rank 0 only, as it comes");
  command->add_flag("-m,--module", arguments->module, "PROGRAM is a Python module, as in python -m");
  command->add_flag(both("no_python"), arguments->no_python, "execute SCRIPT.py itself, as any program");
  command->callback([arguments, command, &program] {
    const std::vector<std::string> words = command->remaining();
    if (!words.empty() && words.front().starts_with('-')) refuse_flag(words.front(), *command);
    run_launch(*arguments, words, program);
  });
}

void add_test(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "test", "Launch a short training on the configured processes and print what works (Python)");
  auto arguments = std::make_shared<LaunchArguments>();
  arguments->module = true;
  command->add_option(both("config_file"), arguments->config_file, "as of `tessera launch`");
  command->add_option(both("num_processes"), arguments->flags.num_processes, "as of `tessera launch`");
  command->add_flag("--cpu", arguments->cpu, "use no GPU");
  command->callback([arguments, &program] {
    arguments->quiet = true;
    run_launch(*arguments, {"tessera.commands.sanity"}, program);
    if (program.exit_code == 0) std::cout << "Everything works." << std::endl;
  });
}

}  // namespace tessera::cli
