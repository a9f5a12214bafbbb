#include "engine/plan_memory.hpp"

#include <algorithm>

#include "engine/dry_terms.hpp"
#include "tessera/base/families.hpp"
#include "tessera/engine/build.hpp"

namespace tessera::detail {
namespace {

std::unique_ptr<DryRank> dry_rank(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank) {
  Config config = layout.config;
  // Where it is still to be settled, only what does not depend on it is asked.
  if (config.training.recompute == Recompute::automatic) config.training.recompute = Recompute::none;
  return std::make_unique<DryRank>(
      [&](ProcessMesh& mesh) { return make_model(config, mesh, pieces, {DeviceType::meta}); },
      EngineOptions::from(config), layout.mesh, rank, size_of(config, config.training.micro_batch_size),
      // Who plans without a GPU and offloads to host memory plans for one elsewhere.
      DryDevice{.memory_apart = config.device.type != DeviceChoice::cpu,
                .logit_bytes = is_for_cpu(config.device) ? 0 : ExecCtx::kLogitBytesOnCuda});
}

/// Layers are alike, so which ones a piece has does not matter, but where an encoder comes first.
std::string key_of(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank) {
  const ParallelConfig& p = layout.config.parallel;
  std::string key = concat(coordinates_of(layout.mesh, rank).tp, " of ", p.tensor, " ", p.sequence, " ",
                           layout.mesh.pp > 1, name_of(p.schedule));
  for (const ModelPiece& piece : pieces) {
    key += concat(" | ", piece.embedding, " ", piece.num_layers, " ", piece.head);
    if (spec_of(layout.config.model.family).encoder_decoder) key += concat(" from ", piece.first_layer);
  }
  return key;
}

std::string offload_key(const OffloadConfig& c) {
  if (!c.any()) return "";
  return concat(" ", name_of(c.optimizer), " ", name_of(c.gradients), " ", name_of(c.parameters), " ",
                name_of(c.activations), " ", c.ratio);
}

}  // namespace

bool is_for_cpu(const DeviceConfig& config) {
  return config.type != DeviceChoice::cuda && device_of(config).is_cpu();
}

const RankPasses& DryRuns::passes(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank) {
  const TrainingConfig& t = layout.config.training;
  const std::string key =
      concat(key_of(layout, pieces, rank), " ; ", t.micro_batch_size, " ", name_of(t.recompute), " ",
             name_of(t.recompute_method), " ", t.recompute_layers, " ", t.recompute_partition);
  const ParallelConfig& p = layout.config.parallel;
  const std::string offload = offload_key(layout.config.offload);
  // Then passes depend on the data ranks.
  const bool shared = p.zero_stage > 1 && (layout.mesh.replicas() > 1 || !offload.empty());
  const auto [slot, fresh] = passes_.try_emplace(
      shared ? concat(key, " ; ", layout.mesh.replicas(), " ", p.zero_stage, " ", name_of(p.zero_reshard),
                      " ", p.zero_group.value_or(0), " ", name_of(p.gradient_dtype), offload)
             : key + offload);
  if (!fresh) return slot->second;
  const std::shared_ptr<DryRank> run = dry_rank(layout, pieces, rank);
  if (shared) slot->second.walk = [run](const std::vector<Action>& column) { return run->walk(column); };
  const std::int64_t before = bytes_of(run->persistent(), "tables");
  slot->second.pieces = run->pieces(traits_of(layout.config.parallel.schedule).splits_backward);
  slot->second.tables = bytes_of(run->persistent(), "tables") - before;
  slot->second.batch_bytes = run->batch_bytes();
  slot->second.host_bytes = run->host_bytes_of_pass();
  return slot->second;
}

const RankStore& DryRuns::store(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank) {
  const std::string key =
      concat(key_of(layout, pieces, rank), " ; ", layout.mesh.replicas(), " ",
             layout.config.parallel.zero_stage, " ", layout.config.parallel.zero_group.value_or(0), " ",
             name_of(layout.config.parallel.gradient_dtype), offload_key(layout.config.offload));
  const auto [slot, fresh] = stores_.try_emplace(key);
  if (!fresh) return slot->second;
  const auto run = dry_rank(layout, pieces, rank);
  slot->second = {run->parameters(), run->persistent(), run->once(), run->elsewhere()};
  return slot->second;
}

std::vector<std::vector<ModelPiece>> DryRuns::pieces(const Config& config) {
  return all_pieces_of(config, [this](const Config& asked) {
    if (!costs_) costs_ = part_costs(asked);
    return *costs_;
  });
}

std::int64_t DryRuns::agreement_bytes(const Plan& layout, const std::vector<ModelPiece>& pieces) {
  return layout.mesh.world() == 1 ? 0 : dry_rank(layout, pieces, 0)->agreement_bytes();
}

std::vector<TrafficTerm> DryRuns::once(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank) {
  std::vector<TrafficTerm> sent = dry_rank(layout, pieces, rank)->once().sent;
  Elsewhere crossed;
  take_crossed(sent, crossed);
  return sent;
}

std::int64_t persistent_bytes(const std::vector<MemoryTerm>& terms) {
  std::int64_t sum = 0;
  for (const std::string_view name : {"weights", "16-bit weights", "gradients", "optimizer"})
    sum += bytes_of(terms, name);
  return sum;
}

Needs needs_of(const RankPasses& passes, const RankStore& store, const Columns& columns, int stage) {
  Needs needs{.column = columns.run(stage, passes.pieces, passes.batch_bytes, passes.walk), .memory = {}};
  needs.memory = memory_of(store.persistent, needs.column, store.once.peak);
  for (MemoryTerm& term : needs.memory) term.bytes += term.name == "tables" ? passes.tables : 0;
  return needs;
}

LayoutMemory::LayoutMemory(const Plan& layout, DryRuns& runs)
    : layout_(layout),
      runs_(runs),
      pieces_(runs.pieces(layout.config)),
      columns_(layout.config.parallel.schedule, layout.mesh.pp, pieces_per_stage(layout.config.parallel),
               layout.micro_batches) {}

MostMemory LayoutMemory::with(const TrainingConfig& training) const {
  Plan layout = layout_;
  layout.config.training = training;
  MostMemory most{.persistent_bytes = persistent_bytes()};
  for (int stage = 0; stage < layout.mesh.pp; ++stage) {
    const std::vector<ModelPiece>& pieces = pieces_[static_cast<std::size_t>(stage)];
    const int rank = rank_of(layout.mesh, {.pp = stage});
    const Needs needs =
        needs_of(runs_.passes(layout, pieces, rank), runs_.store(layout, pieces, rank), columns_, stage);
    most.bytes = std::max(most.bytes, bytes_of(needs.memory));
  }
  return most;
}

std::int64_t LayoutMemory::persistent_bytes() const {
  std::int64_t most = 0;
  for (int stage = 0; stage < layout_.mesh.pp; ++stage) {
    const RankStore& store =
        runs_.store(layout_, pieces_[static_cast<std::size_t>(stage)], rank_of(layout_.mesh, {.pp = stage}));
    most = std::max(most, detail::persistent_bytes(store.persistent));
  }
  return most;
}

std::int64_t LayoutMemory::most_layers() const {
  std::int64_t most = 0;
  for (const auto& pieces : pieces_) {
    for (const ModelPiece& piece : pieces) most = std::max(most, piece.num_layers);
  }
  return most;
}

}  // namespace tessera::detail
