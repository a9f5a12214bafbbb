#include "tessera/launch/settings.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <span>

#include "launch/accelerate_keys.hpp"
#include "launch/command.hpp"
#include "launch/environment.hpp"
#include "launch/settings_fields.hpp"

namespace tessera {
namespace {

using launching::set_variable;
using launching::value_of;

constexpr std::int64_t kMostProcesses = 1 << 20;
constexpr std::size_t kShortestSecret = 16;
constexpr std::uint16_t kUsualPort = 29500;  ///< what other launchers take as well

/// Collects faults, one line each.
class Faults {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    text_ += detail::concat(text_.empty() ? "" : "\n", parts...);
  }
  /// `value` when it is in the range, else `fallback` and a fault.
  int in_range(const char* name, std::int64_t value, std::int64_t min, std::int64_t max, int fallback) {
    if (value >= min && value <= max) return static_cast<int>(value);
    add(name, " must be from ", min, " to ", max, ", not ", value);
    return fallback;
  }
  void throw_if_any() const {
    if (!text_.empty()) throw ConfigError(text_);
  }

 private:
  std::string text_;
};

std::string trimmed(std::string text) {
  const auto end = text.find_last_not_of(" \t\r\n");
  text.erase(end == std::string::npos ? 0 : end + 1);
  return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

/// Adds what is wrong with a secret's file: others must not be able to read it, nor somebody else to write
/// it.
void check_secret_file(const std::string& path, int descriptor, bool any_mode, Faults& faults) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return;
  const mode_t mode = status.st_mode & 0777;
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    faults.add("secret_file ", path, " belongs to user ", status.st_uid,
               ", who can change it: it must be this user's or root's (chown)");
  } else if ((mode & 077) != 0 && !any_mode) {
    faults.add("secret_file ", path, " can be read by others (mode ", std::oct, mode, std::dec,
               "): chmod 600 ", path,
               "; where the mode is given, as with a mounted Kubernetes secret, --allow_secret_mode");
  }
}

/// A file's text, if it can be read; what is wrong with it goes to `faults`.
std::optional<std::string> read_secret_file(const std::string& path, bool any_mode, Faults& faults) {
  constexpr std::size_t kLongest = 64 * 1024;
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  std::string text(kLongest, '\0');
  const ssize_t got = descriptor < 0 ? -1 : ::read(descriptor, text.data(), text.size());
  if (descriptor >= 0) {
    check_secret_file(path, descriptor, any_mode, faults);
    ::close(descriptor);
  }
  if (got < 0) {
    faults.add("secret_file ", path, " cannot be read");
    return std::nullopt;
  }
  text.resize(static_cast<std::size_t>(got));
  return trimmed(text);
}

/// The secret that all machines of a job share; empty for one machine, or where they do without.
std::string read_secret(const LaunchSettings& settings, const LaunchProgram& program, int machines,
                        Faults& faults) {
  if (machines <= 1) return {};
  std::string secret, source = "TESSERA_JOB_SECRET";
  if (settings.secret_file) {
    source = "secret_file " + *settings.secret_file;
    const auto text =
        read_secret_file(*settings.secret_file, settings.allow_secret_mode.value_or(false), faults);
    if (!text) return {};
    secret = *text;
  } else {
    secret = trimmed(value_of(program.environment, "TESSERA_JOB_SECRET").value_or(""));
  }
  if (secret.empty() && !settings.secret_file) {
    if (value_of(program.environment, "TESSERA_REQUIRE_SECRET") == "1") {
      faults.add(
          "TESSERA_REQUIRE_SECRET is set, so several machines need one secret in common: put the same text "
          "into a file on each (openssl rand -hex 32 > FILE; chmod 600 FILE) and give --secret_file FILE, or "
          "set TESSERA_JOB_SECRET");
    }
  } else if (secret.size() < kShortestSecret) {
    faults.add(source, " holds ", secret.size(), " characters; a secret has at least ", kShortestSecret);
  }
  return secret;
}

