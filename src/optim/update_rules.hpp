#pragma once
/// The optimizers, as rows of one table.

#include <vector>

#include "tessera/ops/optimizer.hpp"
#include "tessera/optim/param_groups.hpp"

namespace tessera {

/// What an update of neighbouring elements reads and writes.
struct RuleInput {
  Tensor update_state;
  ops::ElementGroups groups;
  Tensor gradient;
  ops::MainWeights weights;
  std::vector<Tensor> state;  ///< in the rule's order; undefined where no group keeps any
};

struct UpdateRule {
  OptimizerName name;
  bool decoupled;  ///< weight decay acts on the weights; false: it is added to the gradient
  /// What it keeps of each element, as checkpoints name it.
  std::vector<const char*> state;
  /// Errors: ConfigError for values that no update can use.
  void (*check)(const OptimizerConfig&);
  /// What it does to a group, apart from rates. Errors: ConfigError naming `place`, the group's number.
  GroupRule (*settle)(const ParamGroup& group, const OptimizerConfig& config, std::size_t place);
  bool (*keeps_state)(const GroupRule&);
  void (*update)(const ExecCtx& ctx, const OptimizerConfig& config, const RuleInput& input);
};

const UpdateRule& update_rule(OptimizerName name);
/// Of one group: its own rule, or the configuration's.
const UpdateRule& update_rule(const ParamGroup& group, const OptimizerConfig& config);

}  // namespace tessera
