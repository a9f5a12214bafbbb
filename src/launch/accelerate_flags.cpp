#include "launch/accelerate_flags.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "launch/environment.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

using Kind = MegatronKey::Kind;

constexpr std::array<MegatronKey, 27> kMegatronKeys{{
    {"megatron_lm_tp_degree", Kind::integer, "tensor-parallel ranks"},
    {"megatron_lm_pp_degree", Kind::integer, "pipeline stages"},
    {"megatron_lm_num_micro_batches", Kind::integer, "micro-batches of a data rank per optimizer step"},
    {"megatron_lm_gradient_clipping", Kind::number, "largest global gradient norm; 0 = no clipping"},
    {"megatron_lm_sequence_parallelism", Kind::boolean, "sequence parallelism over the tensor ranks"},
    {"megatron_lm_recompute_activations", Kind::boolean, "selective recomputation"},
    {"megatron_lm_use_distributed_optimizer", Kind::boolean, "shard the optimizer's state over data ranks"},
    {"megatron_lm_use_custom_fsdp", Kind::boolean, "not in this build"},
    {"megatron_lm_no_load_optim", Kind::boolean, "load_state leaves the optimizer as it is"},
    {"megatron_lm_no_save_optim", Kind::boolean, "save_state writes no optimizer state"},
    {"megatron_lm_eod_mask_loss", Kind::boolean, "no loss on end-of-document tokens"},
    {"megatron_lm_optimizer_cpu_offload", Kind::boolean, "without effect"},
    {"megatron_lm_overlap_cpu_optimizer_d2h_h2d", Kind::boolean, "without effect"},
    {"megatron_lm_use_precision_aware_optimizer", Kind::boolean, "without effect"},
    {"megatron_lm_decoder_last_pipeline_num_layers", Kind::integer, "layers of the last pipeline stage"},
    {"megatron_lm_recompute_granularity", Kind::text, "full or selective recomputation"},
    {"megatron_lm_recompute_method", Kind::text, "full recomputation: uniform or block"},
    {"megatron_lm_recompute_num_layers", Kind::integer, "full recomputation: layers of a segment"},
    {"megatron_lm_attention_backend", Kind::text, "without effect"},
    {"megatron_lm_expert_model_parallel_size", Kind::integer, "1: experts are not in this build"},
    {"megatron_lm_expert_tensor_parallel_size", Kind::integer, "1: experts are not in this build"},
    {"megatron_lm_context_parallel_size", Kind::integer, "1: not in this build"},
    {"megatron_lm_attention_dropout", Kind::number, "dropout on attention probabilities"},
    {"megatron_lm_hidden_dropout", Kind::number, "dropout on embeddings and residual branches"},
    {"megatron_lm_attention_softmax_in_fp32", Kind::boolean, "without effect: it always is"},
    {"megatron_lm_calculate_per_token_loss", Kind::boolean, "true: the loss always is"},
    {"megatron_lm_use_rotary_position_embeddings", Kind::boolean, "rotary positions in a new model"},
}};

