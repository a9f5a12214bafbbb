#include "tessera/engine/moments.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/ranks.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// What this rank holds of `whole` goes where it belongs.
void keep_own(const ExecCtx& ctx, const ExecCtx& host, const std::vector<StatePiece>& pieces,
              const std::string& name, const Tensor& whole) {
  for (const StatePiece& piece : pieces) {
    if (piece.parameter->name() != name) continue;
    for (const auto& [place, values] : piece.boxes()) {
      Tensor box = whole.view(piece.parameter->placement().global());
      for (int i = 0; i < place.shape.rank(); ++i) box = box.narrow(i, place.global[i], place.shape[i]);
      const Tensor own = Tensor::empty(host, place.shape, DType::f32);
      ops::copy(host, box, own);
      values.write(ctx, static_cast<const float*>(own.raw()));
    }
  }
}

}  // namespace

void load_moments(Engine& engine, const std::string& kind, const HfModel* moments) {
  const std::vector<StatePiece> pieces = engine.optimizer().pieces(PieceSet::held, kind);
  const ExecCtx host = ExecCtx::cpu(1);
  Communicator& world = engine.mesh().world();
  const bool first = world.rank() == 0;
  const std::vector<TensorSpec> specs = first ? moments->tensors() : std::vector<TensorSpec>{};
  const std::string list = broadcast_bytes(world, [&] {
    nlohmann::json names = nlohmann::json::array();
    for (const TensorSpec& spec : specs) names.push_back({spec.name, spec.shape.numel()});
    return names.dump();
  }());
  for (const auto& item : nlohmann::json::parse(list)) {
    const auto name = item[0].get<std::string>();
    const Tensor whole = Tensor::empty(host, {item[1].get<std::int64_t>()}, DType::f32);
    if (first)
      moments->read_f32(name, {static_cast<float*>(whole.raw()), static_cast<std::size_t>(whole.numel())});
    if (world.size() > 1) world.broadcast(host, whole, 0).wait(host);
    keep_own(engine.ctx(), host, pieces, name, whole);
  }
}

std::map<std::string, std::int64_t> update_counts(Engine& engine) {
  nlohmann::json own = nlohmann::json::object();
  for (const Parameter* parameter : engine.params().parameters())
    own[parameter->name()] = engine.optimizer().updates_of(*parameter);
  std::map<std::string, std::int64_t> counts;
  for (const std::string& text : all_gather_bytes(engine.mesh().world(), own.dump())) {
    counts.merge(nlohmann::json::parse(text).get<std::map<std::string, std::int64_t>>());
  }
  return counts;
}

void set_update_counts(Engine& engine, const std::map<std::string, std::int64_t>& counts) {
  UpdateState state = engine.optimizer().update_state();
  state.updates = 0;
  for (const auto& [name, count] : counts) state.updates = std::max(state.updates, count);
  engine.optimizer().set_update_state(state);
  engine.optimizer().set_updates_of([&](const Parameter& parameter) {
    const auto found = counts.find(parameter.name());
    return found == counts.end() ? std::int64_t{0} : found->second;
  });
}

}  // namespace tessera
