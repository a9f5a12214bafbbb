/// What is trained, when that changes between calls.

#include <span>

#include "engine/ranks.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

void Engine::set_frozen(std::map<std::string, std::string> names) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(steps_.empty(), "set_frozen() was called while ", steps_.size(), " steps are under way");
  frozen_ = std::move(names);
  frozen_hash_ = 0;
  for (const auto& [name, told] : frozen_)
    frozen_hash_ = content_hash(std::as_bytes(std::span(name)), frozen_hash_);
  frozen_changed_ = true;
  forget_calls();
  if (params_->gradient().call_is_closed()) params_->gradient().drop_call();
  const ParamGroups& groups = options_.groups;
  params_->set_frozen([&](const Parameter& parameter) {
    return frozen_.contains(parameter.name()) || (!groups.groups.empty() && groups.freezes(parameter));
  });
  // The next passes do other work, whose first turn is not recorded.
  graph_.forget();
}

/// Before the update that acts on it: one rank's parameters may be too many kinds, and then no rank updates.
void Engine::settle_trained() {
  if (!frozen_changed_) return;
  on_every_rank(host_, mesh_->world(), [this] { optimizer_->find_active(); });
  frozen_changed_ = false;
}

double Engine::grad_norm() {
  settle_trained();
  return optimizer_->grad_norm();
}

}  // namespace tessera
