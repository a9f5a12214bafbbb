#include "launch/accelerate_flags.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include "launch/environment.hpp"
#include "launch/words.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

std::string with(char from, char to, std::string_view text) {
  std::string result(text);
  std::replace(result.begin(), result.end(), from, to);
  return result;
}

/// Groups of flags that belong to other engines.
struct Foreign {
  std::string_view prefix;  ///< of the name, with '_'
  bool whole;               ///< the name itself, not a prefix
  std::string_view reason;
};

constexpr std::string_view kDeepSpeed =
    "is for DeepSpeed itself, which Tessera does not use; --use_deepspeed takes its stages and offloading";
constexpr std::string_view kFsdp =
    "is for PyTorch's FSDP, which Tessera does not use; give a layout with --use_megatron_lm";
constexpr std::string_view kTpu = "is for TPUs, which Tessera does not use";
constexpr std::string_view kParallelism =
    "is for PyTorch's parallelism, which Tessera does not use; give a layout with --use_megatron_lm";

constexpr std::array<Foreign, 33> kForeign{{
    {"deepspeed_", false, kDeepSpeed},
    {"use_fsdp", true, kFsdp},
    {"fsdp_", false, kFsdp},
    {"use_parallelism_config", true, kParallelism},
    {"parallelism_config_", false, kParallelism},
    {"fp8_", false, "is for fp8, which is not in this build yet; use --mixed_precision bf16"},
    {"aws_", false, "is for Amazon SageMaker, which Tessera does not use"},
    {"tpu", true, kTpu},
    {"tpu_", false, kTpu},
    {"no_tpu_cluster", true, kTpu},
    {"vm", true, kTpu},
    {"env", true, kTpu},
    {"main_training_function", true, kTpu},
    {"downcast_bf16", true, kTpu},
    {"command", true, kTpu},
    {"command_file", true, kTpu},
    {"commands", true, kTpu},
    {"mpirun_hostfile", true, "is not used: start the program with mpirun itself"},
    {"ipex", true, "is for Intel's extension of PyTorch, which Tessera does not use; --cpu runs on CPUs"},
    {"use_xpu", true, "is for Intel's GPUs, which Tessera does not use"},
    {"use_mps_device", true, "is for Apple's GPUs, which Tessera does not use"},
    {"mps", true, "is for Apple's GPUs, which Tessera does not use"},
    {"fp16", true, "is an older spelling; write --mixed_precision fp16"},
    {"standalone", true, "is torchrun's; --main_process_port 0, the default, takes a free port"},
    {"nproc_per_node", true, "is torchrun's; write --num_processes, of all machines together"},
    {"nnodes", true, "is torchrun's; write --num_machines"},
    {"node_rank", true, "is torchrun's; write --machine_rank"},
    {"master_addr", true, "is torchrun's; write --main_process_ip"},
    {"master_port", true, "is torchrun's; write --main_process_port"},
    {"num_gpus", true, "is DeepSpeed's; write --num_processes, of all machines together"},
    {"num_nodes", true, "is DeepSpeed's; write --num_machines"},
    {"no_ssh", true, "is DeepSpeed's; with --machine_rank nothing is started on other machines"},
    {"launcher", true, "is DeepSpeed's; machines of a hostfile are reached over ssh"},
}};

class FlagReader {
 public:
  explicit FlagReader(const AccelerateFlags& flags) : flags_(flags) {}

  LaunchSettings read() {
    read_paradigm();
    read_workers();
    read_rendezvous();
    read_keys(megatron_keys(), flags_.megatron);
    read_keys(deepspeed_keys(), flags_.deepspeed);
    warn_of_multinode_launcher(flags_.deepspeed_multinode_launcher.value_or(""), settings_.warnings);
    if (!faults_.empty()) throw ConfigError(faults_);
    return std::move(settings_);
  }

 private:
  template <typename... Parts>
  void fault(const Parts&... parts) {
    faults_ += detail::concat(faults_.empty() ? "" : "\n", parts...);
  }
  template <typename... Parts>
  void warn(const Parts&... parts) {
    settings_.warnings.push_back(detail::concat(parts...));
  }
  void set(std::string_view name, std::string_view value) {
    set_variable(settings_.environment, name, value);
  }

  void read_paradigm() {
    if (flags_.multi_gpu + flags_.use_megatron_lm + flags_.use_deepspeed > 1) {
      fault("--multi_gpu, --use_megatron_lm and --use_deepspeed are ways of training; give one");
    }
    if (flags_.multi_gpu) settings_.distributed_type = "MULTI_GPU";
    if (flags_.use_megatron_lm) settings_.distributed_type = "MEGATRON_LM";
    if (flags_.use_deepspeed) settings_.distributed_type = "DEEPSPEED";
  }