template <typename T>
bool parses(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

std::string with(char from, char to, std::string_view text) {
  std::string result(text);
  std::replace(result.begin(), result.end(), from, to);
  return result;
}

std::string upper(std::string text) {
  for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return text;
}

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

/// As Accelerate reads truth; nullopt for other words.
std::optional<bool> truth(const std::string& text) {
  const std::string word = lower(text);
  for (const char* yes : {"y", "yes", "t", "true", "on", "1"}) {
    if (word == yes) return true;
  }
  for (const char* no : {"n", "no", "f", "false", "off", "0"}) {
    if (word == no) return false;
  }
  return std::nullopt;
}

/// Values that ask for what this build does not have.
std::string refusal_of(std::string_view name, const std::string& value) {
  std::int64_t size = 0;
  const bool several = parses(value, size) && size > 1;
  if (several && name.find("expert") != std::string_view::npos) {
    return "asks for expert parallelism, which is not in this build yet; leave it at 1";
  }
  if (several && name == "megatron_lm_context_parallel_size") {
    return "asks for context parallelism, which is not in this build yet; leave it at 1";
  }
  if (name == "megatron_lm_use_custom_fsdp" && truth(value) == true) {
    return "asks for Megatron's FSDP, which is not in this build; use megatron_lm_use_distributed_optimizer";
  }
  return {};
}

/// Groups of flags that belong to other engines.
struct Foreign {
  std::string_view prefix;  ///< of the name, with '_'
  bool whole;               ///< the name itself, not a prefix
  std::string_view reason;
};

constexpr std::string_view kDeepSpeed =
    "is for DeepSpeed, which Tessera does not use; give a layout with --use_megatron_lm";
constexpr std::string_view kFsdp =
    "is for PyTorch's FSDP, which Tessera does not use; give a layout with --use_megatron_lm";
constexpr std::string_view kTpu = "is for TPUs, which Tessera does not use";
constexpr std::string_view kParallelism =
    "is for PyTorch's parallelism, which Tessera does not use; give a layout with --use_megatron_lm";

constexpr std::array<Foreign, 31> kForeign{{
    {"use_deepspeed", true, kDeepSpeed},
    {"deepspeed_", false, kDeepSpeed},
    {"zero_stage", true, kDeepSpeed},
    {"zero3_", false, kDeepSpeed},
    {"offload_", false, kDeepSpeed},
    {"gradient_clipping", true,
     "is DeepSpeed's; with --use_megatron_lm give --megatron_lm_gradient_clipping, else "
     "accelerator.clip_grad_norm_"},
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
}};

class FlagReader {
 public:
  explicit FlagReader(const AccelerateFlags& flags) : flags_(flags) {}

  LaunchSettings read() {
    read_paradigm();
    read_workers();
    read_rendezvous();
    read_megatron();
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
    if (flags_.multi_gpu && flags_.use_megatron_lm) {
      fault("--multi_gpu and --use_megatron_lm are two ways of training; give one");
    }
    if (flags_.multi_gpu) settings_.distributed_type = "MULTI_GPU";
    if (flags_.use_megatron_lm) settings_.distributed_type = "MEGATRON_LM";
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
      leave_out_dynamo(settings_, *flags_.dynamo_backend);
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

  void read_megatron() {
    for (std::size_t i = 0; i < kMegatronKeys.size(); ++i) {
      const auto& value = flags_.megatron[i];
      if (!value) continue;
      const std::string wrong = fault_of(kMegatronKeys[i], *value);
      if (!wrong.empty()) fault("--", kMegatronKeys[i].name, " ", wrong);
      set(variable_of(kMegatronKeys[i]), *value);
    }
  }

  const AccelerateFlags& flags_;
  LaunchSettings settings_;
  std::string faults_;
};

}  // namespace

std::span<const MegatronKey> megatron_keys() { return kMegatronKeys; }

std::string fault_of(const MegatronKey& key, const std::string& value) {
  std::int64_t integer = 0;
  double number = 0;
  switch (key.kind) {
    case Kind::integer:
      if (!parses(value, integer) || integer < 1) {
        return detail::concat("must be an integer of at least 1, not '", value, "'");
      }
      break;
    case Kind::number:
      if (!parses(value, number) || !std::isfinite(number) || number < 0) {
        return detail::concat("must be a number of at least 0, not '", value, "'");
      }
      break;
    case Kind::boolean:
      if (!truth(value)) return detail::concat("must be true or false, not '", value, "'");
      break;
    case Kind::text:
      break;
  }
  return refusal_of(key.name, value);
}

std::string variable_of(const MegatronKey& key) { return upper(std::string(key.name)); }

LaunchSettings settings_of(const AccelerateFlags& flags) { return FlagReader(flags).read(); }

void leave_out_dynamo(LaunchSettings& settings, const std::string& backend) {
  settings.warnings.push_back(detail::concat("the dynamo backend ", backend,
                                             " is left out: Tessera's kernels are compiled already, and "
                                             "torch.compile has no part in them"));
  set_variable(settings.environment, "ACCELERATE_DYNAMO_BACKEND", "NO");
}

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
