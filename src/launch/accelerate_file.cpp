#include <algorithm>
#include <array>

#include "launch/accelerate_keys.hpp"
#include "launch/environment.hpp"
#include "launch/file_values.hpp"
#include "launch/words.hpp"

namespace tessera::launching {
namespace {

constexpr std::array<std::string_view, 5> kDistributedTypes{"NO", "MULTI_CPU", "MULTI_GPU", "MEGATRON_LM",
                                                            "DEEPSPEED"};

std::string join(std::string_view separator, const auto& words) {
  std::string text;
  for (const std::string_view word : words) text.append(text.empty() ? "" : separator).append(word);
  return text;
}

/// One of the texts in `allowed`, or an issue with `otherwise`.
std::optional<std::string> one_of(FileReader& reader, std::string_view key, const auto& allowed,
                                  std::string_view otherwise) {
  std::optional<std::string> value;
  reader.read(key, value);
  if (!value || std::find(allowed.begin(), allowed.end(), *value) != allowed.end()) return value;
  reader.fault(*reader.find(key), key, " ", in_quotes(*value), " ", otherwise,
               " (known: ", join(", ", allowed), ")");
  return std::nullopt;
}

/// Every key that stands in the mapping the reader is in becomes a variable of its own.
void read_keys(FileReader& reader, std::string_view prefix, std::span<const ScriptKey> keys,
               Variables& environment) {
  Variables found;
  for (const ScriptKey& key : keys) {
    std::optional<std::string> value;
    reader.read(key.name, value);
    if (!value) continue;
    const std::string wrong = fault_of(key, *value);
    if (!wrong.empty()) reader.fault(*reader.find(key.name), prefix, key.name, " ", wrong);
    *value = value_for_script(key, *value);
    if (value_of(found, variable_of(key)).value_or(*value) != *value) {
      reader.fault(*reader.find(key.name), prefix, key.name, " is another name of ", key.same_as,
                   ", which says something else; give one");
    }
    set_variable(found, variable_of(key), *value);
  }
  environment.insert(environment.end(), found.begin(), found.end());
}

/// The keys of a layout that stand at the top level: a section that has lost its indentation.
std::vector<std::string_view> loose_layout(const YamlNode& root) {
  std::vector<std::string_view> keys;
  for (const auto& [key, value] : root.entries) {
    if (key.text.starts_with("megatron_lm_") && key.text != "megatron_lm_config") keys.push_back(key.text);
  }
  return keys;
}

/// A section whose keys mean nothing here; what they ask for is named.
void read_idle(FileReader& reader, const IdleSection& section, const YamlNode& node,
               LaunchSettings& settings) {
  std::string asked;
  reader.enter(node, std::string(section.name) + ".");
  for (const std::string_view key : section.keys) {
    std::optional<std::string> value;
    reader.read(key, value);
    if (value && truth(*value) != false) asked += detail::concat(asked.empty() ? "" : ", ", key, " ", *value);
  }
  reader.refuse_others();
  if (asked.empty()) return;
  settings.warnings.push_back(detail::concat(section.name, " (", asked, ") has no effect: ", section.reason));
  if (section.name == kDynamoSection) {
    set_variable(settings.environment, "ACCELERATE_DYNAMO_BACKEND", "NO");
  }
}

/// torch.compile as versions up to 0.16 wrote it, at the top level.
void leave_out_dynamo(const std::string& backend, LaunchSettings& settings) {
  const auto section = std::find_if(idle_sections().begin(), idle_sections().end(),
                                    [](const IdleSection& idle) { return idle.name == kDynamoSection; });
  settings.warnings.push_back(
      detail::concat("dynamo_backend ", backend, " has no effect: ", section->reason));
  set_variable(settings.environment, "ACCELERATE_DYNAMO_BACKEND", "NO");
}

void read_precision(FileReader& reader, Variables& environment) {
  constexpr std::array<std::string_view, 4> kPrecisions{"no", "fp16", "bf16", "fp8"};
  const auto precision = one_of(reader, "mixed_precision", kPrecisions, "is no precision");
  if (precision == "fp8") {
    reader.fault(*reader.find("mixed_precision"), "mixed_precision fp8 is not in this build yet; use bf16");
  }
  std::optional<bool> half;
  reader.read("fp16", half);
  if (precision || half) {
    set_variable(environment, "ACCELERATE_MIXED_PRECISION", precision ? *precision : *half ? "fp16" : "no");
  }
}

void read_processes(FileReader& reader, LaunchSettings& settings) {
  reader.read("num_processes", settings.num_processes);
  // What newer versions write where nobody was asked.
  if (settings.num_processes == -1) settings.num_processes.reset();
  reader.read("num_machines", settings.num_machines);
  reader.read("machine_rank", settings.machine_rank);
  reader.read("main_process_ip", settings.main_process_ip);
  reader.read("main_process_port", settings.main_process_port);
  constexpr std::array<std::string_view, 2> kRendezvous{"static", "c10d"};
  const auto backend = one_of(reader, "rdzv_backend", kRendezvous, "is unknown");
  std::optional<bool> same_network;
  reader.read("same_network", same_network);
  warn_of_rendezvous(backend == "c10d", same_network == false, settings.warnings);
  std::optional<std::string> function;
  reader.read("main_training_function", function);
  if (function && *function != "main") {
    settings.warnings.push_back(detail::concat(
        "main_training_function ", in_quotes(*function),
        " has no effect: it is for TPUs and notebooks; a launched script runs from its first line"));
  }
}

void read_hardware(FileReader& reader, LaunchSettings& settings) {
  reader.read("use_cpu", settings.cpu);
  if (settings.distributed_type == "MULTI_CPU") settings.cpu = true;
  std::optional<bool> debug, affinity;
  reader.read("debug", debug);
  reader.read("enable_cpu_affinity", affinity);
  if (debug.value_or(false)) set_variable(settings.environment, "ACCELERATE_DEBUG_MODE", "true");
  if (affinity.value_or(false)) settings.pin_cores = true;
  std::optional<std::string> gpus;
  reader.read("gpu_ids", gpus);
  if (gpus && *gpus != "all") set_variable(settings.environment, "CUDA_VISIBLE_DEVICES", *gpus);
}

void refuse_foreign(FileReader& reader) {
  reader.refuse_unless_empty("fsdp_config", "is for PyTorch's FSDP, which Tessera does not use; remove it");
  reader.refuse_unless_empty("fp8_config", "is for fp8, which is not in this build yet");
  for (const std::string_view key : {"parallelism_config", "tp_config"}) {
    reader.refuse_unless_empty(key, "is for PyTorch's parallelism; give the layout in megatron_lm_config");
  }
  for (const std::string_view key : {"tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "tpu_use_cluster",
                                     "tpu_use_sudo", "downcast_bf16", "command_file", "commands"}) {
    reader.refuse_unless_empty(key, "is for TPUs, which Tessera does not use; remove it");
  }
}

/// DeepSpeed's stages and offloading; its hostfile says which machines there are.
void read_deepspeed(FileReader& reader, const YamlNode& section, LaunchSettings& settings) {
  const auto& type = settings.distributed_type;
  if (type && *type != "DEEPSPEED") {
    reader.fault(section, "deepspeed_config is for distributed_type DEEPSPEED, not ", *type,
                 "; change one or remove it");
  }
  reader.enter(section, "deepspeed_config.");
  read_keys(reader, "deepspeed_config.", deepspeed_keys(), settings.environment);
  std::optional<std::int64_t> steps;
  reader.read("gradient_accumulation_steps", steps);
  if (steps && *steps < 1) {
    reader.fault(*reader.find("gradient_accumulation_steps"),
                 "deepspeed_config.gradient_accumulation_steps must be at least 1, not ", *steps);
  }
  if (steps)
    set_variable(settings.environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", std::to_string(*steps));
  reader.refuse_unless_empty(
      "deepspeed_moe_layer_cls_names",
      "has no place here: weights come together by layers, experts among them; remove it");
  std::optional<std::string> launcher;
  reader.read("deepspeed_multinode_launcher", launcher);
  warn_of_multinode_launcher(launcher.value_or(""), settings.warnings);
  LaunchSettings hosts;
  reader.read("deepspeed_hostfile", hosts.hostfile);
  reader.read("deepspeed_inclusion_filter", hosts.include);
  reader.read("deepspeed_exclusion_filter", hosts.exclude);
  // Written by every version, with "standard" among them, which starts each machine by hand.
  if (lower(launcher.value_or("")) != "standard") settings = overlay(settings, hosts);
  reader.refuse_others();
}

void read_layout_sections(const YamlNode& root, FileReader& reader, LaunchSettings& settings) {
  const YamlNode* const section = reader.section("megatron_lm_config");
  const std::vector<std::string_view> loose = loose_layout(root);
  const YamlNode* const layout = section != nullptr || loose.empty() ? section : root.find(loose.front());
  const auto& type = settings.distributed_type;
  if (layout != nullptr && type && *type != "MEGATRON_LM") {
    reader.fault(*layout, "megatron_lm_config is for distributed_type MEGATRON_LM, not ", *type,
                 "; change one or remove it");
  }
  if (!loose.empty() && section == nullptr && root.find("megatron_lm_config") != nullptr) {
    settings.warnings.push_back(detail::concat(layout->place.text(), ": ", join(", ", loose),
                                               " stand beside an empty megatron_lm_config and are read as "
                                               "what belongs into it; indent them"));
    read_keys(reader, "", megatron_keys(), settings.environment);
  } else {
    for (const std::string_view key : loose) {
      reader.fault(*root.find(key), key, " stands at the top level; it belongs into the section ",
                   "megatron_lm_config, indented");
      reader.ignore(key);
    }
  }
  reader.refuse_others();
  if (section == nullptr) return;
  reader.enter(*section, "megatron_lm_config.");
  read_keys(reader, "megatron_lm_config.", megatron_keys(), settings.environment);
  reader.refuse_others();
}

}  // namespace

void read_accelerate(const YamlNode& root, FileReader& reader, LaunchSettings& settings) {
  reader.enter(root, "");
  constexpr std::array<std::string_view, 1> kEnvironments{"LOCAL_MACHINE"};
  one_of(reader, "compute_environment", kEnvironments, "is not supported");
  settings.distributed_type =
      one_of(reader, "distributed_type", kDistributedTypes, "is not what Tessera does");
  if (reader.find("distributed_type") == nullptr) {
    reader.fault(
        root,
        "this is no file of `accelerate config` (distributed_type is missing), and no launch file of "
        "ours (the section 'launch' is missing)");
  }
  read_processes(reader, settings);
  read_precision(reader, settings.environment);
  read_hardware(reader, settings);
  refuse_foreign(reader);
  std::optional<std::string> old_dynamo;
  reader.read("dynamo_backend", old_dynamo);
  std::vector<std::pair<const IdleSection*, const YamlNode*>> idle;
  for (const IdleSection& section : idle_sections()) {
    const YamlNode* const node = reader.section(section.name);
    if (node != nullptr) idle.emplace_back(&section, node);
  }
  const YamlNode* const deepspeed = reader.section("deepspeed_config");
  read_layout_sections(root, reader, settings);
  if (deepspeed != nullptr) read_deepspeed(reader, *deepspeed, settings);
  for (const auto& [section, node] : idle) read_idle(reader, *section, *node, settings);
  if (old_dynamo && truth(*old_dynamo) != false) leave_out_dynamo(*old_dynamo, settings);
}

}  // namespace tessera::launching
