#include "tessera/optim/param_groups.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cctype>
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

}  // namespace tessera
