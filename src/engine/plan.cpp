#include "tessera/engine/plan.hpp"

#include <algorithm>
#include <array>

#include "engine/plan_memory.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMostPasses = 3'000'000;
/// Micro-batches of the schedule of a single stage: the others look the same.
constexpr std::int64_t kShownMicroBatches = 4;

/// That a model of ours has.
constexpr int kMostLosses = 3;

std::vector<ModelPiece> in_order(const std::vector<std::vector<ModelPiece>>& all, const Schedule& schedule) {
  std::vector<ModelPiece> pieces(static_cast<std::size_t>(schedule.pieces()));
  for (int piece = 0; piece < schedule.pieces(); ++piece) {
    pieces[static_cast<std::size_t>(piece)] = all[static_cast<std::size_t>(schedule.stage_of(piece))]
                                                 [static_cast<std::size_t>(schedule.chunk_of(piece))];
  }
  return pieces;
}

/// All ranks of one stage and tensor rank.
void plan_ranks(Plan& plan, const detail::Columns& columns, const TrafficTerm& agreement,
                const std::vector<ModelPiece>& pieces, int stage, int tensor_rank, detail::DryRuns& runs) {
  const MeshShape& mesh = plan.mesh;
  const int first = rank_of(mesh, {.tp = tensor_rank, .pp = stage});
  const detail::RankPasses& passes = runs.passes(plan, pieces, first);
  const detail::RankStore& store = runs.store(plan, pieces, first);
  detail::Needs needs = detail::needs_of(passes, store, columns, stage);
  RankPlan common{.rank = first,
                  .at = {},
                  .pieces = pieces,
                  .parameters = store.parameters,
                  .most_in_flight = needs.column.most_in_flight,
                  .memory = std::move(needs.memory),
                  .elsewhere = store.elsewhere,
                  .traffic = detail::traffic_of(passes.pieces, plan.micro_batches, needs.column)};
  common.elsewhere.host_bytes += passes.host_bytes * common.most_in_flight;
  detail::take_crossed(common.traffic, common.elsewhere);
  std::vector<TrafficTerm> once = store.once.sent;
  detail::take_crossed(once, common.elsewhere);
  for (int replica = 0; replica < mesh.replicas(); ++replica) {
    const int number =
        rank_of(mesh, {.tp = tensor_rank, .cp = replica % mesh.cp, .dp = replica / mesh.cp, .pp = stage});
    RankPlan& rank = plan.ranks[static_cast<std::size_t>(number)] = common;
    rank.rank = number;
    rank.at = coordinates_of(mesh, number);
    if (mesh.world() == 1) continue;
    detail::add_traffic(rank.traffic, agreement);
    // Which parameters lie in a replica's share only matters where tensor ranks or stages sum some of them.
    // Of the sum of the losses each of the first ranks sends one.
    if (replica <= kMostLosses || mesh.tp * mesh.pp > 1) once = detail::DryRuns::once(plan, pieces, number);
    for (const TrafficTerm& term : once) detail::add_traffic(rank.traffic, term);
  }
  if (tensor_rank > 0) return;
  for (std::size_t chunk = 0; chunk < passes.pieces.size(); ++chunk) {
    const PieceRecord& piece = passes.pieces[chunk];
    plan.times[static_cast<std::size_t>(plan.schedule.piece_of(stage, static_cast<int>(chunk)))] = {
        detail::time_of(piece.forward), detail::time_of(piece.backward),
        detail::time_of(piece.weight_gradient), 0};
  }
}

void plan_ranks(Plan& plan) {
  const MeshShape& mesh = plan.mesh;
  detail::DryRuns runs;
  const std::vector<std::vector<ModelPiece>> pieces = runs.pieces(plan.config);
  plan.pieces = in_order(pieces, plan.schedule);
  const detail::Columns columns(plan.schedule.kind, mesh.pp, plan.schedule.chunks, plan.micro_batches);
  const TrafficTerm agreement{"world", "agreement on the batch", runs.agreement_bytes(plan, pieces[0])};
  plan.ranks.resize(static_cast<std::size_t>(mesh.world()));
  plan.times.resize(static_cast<std::size_t>(plan.schedule.pieces()));
  for (int stage = 0; stage < mesh.pp; ++stage) {
    for (int t = 0; t < mesh.tp; ++t)
      plan_ranks(plan, columns, agreement, pieces[static_cast<std::size_t>(stage)], stage, t, runs);
  }
}

void plan_bubble(Plan& plan) {
  if (plan.mesh.pp == 1) return;
  plan.bubble = simulate(plan.schedule, plan.times).bubble;
  plan.even_bubble = simulate(plan.schedule, {PassTimes{}}).bubble;
}

}  // namespace

namespace detail {

Plan plan_layout(const Config& config, std::optional<std::int64_t> processes) {
  refuse_without_data(config.model, "a plan");
  Plan plan;
  plan.config = config;
  plan.config.parallel = resolve_layout(config, processes);
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

}  // namespace detail

std::int64_t RankPlan::persistent_bytes() const { return detail::persistent_bytes(memory); }

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
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::edp, Axis::dp, Axis::pp}) {
    if (axis == Axis::edp && plan.mesh.ep == 1) continue;
    if (plan.mesh.along(axis) > 1)
      plan.groups.push_back({name_of(axis), rank_groups(plan.mesh, std::array{axis})});
  }
  plan_ranks(plan);
  plan_bubble(plan);
  return plan;
}

}  // namespace tessera
