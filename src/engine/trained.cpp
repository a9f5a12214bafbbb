/// What is trained, when that changes between calls.

#include <algorithm>
#include <set>
#include <sstream>

#include "tessera/base/philox.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

void Engine::set_frozen(std::map<std::string, std::string> names) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(steps_.empty(), "set_frozen() was called while ", steps_.size(), " steps are under way");
  frozen_ = std::move(names);
  frozen_hash_ = 0;
  for (const auto& [name, told] : frozen_) frozen_hash_ = site_of(std::to_string(frozen_hash_) + name);
  forget_calls();
  if (params_->call_is_closed()) params_->drop_call();
  const ParamGroups& groups = options_.groups;
  params_->set_frozen([&](const Parameter& parameter) {
    return frozen_.contains(parameter.name()) || (!groups.groups.empty() && groups.freezes(parameter));
  });
  // The next passes do other work, whose first turn is not recorded.
  if (graph_) graph_ = std::make_unique<StreamGraph>(ctx_.stream);
}

double Engine::agree(double targets) const {
  Communicator& world = mesh_->world();
  if (world.size() == 1) return targets;
  const bool counts = holds_head() && mesh_->coordinates().tp == 0;
  const std::vector<double> own{counts ? targets : 0.0, static_cast<double>(frozen_hash_)};
  const Tensor told = Tensor::empty(host_, {world.size(), 2}, DType::f64);
  world.all_gather(host_, Tensor::from(host_, own, {1, 2}), told).wait(host_);
  const auto all = told.to_vector<double>();
  double sum = 0;
  for (std::size_t rank = 0; rank < all.size() / 2; ++rank) {
    sum += all[2 * rank];
    if (all[2 * rank + 1] != all[1]) refuse_frozen(rank);
  }
  return sum;
}

/// `rank` is the first that was given other names than rank 0.
void Engine::refuse_frozen(std::size_t rank) const {
  std::string own;
  for (const auto& [name, told] : frozen_) own += told + "\n";
  std::vector<std::set<std::string>> frozen;
  for (const std::string& text : all_gather_bytes(mesh_->world(), own)) {
    std::istringstream lines(text);
    frozen.emplace_back();
    for (std::string line; std::getline(lines, line);) frozen.back().insert(line);
  }
  std::vector<std::string> differing;
  std::set_symmetric_difference(frozen[0].begin(), frozen[0].end(), frozen[rank].begin(), frozen[rank].end(),
                                std::back_inserter(differing));
  const bool first = frozen[0].contains(differing.at(0));
  throw InvalidArgument(detail::concat("ranks do not train the same parameters: '", differing[0],
                                       "' is frozen on rank ", first ? 0 : rank, " and trained on rank ",
                                       first ? rank : 0, ". Set requires_grad alike on every rank"));
}

}  // namespace tessera
