#pragma once
/// What the keys of Accelerate's files mean here. Those of the section megatron_lm_config are flags too.

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launching {

/// A key of `megatron_lm_config` or `deepspeed_config` that the script gets as a variable.
struct ScriptKey {
  enum class Kind { integer, number, boolean, text, word };
  std::string_view name;
  Kind kind;
  std::string_view help;
  std::string_view same_as = {};   ///< the key that this one is another name of
  std::string_view variable = {};  ///< empty = the name in capital letters
  std::string_view words = {};     ///< what a word may be, separated by commas
};

/// Megatron's, of every version of Accelerate and of its guides, with the prefix megatron_lm_.
std::span<const ScriptKey> megatron_keys();
/// What the DeepSpeedPlugin reads.
std::span<const ScriptKey> deepspeed_keys();

/// What is wrong with a value of that key, as a sentence without subject ("must be an integer, not 'x'");
/// empty if nothing is. A value that asks for a part that is not in this build is refused by its reason.
std::string fault_of(const ScriptKey& key, const std::string& value);

/// The variable that hands it to the script: MEGATRON_LM_TP_DEGREE.
std::string variable_of(const ScriptKey& key);

/// A value as the script gets it.
std::string value_for_script(const ScriptKey& key, const std::string& value);

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