void resolve_machines(const LaunchSettings& settings, LaunchOptions& options, Faults& faults) {
  options.num_machines =
      faults.in_range("num_machines", settings.num_machines.value_or(1), 1, kMostProcesses, 1);
  const bool several = options.num_machines > 1;
  if (several && !settings.num_processes) {
    faults.add("num_processes (of all machines together) is needed when num_machines is ",
               options.num_machines);
  }
  options.num_processes =
      faults.in_range("num_processes", settings.num_processes.value_or(options.num_machines), 1,
                      kMostProcesses, options.num_machines);
  if (options.num_processes % options.num_machines != 0) {
    faults.add("num_processes ", options.num_processes, " must be a multiple of num_machines ",
               options.num_machines);
  }
  if (several && !settings.machine_rank) {
    faults.add("machine_rank (0 to ", options.num_machines - 1, ") is needed when num_machines is ",
               options.num_machines);
  }
  options.machine_rank =
      faults.in_range("machine_rank", settings.machine_rank.value_or(0), 0, options.num_machines - 1, 0);
  if (several && !settings.main_process_ip) {
    faults.add("main_process_ip (an address of machine 0) is needed when num_machines is ",
               options.num_machines);
  }
  options.main_process_ip = settings.main_process_ip.value_or("127.0.0.1");
  if (options.main_process_ip.empty()) faults.add("main_process_ip is empty");
  const std::int64_t port = settings.main_process_port.value_or(several ? kUsualPort : 0);
  options.main_process_port =
      static_cast<std::uint16_t>(faults.in_range("main_process_port", port, 0, 65535, 1));
  if (several && port == 0) {
    faults.add("main_process_port 0 (a free one) is for one machine; several need a port known to all");
  }
}

/// A way of training with keys that no other one reads.
struct Way {
  std::string_view type, flag;
  std::span<const launching::ScriptKey> keys;
};

std::array<Way, 2> ways() {
  return {{{"MEGATRON_LM", "--use_megatron_lm", launching::megatron_keys()},
           {"DEEPSPEED", "--use_deepspeed", launching::deepspeed_keys()}}};
}

/// The key behind "NAME=value"; nullptr if it is none of these.
const launching::ScriptKey* key_of(const Way& way, const std::string& variable) {
  const std::string_view name = std::string_view(variable).substr(0, variable.find('='));
  const auto found = std::find_if(way.keys.begin(), way.keys.end(),
                                  [&](const auto& key) { return launching::variable_of(key) == name; });
  return found == way.keys.end() ? nullptr : &*found;
}

/// Keys of a way that is not taken.
void check_ways(const LaunchSettings& settings, Faults& faults) {
  for (const Way& way : ways()) {
    if (settings.distributed_type == way.type) continue;
    const auto given = std::find_if(settings.environment.begin(), settings.environment.end(),
                                    [&](const auto& variable) { return key_of(way, variable) != nullptr; });
    if (given == settings.environment.end()) continue;
    const std::string_view name = key_of(way, *given)->name;
    faults.add(
        "--", name, " needs ", way.flag, ", or a --config_file whose distributed_type is ", way.type,
        name == "gradient_clipping" ? "; with --use_megatron_lm it is --megatron_lm_gradient_clipping" : "");
  }
}

/// The layout, which the script's ranks would refuse only when all of them have started.
void check_layout(const LaunchSettings& settings, const LaunchOptions& options, Faults& faults) {
  if (settings.distributed_type != "MEGATRON_LM") return;
  const auto degree = [&](const char* name) {
    std::int64_t value = 1;
    const std::string text = value_of(options.environment, name).value_or("1");
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && value > 0 && value <= kMostProcesses ? value : 1;
  };
  const std::int64_t tensor = degree("MEGATRON_LM_TP_DEGREE"), pipeline = degree("MEGATRON_LM_PP_DEGREE"),
                     context = degree("MEGATRON_LM_CONTEXT_PARALLEL_SIZE");
  const std::int64_t ranks = tensor * pipeline * context;
  if (options.num_processes % ranks != 0) {
    faults.add(
        "num_processes ", options.num_processes, " must be a multiple of ", ranks,
        ", which is megatron_lm_tp_degree ", tensor, " x megatron_lm_pp_degree ", pipeline,
        context > 1 ? detail::concat(" x megatron_lm_context_parallel_size ", context) : std::string());
  }
}

