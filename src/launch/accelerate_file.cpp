#include <algorithm>
#include <array>

#include "launch/accelerate_flags.hpp"
#include "launch/environment.hpp"
#include "launch/file_values.hpp"

namespace tessera::launching {
namespace {

constexpr std::array<std::string_view, 5> kDynamoKeys{"dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph",
                                                      "dynamo_use_dynamic",
                                                      "dynamo_use_regional_compilation"};

constexpr std::array<std::string_view, 4> kDistributedTypes{"NO", "MULTI_CPU", "MULTI_GPU", "MEGATRON_LM"};

std::string join(std::string_view separator, const auto& words) {
  std::string text;
  for (const std::string_view word : words) text.append(text.empty() ? "" : separator).append(word);
  return text;
}

/// One of the texts in `allowed`, or an issue with `otherwise`.
std::optional<std::string> one_of(FileReader& reader, std::string_view key, const auto& allowed,
                                  std::string_view otherwise) {
  std::optional<std::string> value;
  reader.text(key, value);
  if (!value || std::find(allowed.begin(), allowed.end(), *value) != allowed.end()) return value;
  reader.fault(*reader.find(key), key, " ", in_quotes(*value), " ", otherwise,
               " (known: ", join(", ", allowed), ")");
  return std::nullopt;
}

/// The layout: every key becomes a variable of its own.
void read_layout(FileReader& reader, const YamlNode& section, Variables& environment) {
  reader.enter(section, "megatron_lm_config.");
  for (const MegatronKey& key : megatron_keys()) {
    std::optional<std::string> value;
    reader.text(key.name, value);
    if (!value) continue;
    const std::string wrong = fault_of(key, *value);
    if (!wrong.empty()) reader.fault(*reader.find(key.name), "megatron_lm_config.", key.name, " ", wrong);
    set_variable(environment, variable_of(key), *value);
  }
  reader.refuse_others();
}

/// torch.compile, under the spelling of any version.
void read_dynamo(FileReader& reader, const YamlNode* section, std::optional<std::string> backend,
                 LaunchSettings& settings) {
  if (section != nullptr) {
    reader.enter(*section, "dynamo_config.");
    for (const std::string_view key : kDynamoKeys) {
      std::optional<std::string> value;
      reader.text(key, value);
      if (!value) reader.text(key.substr(key.find('_') + 1), value);
      if (value && key == "dynamo_backend") backend = value;
    }
    reader.refuse_others();
  }
  if (backend && *backend != "NO" && *backend != "no") leave_out_dynamo(settings, *backend);
}

void read_precision(FileReader& reader, Variables& environment) {
  constexpr std::array<std::string_view, 4> kPrecisions{"no", "fp16", "bf16", "fp8"};
  const auto precision = one_of(reader, "mixed_precision", kPrecisions, "is no precision");
  if (precision == "fp8") {
    reader.fault(*reader.find("mixed_precision"), "mixed_precision fp8 is not in this build yet; use bf16");
  }
  std::optional<bool> half;
  reader.boolean("fp16", half);
  if (precision || half) {
    set_variable(environment, "ACCELERATE_MIXED_PRECISION", precision.value_or(*half ? "fp16" : "no"));
  }
}

void read_hardware(FileReader& reader, LaunchSettings& settings) {
  reader.boolean("use_cpu", settings.cpu);
  std::optional<bool> debug, affinity, same_network;
  reader.boolean("debug", debug);
  reader.boolean("enable_cpu_affinity", affinity);
  reader.boolean("same_network", same_network);
  if (debug.value_or(false)) set_variable(settings.environment, "ACCELERATE_DEBUG_MODE", "true");
  if (affinity.value_or(false)) settings.pin_cores = true;
  std::optional<std::string> gpus;
  reader.text("gpu_ids", gpus);
  if (gpus && *gpus != "all") set_variable(settings.environment, "CUDA_VISIBLE_DEVICES", *gpus);
}

void refuse_foreign(FileReader& reader) {
  reader.refuse_unless_empty("deepspeed_config", "is for DeepSpeed, which Tessera does not use; remove it");
  reader.refuse_unless_empty("fsdp_config", "is for PyTorch's FSDP, which Tessera does not use; remove it");
  reader.refuse_unless_empty("fp8_config", "is for fp8, which is not in this build yet");
  reader.refuse_unless_empty("parallelism_config",
                             "is for PyTorch's parallelism; give the layout in megatron_lm_config");
  reader.refuse_unless_empty("mpirun_config", "is not used: start the program with mpirun itself");
  for (const std::string_view key : {"tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "tpu_use_cluster",
                                     "tpu_use_sudo", "downcast_bf16", "command_file", "commands"}) {
    reader.refuse_unless_empty(key, "is for TPUs, which Tessera does not use; remove it");
  }
}

}  // namespace

void read_accelerate(const YamlNode& root, FileReader& reader, LaunchSettings& settings) {
  reader.enter(root, "");
  constexpr std::array<std::string_view, 1> kEnvironments{"LOCAL_MACHINE"};
  constexpr std::array<std::string_view, 2> kRendezvous{"static", "c10d"};
  one_of(reader, "compute_environment", kEnvironments, "is not supported");
  const auto type = one_of(reader, "distributed_type", kDistributedTypes, "is not what Tessera does");
  if (reader.find("distributed_type") == nullptr) {
    reader.fault(
        root,
        "this is no file of `accelerate config` (distributed_type is missing), and no launch file of "
        "ours (the section 'launch' is missing)");
  }
  one_of(reader, "rdzv_backend", kRendezvous, "is unknown");
  reader.integer("num_processes", settings.num_processes);
  reader.integer("num_machines", settings.num_machines);
  reader.integer("machine_rank", settings.machine_rank);
  reader.text("main_process_ip", settings.main_process_ip);
  reader.integer("main_process_port", settings.main_process_port);
  reader.ignore("main_training_function");
  read_precision(reader, settings.environment);
  read_hardware(reader, settings);
  refuse_foreign(reader);
  std::optional<std::string> old_dynamo;
  reader.text("dynamo_backend", old_dynamo);
  const YamlNode* const dynamo = reader.section("dynamo_config");
  const YamlNode* const megatron = reader.section("megatron_lm_config");
  reader.refuse_others();
  settings.distributed_type = type;
  if (megatron != nullptr && type && *type != "MEGATRON_LM") {
    reader.fault(*megatron, "megatron_lm_config is for distributed_type MEGATRON_LM, not ", *type,
                 "; change one or remove it");
  }
  read_dynamo(reader, dynamo, old_dynamo, settings);
  if (megatron != nullptr) read_layout(reader, *megatron, settings.environment);
}

}  // namespace tessera::launching
