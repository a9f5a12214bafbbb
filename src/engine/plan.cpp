#include "tessera/engine/plan.hpp"

#include <algorithm>
#include <array>

#include "engine/plan_activations.hpp"
#include "engine/plan_declared.hpp"
#include "engine/plan_memory.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

using detail::Activations;
using detail::DeclaredRank;
using detail::PaperGroup;

constexpr std::int64_t kMostPasses = 3'000'000;
/// Micro-batches of the schedule of a single stage: the others look the same.
constexpr std::int64_t kShownMicroBatches = 4;
/// Messages a stage holds besides its activations: receives posted ahead, and one on its way out.
constexpr std::int64_t kMessages = 3;

std::vector<ModelPiece> pieces_in_order(const Config& config, const Schedule& schedule) {
  std::vector<ModelPiece> pieces(static_cast<std::size_t>(schedule.pieces()));
  for (int stage = 0; stage < schedule.stages; ++stage) {
    const std::vector<ModelPiece> own = pieces_of(config, stage);
    for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
      pieces[static_cast<std::size_t>(schedule.piece_of(stage, chunk))] =
          own[static_cast<std::size_t>(chunk)];
    }
  }
  return pieces;
}

int most_in_flight(const std::vector<Action>& column, int chunks) {
  const std::vector<std::int64_t> one(static_cast<std::size_t>(chunks), 1);
  return static_cast<int>(detail::peak_held(column, one, one));
}

/// Activations and gradients to neighbouring pieces on other stages.
void add_pipeline_traffic(const Plan& plan, int stage, const DeclaredRank& declared,
                          std::vector<TrafficTerm>& terms) {
  const Schedule& schedule = plan.schedule;
  std::int64_t forward = 0, backward = 0;
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    const int piece = schedule.piece_of(stage, chunk);
    if (piece + 1 < schedule.pieces() && schedule.stage_of(piece + 1) != stage)
      forward += declared.output_bytes(chunk);
    if (piece > 0 && schedule.stage_of(piece - 1) != stage) backward += declared.input_bytes(chunk);
  }
  if (forward > 0) terms.push_back({"pp", "activations", forward * plan.micro_batches});
  if (backward > 0) terms.push_back({"pp", "gradients", backward * plan.micro_batches});
}

/// A message of 64 bytes to each other rank (agree), and two fp64 numbers a step that go around all ranks.
void add_world_traffic(const MeshShape& mesh, int rank, std::vector<TrafficTerm>& terms) {
  if (mesh.world() == 1) return;
  const std::int64_t bytes = detail::Collective{rank, mesh.world()}.all_reduce(1, 8);
  terms.push_back({"world", "agreement on the batch", 64 * (mesh.world() - 1)});
  for (const char* name : {"loss", "gradient norm"}) terms.push_back({"world", name, bytes});
}

/// One tensor rank of one stage; what differs between its data ranks is added per rank.
RankPlan plan_stage(const Plan& plan, const DeclaredRank& declared, const Activations& activations,
                    int stage) {
  RankPlan rank;
  rank.at.pp = stage;
  rank.pieces = pieces_of(plan.config, stage);
  rank.parameters = declared.parameters();
  rank.most_in_flight =
      most_in_flight(plan.schedule.actions[static_cast<std::size_t>(stage)], plan.schedule.chunks);
  rank.memory = detail::memory_of_stage(plan, stage, rank.pieces, declared, activations);
  for (const ModelPiece& piece : rank.pieces)
    activations.add_traffic(piece, plan.micro_batches, rank.traffic);
  add_pipeline_traffic(plan, stage, declared, rank.traffic);
  return rank;
}

void plan_ranks(Plan& plan) {
  const MeshShape& mesh = plan.mesh;
  const PaperGroup tensor = detail::make_paper_group(mesh.tp);
  plan.ranks.resize(static_cast<std::size_t>(mesh.world()));
  for (int stage = 0; stage < mesh.pp; ++stage) {
    for (int t = 0; t < mesh.tp; ++t) {
      const DeclaredRank declared(plan.config, mesh, tensor, stage, t);
      const RankPlan common = plan_stage(plan, declared, Activations(plan.config, t), stage);
      for (int data = 0; data < mesh.dp; ++data) {
        const int number = rank_of(mesh, {.tp = t, .dp = data, .pp = stage});
        RankPlan& rank = plan.ranks[static_cast<std::size_t>(number)] = common;
        rank.rank = number;
        rank.at = coordinates_of(mesh, number);
        declared.add_traffic(data, rank.traffic);
        add_world_traffic(mesh, number, rank.traffic);
      }
    }
  }
}

void plan_bubble(Plan& plan) {
  for (const ModelPiece& piece : plan.pieces) plan.times.push_back(detail::pass_times(plan.config, piece));
  if (plan.mesh.pp == 1) return;
  plan.bubble = simulate(plan.schedule, plan.times).bubble;
  plan.even_bubble = simulate(plan.schedule, {PassTimes{}}).bubble;
}

}  // namespace