void resolve_environment(const LaunchSettings& settings, const LaunchProgram& program,
                         LaunchOptions& options) {
  options.environment = program.environment;
  if (settings.distributed_type) {
    set_variable(options.environment, "ACCELERATE_USE_MEGATRON_LM",
                 settings.distributed_type == "MEGATRON_LM" ? "true" : "false");
    const bool deepspeed = settings.distributed_type == "DEEPSPEED";
    if (deepspeed || value_of(options.environment, "ACCELERATE_USE_DEEPSPEED")) {
      set_variable(options.environment, "ACCELERATE_USE_DEEPSPEED", deepspeed ? "true" : "false");
    }
  }
  if (settings.pin_cores.value_or(false)) {
    set_variable(options.environment, "ACCELERATE_CPU_AFFINITY", "1");
  }
  launching::set_variables(options.environment, settings.environment);
  if (settings.cpu.value_or(false)) {
    set_variable(options.environment, "ACCELERATE_USE_CPU", "true");
    set_variable(options.environment, "CUDA_VISIBLE_DEVICES", "");
  }
}

void resolve_command(const LaunchProgram& program, LaunchOptions& options, Faults& faults) {
  try {
    launching::Command command = launching::find_command(program);
    options.program = std::move(command.path);
    options.argv = std::move(command.argv);
    // A pipe makes Python keep lines back until its buffer is full.
    if (command.python) launching::default_variable(options.environment, "PYTHONUNBUFFERED", "1");
  } catch (const ConfigError& error) {
    faults.add(error.what());
  }
}

double seconds(const char* name, double value, Faults& faults) {
  constexpr double kMost = 1e6;
  if (value >= 0 && value <= kMost) return value;
  faults.add(name, " must be from 0 to ", kMost, " seconds, not ", value);
  return 0;
}

}  // namespace

LaunchSettings overlay(const LaunchSettings& under, const LaunchSettings& over) {
  LaunchSettings result = under;
  // A hostfile says which machines there are: what `accelerate config` has written of one is no answer.
  if (over.hostfile) {
    result.num_processes = result.num_machines = result.machine_rank = std::nullopt;
    result.main_process_ip = std::nullopt;
  }
  launching::each_setting([&](const auto& field) {
    if (over.*field.member) result.*field.member = over.*field.member;
  });
  for (const Way& way : ways()) {
    if (!over.distributed_type || *over.distributed_type == way.type) continue;
    std::erase_if(result.environment, [&](const auto& variable) { return key_of(way, variable) != nullptr; });
  }
  if (over.distributed_type) result.distributed_type = over.distributed_type;
  result.warnings.insert(result.warnings.end(), over.warnings.begin(), over.warnings.end());
  result.environment.insert(result.environment.end(), over.environment.begin(), over.environment.end());
  return result;
}

bool expects_gpus(const LaunchSettings& settings) {
  return !settings.cpu.value_or(false) &&
         (settings.distributed_type == "MULTI_GPU" || settings.distributed_type == "MEGATRON_LM" ||
          settings.distributed_type == "DEEPSPEED");
}

LaunchOptions resolve_launch(const LaunchSettings& settings, const LaunchProgram& program) {
  Faults faults;
  LaunchOptions options;
  if (settings.hostfile) {
    faults.add(
        "hostfile is for `tessera launch`, which reads it; give num_machines, machine_rank and "
        "main_process_ip");
  }
  resolve_machines(settings, options, faults);
  options.max_restarts = faults.in_range("max_restarts", settings.max_restarts.value_or(0), 0, 1'000'000, 0);
  options.threads_per_process =
      faults.in_range("threads_per_process", settings.threads_per_process.value_or(0), 0, 4096, 0);
  options.log_dir = settings.log_dir.value_or("");
  options.quiet = settings.quiet.value_or(false);
  options.grace_s = seconds("grace_s", settings.grace_s.value_or(options.grace_s), faults);
  options.join_timeout_s =
      seconds("join_timeout_s", settings.join_timeout_s.value_or(options.join_timeout_s), faults);
  options.restart_delay_s =
      seconds("restart_delay_s", settings.restart_delay_s.value_or(options.restart_delay_s), faults);
  options.secret = read_secret(settings, program, options.num_machines, faults);
  options.pin_cores = settings.pin_cores.value_or(false);
  resolve_environment(settings, program, options);
  check_ways(settings, faults);
  check_layout(settings, options, faults);
  resolve_command(program, options, faults);
  faults.throw_if_any();
  return options;
}

LaunchOptions local_launch(int processes, const LaunchProgram& program, const std::string& log_dir) {
  LaunchSettings settings;
  settings.num_processes = processes;
  settings.quiet = true;
  if (!log_dir.empty()) settings.log_dir = log_dir;
  return resolve_launch(settings, program);
}

}  // namespace tessera
