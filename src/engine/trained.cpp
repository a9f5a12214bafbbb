/// What is trained, when that changes between calls.

#include <span>

#include "tessera/comm/meeting.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

void Engine::set_frozen(std::map<std::string, std::string> names) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(steps_.empty(), "set_frozen() was called while ", steps_.size(), " steps are under way");
  frozen_ = std::move(names);
  frozen_hash_ = 0;
  for (const auto& [name, told] : frozen_)
    frozen_hash_ = hash_bytes(std::as_bytes(std::span(name)), frozen_hash_);
  forget_calls();
  if (params_->call_is_closed()) params_->drop_call();
  const ParamGroups& groups = options_.groups;
  params_->set_frozen([&](const Parameter& parameter) {
    return frozen_.contains(parameter.name()) || (!groups.groups.empty() && groups.freezes(parameter));
  });
  // The next passes do other work, whose first turn is not recorded.
  if (graph_) graph_ = std::make_unique<StreamGraph>(ctx_.stream);
}

}  // namespace tessera