namespace detail {

Plan plan_layout(const Config& config, std::optional<std::int64_t> processes) {
  refuse_without_data(config.model, "a plan");
  Plan plan;
  plan.config = resolve(config);
  plan.config.parallel = resolve_layout(plan.config, processes);
  plan.mesh = mesh_shape(plan.config.parallel, static_cast<int>(processes_needed(plan.config)));
  const TrainingConfig& t = plan.config.training;
  plan.micro_batches = t.global_batch_size / (t.micro_batch_size * plan.mesh.dp);
  const std::int64_t shown =
      plan.mesh.pp == 1 ? std::min(plan.micro_batches, kShownMicroBatches) : plan.micro_batches;
  const int chunks = pieces_per_stage(plan.config.parallel);
  const std::int64_t passes = 3 * plan.mesh.pp * chunks * shown;
  TESSERA_ENSURE(ConfigError, passes <= kMostPasses, "a step of ", shown, " micro-batches through ",
                 plan.mesh.pp * chunks, " pieces has ", passes, " passes; a plan follows at most ",
                 kMostPasses);
  plan.schedule = make_schedule(plan.config.parallel.schedule, plan.mesh.pp, chunks, static_cast<int>(shown));
  return plan;
}

std::vector<MemoryTerm> memory_of_stage(const Plan& plan, int stage, const std::vector<ModelPiece>& pieces,
                                        const DeclaredRank& declared, const Activations& activations) {
  std::vector<std::int64_t> kept, deferred;
  std::int64_t temporary = 0, message = 0;
  for (const ModelPiece& piece : pieces) {
    const int chunk = static_cast<int>(kept.size());
    kept.push_back(activations.kept(piece));
    deferred.push_back(activations.deferred(piece));
    temporary = std::max(temporary, activations.temporary(piece));
    message = std::max({message, declared.input_bytes(chunk), declared.output_bytes(chunk)});
  }
  std::vector<MemoryTerm> terms;
  declared.add_memory(terms);
  terms.push_back(
      {"activations", peak_held(plan.schedule.actions[static_cast<std::size_t>(stage)], kept, deferred)});
  terms.push_back({"temporary", temporary});
  if (plan.mesh.pp > 1) terms.push_back({"messages", kMessages * message});
  terms.push_back({"batch", plan.micro_batches * activations.batch()});
  return terms;
}

LayoutMemory::LayoutMemory(const Plan& layout, const PaperGroup& tensor) : layout_(layout) {
  Config config = layout.config;
  config.training.recompute = Recompute::none;
  for (int stage = 0; stage < layout.mesh.pp; ++stage) {
    pieces_.push_back(pieces_of(config, stage));
    declared_.emplace_back(config, layout.mesh, tensor, stage, 0);
    for (const ModelPiece& piece : pieces_.back()) most_layers_ = std::max(most_layers_, piece.num_layers);
  }
}

MostMemory LayoutMemory::with(const TrainingConfig& training) const {
  Config config = layout_.config;
  config.training = training;
  const Activations activations(config, 0);
  MostMemory most;
  for (std::size_t stage = 0; stage < pieces_.size(); ++stage) {
    RankPlan rank;
    rank.memory =
        memory_of_stage(layout_, static_cast<int>(stage), pieces_[stage], declared_[stage], activations);
    most.bytes = std::max(most.bytes, rank.memory_bytes());
    most.persistent_bytes = std::max(most.persistent_bytes, rank.persistent_bytes());
  }
  return most;
}

}  // namespace detail

std::int64_t RankPlan::memory_of(std::string_view name) const {
  for (const MemoryTerm& term : memory) {
    if (term.name == name) return term.bytes;
  }
  return 0;
}

std::int64_t RankPlan::memory_bytes() const {
  std::int64_t sum = 0;
  for (const MemoryTerm& term : memory) sum += term.bytes;
  return sum;
}

std::int64_t RankPlan::persistent_bytes() const {
  return memory_of("weights") + memory_of("16-bit weights") + memory_of("gradients") + memory_of("optimizer");
}

std::int64_t RankPlan::bytes_sent(std::string_view axis) const {
  std::int64_t sum = 0;
  for (const TrafficTerm& term : traffic) sum += axis.empty() || term.axis == axis ? term.bytes : 0;
  return sum;
}

const RankPlan& Plan::largest() const {
  return *std::max_element(ranks.begin(), ranks.end(), [](const RankPlan& a, const RankPlan& b) {
    return a.memory_bytes() < b.memory_bytes();
  });
}

Plan make_plan(const Config& config, std::optional<std::int64_t> processes) {
  Plan plan = detail::plan_layout(config, processes);
  check_no_decay(plan.config);
  TrainingConfig& training = plan.config.training;
  if (training.recompute == Recompute::automatic) {
    plan.recompute = detail::choose_recompute(plan, memory_limit(plan.config.device, plan.mesh.world()));
    training = detail::with_recompute(training, plan.recompute->chosen.options);
  }
  plan.parameters = parameter_count(plan.config.model);
  plan.pieces = pieces_in_order(plan.config, plan.schedule);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp}) {
    if (plan.mesh.along(axis) > 1)
      plan.groups.push_back({name_of(axis), rank_groups(plan.mesh, std::array{axis})});
  }
  plan_bubble(plan);
  plan_ranks(plan);
  return plan;
}

}  // namespace tessera
