#pragma once
/// What the keys of Accelerate's files mean here. Those of the section megatron_lm_config are flags too.

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launching {

/// A key of `megatron_lm_config`.
struct MegatronKey {
  enum class Kind { integer, number, boolean, text };
  std::string_view name;  ///< with its prefix megatron_lm_
  Kind kind;
  std::string_view help;
  std::string_view same_as = {};  ///< the key that this one is another name of
};

/// All of them, of every version of Accelerate and of its guides.
std::span<const MegatronKey> megatron_keys();

/// What is wrong with a value of that key, as a sentence without subject ("must be an integer, not 'x'");
/// empty if nothing is. A value that asks for a part that is not in this build is refused by its reason.
std::string fault_of(const MegatronKey& key, const std::string& value);

/// The variable that hands it to the script: MEGATRON_LM_TP_DEGREE.
std::string variable_of(const MegatronKey& key);

/// A key of `deepspeed_config` that a script gets as a variable, which the DeepSpeedPlugin reads.
struct DeepSpeedKey {
  std::string_view name, variable;
  std::string_view words;  ///< what it may be, separated by commas; empty = any text
  std::string_view help;
};

std::span<const DeepSpeedKey> deepspeed_keys();

/// As fault_of a MegatronKey.
std::string fault_of(const DeepSpeedKey& key, const std::string& value);

/// What is said of the program that DeepSpeed would start the machines of a hostfile with.
void warn_of_multinode_launcher(const std::string& name, std::vector<std::string>& warnings);

/// A section that some version writes and that has no effect here, with its keys in the spelling of every
/// version.
struct IdleSection {
  std::string_view name;
  std::span<const std::string_view> keys;
  std::string_view reason;
};

/// torch.compile's.
constexpr std::string_view kDynamoSection = "dynamo_config";

std::span<const IdleSection> idle_sections();

/// What is said, once, of choices of a rendezvous: there is only one way to meet.
void warn_of_rendezvous(bool c10d, bool other_network, std::vector<std::string>& warnings);

}  // namespace tessera::launching
