#include "launch/accelerate_keys.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "launch/words.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

using Kind = ScriptKey::Kind;

constexpr ScriptKey kMegatronKeys[] = {
#include "launch/megatron_keys.inc"
    {"megatron_lm_learning_rate_decay_iters", Kind::integer, "the same as lr_decay_iters",
     "megatron_lm_lr_decay_iters"},
};

constexpr ScriptKey deepspeed_key(std::string_view name, std::string_view variable, std::string_view words,
                                  std::string_view help) {
  return {name, words.empty() ? Kind::text : Kind::word, help, {}, variable, words};
}

constexpr ScriptKey kDeepSpeedKeys[] = {
    deepspeed_key("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "0,1,2,3",
                  "what data ranks share out: 1 the optimizer's state, 2 gradients too, 3 weights too (2)"),
    deepspeed_key("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "", "DeepSpeed's JSON"),
    deepspeed_key("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "",
                  "the norm gradients are clipped to"),
    deepspeed_key("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
                  "none,cpu,nvme", "where the optimizer's state lies"),
    deepspeed_key("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none,cpu",
                  "where weights lie, with zero_stage 3"),
    deepspeed_key("offload_optimizer_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "",
                  "a folder, for offload_optimizer_device nvme"),
    deepspeed_key("offload_param_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "none",
                  "none: weights can lie in host memory, not on disk"),
    deepspeed_key("zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true,false",
                  "without effect: each process makes the model and keeps its share"),
    deepspeed_key("zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true,false",
                  "without effect: save_model always saves whole weights"),
};

constexpr std::array<std::string_view, 10> kDynamoKeys{"dynamo_backend",
                                                       "dynamo_mode",
                                                       "dynamo_use_fullgraph",
                                                       "dynamo_use_dynamic",
                                                       "dynamo_use_regional_compilation",
                                                       "backend",
                                                       "mode",
                                                       "use_fullgraph",
                                                       "use_dynamic",
                                                       "use_regional_compilation"};
constexpr std::array<std::string_view, 3> kIpexKeys{"ipex", "ipex_enabled", "use_xpu"};
constexpr std::array<std::string_view, 2> kMpirunKeys{"mpirun_hostfile", "mpirun_ccl"};

constexpr std::array<IdleSection, 3> kIdleSections{{
    {kDynamoSection, kDynamoKeys,
     "Tessera's kernels are compiled already, and torch.compile has no part in them"},
    {"ipex_config", kIpexKeys,
     "Intel's extension of PyTorch and Intel's GPUs have no part in Tessera, which has kernels of its own"},
    {"mpirun_config", kMpirunKeys,
     "this launcher starts the processes of this machine itself; for those of a hostfile call mpirun"},
}};

bool is_word_of(const ScriptKey& key, const std::string& value) {
  const std::vector<std::string> words = split(key.words, ',');
  return std::find(words.begin(), words.end(), lower(value)) != words.end();
}

/// Values that ask for what this build does not have.
std::string refusal_of(std::string_view name, const std::string& value) {
  std::int64_t size = 0;
  const bool several = parses(value, size) && size > 1;
  if (several && name.find("expert_tensor") != std::string_view::npos) {
    return "asks for other tensor ranks of experts than megatron_lm_tp_degree says; leave it at 1";
  }
  return {};
}

}  // namespace

std::span<const ScriptKey> megatron_keys() { return kMegatronKeys; }

std::span<const ScriptKey> deepspeed_keys() { return kDeepSpeedKeys; }

std::span<const IdleSection> idle_sections() { return kIdleSections; }

void warn_of_rendezvous(bool c10d, bool other_network, std::vector<std::string>& warnings) {
  if (!c10d && !other_network) return;
  warnings.push_back(detail::concat(c10d ? "rdzv_backend c10d" : "", c10d && other_network ? " and " : "",
                                    other_network ? "same_network false" : "",
                                    c10d && other_network ? " have" : " has",
                                    " no effect: the launchers always meet at main_process_ip and "
                                    "main_process_port, which every machine must reach"));
}

std::string fault_of(const ScriptKey& key, const std::string& value) {
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
    case Kind::word:
      if (!is_word_of(key, value)) return detail::concat("must be one of ", key.words, ", not '", value, "'");
      break;
    case Kind::text:
      break;
  }
  return refusal_of(key.name, value);
}

void warn_of_multinode_launcher(const std::string& name, std::vector<std::string>& warnings) {
  const std::string word = lower(name);
  if (word.empty() || word == "standard" || word == "pdsh") return;
  warnings.push_back(detail::concat("deepspeed_multinode_launcher ", name,
                                    " has no effect: machines of a hostfile are reached over ssh"));
}

std::string value_for_script(const ScriptKey& key, const std::string& value) {
  return key.kind == Kind::word ? lower(value) : value;
}

std::string variable_of(const ScriptKey& key) {
  if (!key.variable.empty()) return std::string(key.variable);
  std::string name(key.same_as.empty() ? key.name : key.same_as);
  for (char& c : name) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return name;
}

}  // namespace tessera::launching
