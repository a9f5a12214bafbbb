#include "optim/update_rules.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

double fraction(std::size_t place, const char* name, double value) {
  TESSERA_ENSURE(ConfigError, value >= 0 && value < 1, "parameter group ", place, " has ", name, " ", value,
                 "; it must lie in [0, 1)");
  return value;
}

void check_adam(const OptimizerConfig& config) {
  TESSERA_ENSURE(ConfigError, config.betas.size() == 2, "optimizer.betas has ", config.betas.size(),
                 " values; Adam needs two");
  for (const double beta : config.betas) {
    TESSERA_ENSURE(ConfigError, beta >= 0 && beta < 1, "optimizer.betas contains ", beta,
                   "; each must lie in [0, 1)");
  }
  TESSERA_ENSURE(ConfigError, config.eps > 0, "optimizer.eps is ", config.eps, "; it must be > 0");
}

GroupRule settle_adam(const ParamGroup& group, const OptimizerConfig& config, std::size_t place) {
  TESSERA_ENSURE(ConfigError, !group.momentum, "parameter group ", place,
                 " has a momentum; adam and adamw have none: leave it out");
  GroupRule rule;
  rule.beta1 = fraction(place, "beta1", group.beta1.value_or(config.betas[0]));
  rule.beta2 = fraction(place, "beta2", group.beta2.value_or(config.betas[1]));
  rule.eps = group.eps.value_or(config.eps);
  TESSERA_ENSURE(ConfigError, rule.eps > 0, "parameter group ", place, " has eps ", rule.eps,
                 "; it must be > 0");
  return rule;
}

void update_adam(const ExecCtx& ctx, const OptimizerConfig&, const RuleInput& in) {
  ops::adam(ctx, in.update_state, in.groups, in.gradient, in.weights, in.state[0], in.state[1]);
}

void check_sgd(const OptimizerConfig& config) {
  TESSERA_ENSURE(ConfigError, config.momentum >= 0 && config.momentum < 1, "optimizer.momentum is ",
                 config.momentum, "; it must lie in [0, 1)");
  TESSERA_ENSURE(ConfigError, !config.nesterov || config.momentum > 0,
                 "optimizer.nesterov needs momentum > 0");
}

GroupRule settle_sgd(const ParamGroup& group, const OptimizerConfig& config, std::size_t place) {
  TESSERA_ENSURE(ConfigError, !(group.beta1 || group.beta2 || group.eps), "parameter group ", place,
                 " has betas or eps; sgd has none: leave them out");
  GroupRule rule;
  rule.momentum = fraction(place, "momentum", group.momentum.value_or(config.momentum));
  TESSERA_ENSURE(ConfigError, !config.nesterov || rule.momentum > 0, "parameter group ", place,
                 " has no momentum; optimizer.nesterov needs one");
  return rule;
}

void update_sgd(const ExecCtx& ctx, const OptimizerConfig& config, const RuleInput& in) {
  ops::sgd(ctx, in.update_state, in.groups, in.gradient, in.weights, in.state[0], config.nesterov);
}

bool always(const GroupRule&) { return true; }
bool has_momentum(const GroupRule& rule) { return rule.momentum > 0; }

const UpdateRule kAdamW{OptimizerName::adamw, true,   {"adam_m", "adam_v"}, check_adam,
                        settle_adam,          always, update_adam};
const UpdateRule kAdam{OptimizerName::adam, false,  {"adam_m", "adam_v"}, check_adam,
                       settle_adam,         always, update_adam};
const UpdateRule kSgd{OptimizerName::sgd, false,        {"momentum"}, check_sgd,
                      settle_sgd,         has_momentum, update_sgd};
const std::array kRules{&kAdamW, &kAdam, &kSgd};

}  // namespace

const UpdateRule& update_rule(OptimizerName name) {
  const auto* found =
      std::find_if(kRules.begin(), kRules.end(), [&](const UpdateRule* rule) { return rule->name == name; });
  TESSERA_ENSURE(InternalError, found != kRules.end(), "optimizer ", static_cast<int>(name), " has no rule");
  return **found;
}

const UpdateRule& update_rule(const ParamGroup& group, const OptimizerConfig& config) {
  return update_rule(group.rule.value_or(config.name));
}

GroupRule rule_of(const ParamGroup& group, const OptimizerConfig& config, std::size_t place) {
  TESSERA_ENSURE(ConfigError, std::isfinite(group.lr_factor) && std::isfinite(group.decay_factor),
                 "parameter group ", place, " has lr_factor ", group.lr_factor, " and decay_factor ",
                 group.decay_factor, "; they must be finite");
  return update_rule(group, config).settle(group, config, place);
}

}  // namespace tessera
