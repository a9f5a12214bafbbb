#pragma once
/// Parameter groups: which parameters an Optimizer updates alike, and how.

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/autograd/parameter.hpp"
#include "tessera/base/config_optimizer.hpp"
#include "tessera/base/update_state.hpp"

namespace tessera {

/// How the parameters of one group are updated. What is left out is the configuration's.
struct ParamGroup {
  double lr_factor = 1;     ///< of the step's learning rate, where that is given for all groups at once
  double decay_factor = 1;  ///< of the step's weight decay, likewise
  std::optional<double> beta1 = {}, beta2 = {}, eps = {};  ///< Adam and AdamW
  std::optional<double> momentum = {};                     ///< SGD
  std::optional<OptimizerName> rule = {};                  ///< config.name where left out
  /// Its parameters keep their values and count in no norm.
  bool frozen = false;
};

/// Groups, and the group of each parameter. Parameters with the same name are in the same group on all ranks.
struct ParamGroups {
  std::vector<ParamGroup> groups;
  std::function<std::size_t(const Parameter&)> group_of;  ///< a place in `groups`

  /// Megatron's two: group 0 is decayed; group 1 is not: parameters of rank 0 or 1 (biases, norms) and those
  /// whose name matches a glob of config.no_decay.
  static ParamGroups by_decay(const OptimizerConfig& config);
  /// Whether the parameter's group is frozen: for ParamStoreOptions::frozen, so that no gradient of it is
  /// computed. Errors: InvalidArgument if group_of gives no group.
  bool freezes(const Parameter& parameter) const;
};

/// Refuses globs of config.no_decay that match none of `names`, the parameters of the whole model: what a
/// misspelt one was to spare would be decayed. Errors: ConfigError with the glob and names near it.
void check_no_decay(const OptimizerConfig& config, std::span<const std::string> names);

/// What an update does to a group, apart from its rates. Errors: ConfigError naming `place`, the group's
/// number, for values that no update can use or that its rule does not have.
GroupRule rule_of(const ParamGroup& group, const OptimizerConfig& config, std::size_t place);

}  // namespace tessera
