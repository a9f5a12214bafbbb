#include "engine/saved_parts.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/config_file.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

std::string describe(const Placement& placement) {
  return placement.is_replicated() ? "replicate" : detail::concat("shard(", placement.dim(), ")");
}

/// Appends boxes that are read from the device one by one, times `factor`.
void add_boxes(std::vector<CheckpointTensor>& shard, Engine& engine, const StatePiece& piece,
               double factor = 1) {
  for (const auto& [place, values] : piece.boxes()) {
    shard.push_back({.name = piece.name(),
                     .dtype = DType::f32,
                     .shape = piece.parameter->placement().global(),
                     .slice = {place.global, place.shape},
                     .placement = describe(piece.parameter->placement()),
                     .read = [&world = engine.mesh().world(), ctx = engine.ctx(), values = values, factor] {
                       heartbeat(world);
                       Tensor box = values.read(ctx);
                       if (factor != 1) {
                         box = Tensor::empty(ctx, box.shape(), DType::f32);
                         ops::axpby(ctx, static_cast<float>(factor), values.values, 0.0f, box);
                       }
                       const auto host = std::make_shared<Tensor>(box.to_host());
                       return std::shared_ptr<const std::byte>(host, static_cast<std::byte*>(host->raw()));
                     }});
  }
}

bool has_accumulated(Engine& engine, const StateParts& parts) {
  return engine.options().trainable && parts.optimizer && engine.params().gradient().finished_calls() > 0;
}

/// The optimizer's part of the run's state.
nlohmann::json update_state_json(const UpdateState& state) {
  return {{"optimizer_updates", state.updates},
          {"loss_scale", state.loss_scale},
          {"loss_scale_good_steps", state.good_steps},
          {"loss_scale_hysteresis", state.hysteresis}};
}

/// Updates of parameters that have not had all of them, on every rank. Collective.
nlohmann::json fewer_updates(Engine& engine) {
  nlohmann::json fewer = nlohmann::json::object();
  if (!engine.options().trainable) return fewer;
  for (const auto& [name, count] : update_counts(engine)) {
    if (count != engine.optimizer().updates()) fewer[name] = count;
  }
  return fewer;
}

}  // namespace

std::vector<StatePiece> optimizer_pieces(Engine& engine, PieceSet set, const StateParts& parts) {
  if (!engine.options().trainable || !parts.optimizer) return {};
  return engine.optimizer().pieces(set);
}

std::vector<StatePiece> gradient_pieces(const ParamStore& store, PieceSet set) {
  std::vector<StatePiece> pieces = store.gradient_pieces(set);
  std::erase_if(pieces, [&](const StatePiece& piece) {
    return !store.gradient().trained()[store.layout().index_of(*piece.parameter)];
  });
  return pieces;
}

std::vector<Shard> shards_of(Engine& engine, const StateParts& parts) {
  const MeshCoordinates& at = engine.mesh().coordinates();
  const std::string stage = detail::concat("tp_", at.tp, "_pp_", at.pp),
                    data = detail::concat("_dp_", engine.mesh().replicas().rank());
  Shard model{.file = detail::concat("model_", stage, engine.mesh().shape().replicas() > 1 ? data : "",
                                     ".safetensors"),
              .tensors = {}};
  for (const StatePiece& piece : engine.params().pieces(PieceSet::owned))
    add_boxes(model.tensors, engine, piece);
  Shard optimizer{.file = detail::concat("optimizer_", stage, data, ".safetensors"), .tensors = {}};
  for (const StatePiece& piece : optimizer_pieces(engine, PieceSet::owned, parts))
    add_boxes(optimizer.tensors, engine, piece);
  if (has_accumulated(engine, parts)) {
    for (const StatePiece& piece : gradient_pieces(engine.params(), PieceSet::owned))
      add_boxes(optimizer.tensors, engine, piece, engine.params().gradient().scale());
  }
  return {std::move(model), std::move(optimizer)};
}

std::uint64_t bytes_of(const std::vector<Shard>& shards) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards) {
    for (const CheckpointTensor& t : shard.tensors)
      bytes += static_cast<std::uint64_t>(t.slice.shape.numel()) * size_of(t.dtype);
  }
  return bytes;
}

CheckpointState checkpoint_state(Engine& engine, const RunState& run, const StateParts& parts) {
  CheckpointState state;
  state.step = run.step;
  state.consumed_samples = run.consumed_samples;
  state.config_json = nlohmann::json{{"yaml", to_yaml(run.config)}}.dump();
  state.rng_json = nlohmann::json{{"seed", engine.progress().seed}, {"step", run.step}}.dump();
  state.data_json = nlohmann::json{{"consumed_samples", run.consumed_samples}}.dump();
  nlohmann::json user =
      update_state_json(engine.options().trainable ? engine.optimizer().update_state() : UpdateState{});
  user["tokens"] = run.tokens;
  user["skipped"] = run.skipped;
  user["fewer_updates"] = fewer_updates(engine);
  if (run.tokenizer) user["tokenizer"] = nlohmann::json::parse(to_json(*run.tokenizer));
  if (has_accumulated(engine, parts))
    user["accumulated"] = {{"calls", engine.params().gradient().finished_calls()},
                           {"samples", engine.progress().samples}};
  state.user_json = user.dump();
  state.run = run.run;
  return state;
}

}  // namespace tessera
