#include "tessera/optim/param_groups.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>
#include <string>

#include "base/suggest.hpp"

namespace tessera {
namespace {

bool matches(const std::string& glob, const std::string& name) {
  return fnmatch(glob.c_str(), name.c_str(), 0) == 0;
}

bool decays(const Parameter& parameter, const std::vector<std::string>& no_decay) {
  if (parameter.shape().rank() <= 1) return false;
  return std::none_of(no_decay.begin(), no_decay.end(),
                      [&](const std::string& glob) { return matches(glob, parameter.name()); });
}

/// "decoder.layers.*.norm.weight" for that of every layer: a name with * in place of its numbers.
std::string for_every_layer(const std::string& name) {
  std::string glob;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit) glob += c;
    if (digit && glob.ends_with('.')) glob += '*';
  }
  return glob;
}

}  // namespace

ParamGroups ParamGroups::by_decay(const OptimizerConfig& config) {
  return {{{}, {.decay_factor = 0}}, [no_decay = config.no_decay](const Parameter& parameter) {
            return decays(parameter, no_decay) ? std::size_t{0} : std::size_t{1};
          }};
}

void check_no_decay(const OptimizerConfig& config, std::span<const std::string> names) {
  std::set<std::string> known;
  for (const std::string& name : names) known.insert(for_every_layer(name));
  const std::vector<std::string_view> candidates(known.begin(), known.end());
  for (const std::string& glob : config.no_decay) {
    const bool found =
        std::any_of(names.begin(), names.end(), [&](const auto& name) { return matches(glob, name); });
    TESSERA_ENSURE(ConfigError, found, "optimizer.no_decay: \"", glob, "\" matches no parameter of the model",
                   suggest(glob, candidates));
  }
}

bool ParamGroups::freezes(const Parameter& parameter) const {
  const std::size_t group = group_of(parameter);
  TESSERA_CHECK(group < groups.size(), "parameter ", parameter.name(), " was put into group ", group,
                "; there are ", groups.size(), " groups, from 0");
  return groups[group].frozen;
}

GroupRule rule_of(const ParamGroup& group, const OptimizerConfig& config, std::size_t place) {
  const bool adam = config.name != OptimizerName::sgd;
  TESSERA_ENSURE(ConfigError, adam || !(group.beta1 || group.beta2 || group.eps), "parameter group ", place,
                 " has betas or eps; sgd has none: leave them out");
  TESSERA_ENSURE(ConfigError, !adam || !group.momentum, "parameter group ", place,
                 " has a momentum; adam and adamw have none: leave it out");
  TESSERA_ENSURE(ConfigError, std::isfinite(group.lr_factor) && std::isfinite(group.decay_factor),
                 "parameter group ", place, " has lr_factor ", group.lr_factor, " and decay_factor ",
                 group.decay_factor, "; they must be finite");
  const auto fraction = [&](const char* name, double value) {
    TESSERA_ENSURE(ConfigError, value >= 0 && value < 1, "parameter group ", place, " has ", name, " ", value,
                   "; it must lie in [0, 1)");
    return value;
  };
  GroupRule rule;
  if (!adam) {
    rule.momentum = fraction("momentum", group.momentum.value_or(config.momentum));
    TESSERA_ENSURE(ConfigError, !config.nesterov || rule.momentum > 0, "parameter group ", place,
                   " has no momentum; optimizer.nesterov needs one");
    return rule;
  }
  rule.beta1 = fraction("beta1", group.beta1.value_or(config.betas[0]));
  rule.beta2 = fraction("beta2", group.beta2.value_or(config.betas[1]));
  rule.eps = group.eps.value_or(config.eps);
  TESSERA_ENSURE(ConfigError, rule.eps > 0, "parameter group ", place, " has eps ", rule.eps,
                 "; it must be > 0");
  return rule;
}

}  // namespace tessera