  void read_workers() {
    if (flags_.mixed_precision) {
      const std::string precision = lower(*flags_.mixed_precision);
      if (precision == "fp8") {
        fault("--mixed_precision fp8 is not in this build yet; use bf16");
      } else if (precision != "no" && precision != "fp16" && precision != "bf16") {
        fault("--mixed_precision must be no, fp16 or bf16, not '", *flags_.mixed_precision, "'");
      }
      set("ACCELERATE_MIXED_PRECISION", precision);
    }
    if (flags_.debug) set("ACCELERATE_DEBUG_MODE", "true");
    if (flags_.enable_cpu_affinity) settings_.pin_cores = true;
    if (flags_.gpu_ids && *flags_.gpu_ids != "all") set("CUDA_VISIBLE_DEVICES", *flags_.gpu_ids);
    std::int64_t steps = 0;
    if (flags_.gradient_accumulation_steps) {
      if (!parses(*flags_.gradient_accumulation_steps, steps) || steps < 1) {
        fault("--gradient_accumulation_steps must be an integer of at least 1, not '",
              *flags_.gradient_accumulation_steps, "'");
      }
      set("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", *flags_.gradient_accumulation_steps);
    }
    if (flags_.dynamo_backend && lower(*flags_.dynamo_backend) != "no") {
      warn("the dynamo backend ", *flags_.dynamo_backend,
           " is left out: Tessera's kernels are compiled already, and torch.compile has no part in them");
      set("ACCELERATE_DYNAMO_BACKEND", "NO");
    } else if (flags_.dynamo_mode || flags_.dynamo_use_fullgraph || flags_.dynamo_use_dynamic ||
               flags_.dynamo_use_regional_compilation) {
      warn("the --dynamo_ flags have no effect: Tessera's kernels are compiled already");
    }
    if (flags_.tee && *flags_.tee != "0") {
      warn("--tee has no effect: what all ranks write is shown, and --log_dir keeps it too");
    }
    if (flags_.role && *flags_.role != "default") {
      warn("--role has no effect: ranks have no other names");
    }
    if (flags_.monitor_interval) warn("--monitor_interval has no effect: the end of a rank is seen at once");
  }

  void read_rendezvous() {
    if (flags_.rdzv_backend && *flags_.rdzv_backend != "static" && *flags_.rdzv_backend != "c10d") {
      fault("--rdzv_backend '", *flags_.rdzv_backend,
            "' is unknown (known: static, c10d); the launchers meet at --main_process_ip either way");
    }
    warn_of_rendezvous(flags_.rdzv_backend == "c10d", false, settings_.warnings);
    const std::string& conf = flags_.rdzv_conf.value_or("");
    for (std::size_t begin = 0; begin < conf.size();) {
      const std::size_t end = std::min(conf.find(',', begin), conf.size());
      const std::string entry = conf.substr(begin, end - begin);
      const std::size_t equals = std::min(entry.find('='), entry.size());
      const std::string key = entry.substr(0, equals);
      double seconds = 0;
      if (key == "timeout" || key == "join_timeout") {
        if (!parses(entry.substr(std::min(equals + 1, entry.size())), seconds) || !(seconds > 0)) {
          fault("--rdzv_conf: '", entry, "' must give a number of seconds above 0");
        }
        settings_.join_timeout_s = seconds;
      } else if (equals == entry.size()) {
        fault("--rdzv_conf: '", entry, "' must be KEY=VALUE");
      } else {
        warn("--rdzv_conf: ", key, " has no effect");
      }
      begin = end + 1;
    }
  }

  void read_keys(std::span<const ScriptKey> keys, const std::vector<std::optional<std::string>>& values) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const ScriptKey& key = keys[i];
      if (!values[i]) continue;
      const std::string wrong = fault_of(key, *values[i]);
      if (!wrong.empty()) fault("--", key.name, " ", wrong);
      const std::string value = value_for_script(key, *values[i]);
      if (value_of(settings_.environment, variable_of(key)).value_or(value) != value) {
        fault("--", key.name, " is another name of --", key.same_as, ", which says something else; give one");
      }
      set(variable_of(key), value);
    }
  }

  const AccelerateFlags& flags_;
  LaunchSettings settings_;
  std::string faults_;
};

}  // namespace

LaunchSettings settings_of(const AccelerateFlags& flags) { return FlagReader(flags).read(); }

std::string foreign_flag(std::string_view flag) {
  const std::string_view name = flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  const std::string word = with('-', '_', name.substr(0, name.find('=')));
  for (const Foreign& foreign : kForeign) {
    if (foreign.whole ? word == foreign.prefix : word.starts_with(foreign.prefix)) {
      return detail::concat("--", word, " ", foreign.reason);
    }
  }
  return {};
}

std::optional<std::string> default_launch_file(const std::vector<std::string>& environment) {
  const auto folder = [&](const char* name) { return value_of(environment, name).value_or(""); };
  const std::string home = folder("HOME");
  const auto below_home = [&](const char* variable, const char* otherwise) {
    const std::string named = folder(variable);
    return !named.empty() ? named : home.empty() ? "" : home + "/" + otherwise;
  };
  const std::string ours = below_home("XDG_CONFIG_HOME", ".config");
  std::string theirs = folder("HF_HOME");
  if (theirs.empty() && !below_home("XDG_CACHE_HOME", ".cache").empty()) {
    theirs = below_home("XDG_CACHE_HOME", ".cache") + "/huggingface";
  }
  std::vector<std::string> candidates;
  if (!ours.empty()) candidates.push_back(ours + "/tessera/default_config.yaml");
  if (!theirs.empty()) {
    candidates.push_back(theirs + "/accelerate/default_config.yaml");
    candidates.push_back(theirs + "/accelerate/default_config.json");
  }
  for (const std::string& candidate : candidates) {
    std::error_code error;
    if (std::filesystem::is_regular_file(candidate, error)) return candidate;
  }
  return std::nullopt;
}

}  // namespace tessera::launching
