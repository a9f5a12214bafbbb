#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "engine/plan_memory.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

/// More tensor ranks than this would leave a machine.
constexpr std::int64_t kMostTensor = 8;
constexpr std::int64_t kMostGrowth = 64;

/// A layout to try. `cost` orders: what costs speed least comes first.
struct Candidate {
  Config config;
  std::int64_t processes = 0;
  double cost = 0;
};

double doublings(std::int64_t from, std::int64_t to) {
  return std::abs(std::log2(static_cast<double>(to) / static_cast<double>(from)));
}

/// 1, 2, 4, ... times `n`, up to `most`.
std::vector<std::int64_t> multiples(std::int64_t n, std::int64_t most) {
  std::vector<std::int64_t> values{n};
  while (2 * values.back() <= most) values.push_back(2 * values.back());
  return values;
}

std::vector<std::int64_t> halves(std::int64_t n) {
  std::vector<std::int64_t> values{n};
  while (values.back() % 2 == 0) values.push_back(values.back() / 2);
  if (values.back() != 1) values.push_back(1);
  return values;
}

/// What leaves the meshes alone: how activations are kept.
void add_variants(const Candidate& mesh, std::vector<Candidate>& list) {
  const TrainingConfig& now = mesh.config.training;
  const bool can_share =
      mesh.config.parallel.tensor > 1 && !mesh.config.parallel.sequence && !now.recompute_partition;
  for (const bool sequence : {false, true}) {
    if (sequence && !can_share) continue;
    for (const Recompute what : {Recompute::none, Recompute::selective, Recompute::full}) {
      if (what < now.recompute) continue;
      for (const std::int64_t size : halves(now.micro_batch_size)) {
        Candidate next = mesh;
        next.config.parallel.sequence |= sequence;
        next.config.training.recompute = what;
        next.config.training.micro_batch_size = size;
        next.cost += (sequence ? 0.02 : 0) + 0.05 * doublings(now.micro_batch_size, size);
        if (what != now.recompute) next.cost += what == Recompute::full ? 0.35 : 0.04;
        list.push_back(std::move(next));
      }
    }
  }
}

/// Where the optimizer's state and shares are, and what add_variants does.
void add_places(Candidate layout, std::vector<Candidate>& list) {
  add_variants(layout, list);
  if (detail::is_for_cpu(layout.config.device)) return;
  const std::int64_t stage = layout.config.parallel.zero_stage;
  const auto move = [&](OffloadTo OffloadConfig::*what, bool can, double cost) {
    if (!can || layout.config.offload.*what != OffloadTo::none) return;
    layout.config.offload.*what = OffloadTo::cpu;
    layout.cost += cost;
    add_variants(layout, list);
  };
  // Each update sends the state there and back, each micro-batch gradients and weights.
  move(&OffloadConfig::optimizer, true, 0.5);
  move(&OffloadConfig::gradients, stage >= 2, 0.4);
  move(&OffloadConfig::parameters, stage == 3 && !layout.config.optimizer.split_main_weights, 0.4);
}

std::vector<Candidate> candidates(const Plan& plan) {
  const ParallelConfig& now = plan.config.parallel;
  const std::int64_t world = plan.mesh.world();
  std::vector<Candidate> list;
  for (const std::int64_t processes : multiples(world, world * kMostGrowth)) {
    for (const std::int64_t tensor : multiples(now.tensor, std::max(now.tensor, kMostTensor))) {
      for (const std::int64_t pipeline : multiples(now.pipeline, plan.config.model.num_layers)) {
        if (processes % (tensor * pipeline) != 0) continue;
        Candidate next{plan.config, processes, 0};
        ParallelConfig& layout = next.config.parallel;
        layout.data = processes / (tensor * pipeline);
        if (pipeline != now.pipeline) {
          layout.pipeline_layout.reset();
          layout.pipeline_split_rank.reset();
        }
        layout.tensor = tensor;
        layout.pipeline = pipeline;
        next.cost = 10 * doublings(world, processes) + 0.15 * doublings(now.tensor, tensor) +
                    0.1 * doublings(now.pipeline, pipeline);
        // Shares of the optimizer's state cost nothing; those of gradients and weights are sent for each
        // micro-batch.
        for (std::int64_t stage = std::max<std::int64_t>(1, now.zero_stage); stage <= 3; ++stage) {
          if (stage > std::max<std::int64_t>(1, now.zero_stage) && *layout.data == 1) break;
          Candidate shared = next;
          shared.config.parallel.zero_stage = stage;
          if (stage > now.zero_stage) shared.cost += stage == 2 ? 0.12 : stage == 3 ? 0.3 : 0;
          add_places(shared, list);
          if (stage < 3 || pipeline == 1 || now.zero_reshard != ZeroReshard::automatic) continue;
          // Weights that stages keep from forward to backward are gathered a second time instead.
          shared.config.parallel.zero_reshard = ZeroReshard::always;
          shared.cost += 0.1;
          add_places(shared, list);
        }
      }
    }
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cost < b.cost; });
  return list;
}

/// The most any rank needs.
class Memory {
 public:
  /// Nothing if the layout is impossible, or if even the parameters need more than `limit`.
  std::optional<std::int64_t> of(const Candidate& candidate, std::int64_t limit) {
    const ParallelConfig& layout = candidate.config.parallel;
    const OffloadConfig& offload = candidate.config.offload;
    const std::tuple key(layout.tensor, layout.pipeline, *layout.data, layout.sequence, layout.zero_stage,
                         offload.optimizer, offload.gradients, offload.parameters);
    if (const auto known = persistent_.find(key); known != persistent_.end() && known->second > limit)
      return std::nullopt;
    try {
      const Plan plan = detail::plan_layout(candidate.config, candidate.processes);
      const detail::LayoutMemory memory(plan, runs_);
      const std::int64_t persistent = persistent_[key] = memory.persistent_bytes();
      if (persistent > limit) return std::nullopt;
      return memory.with(plan.config.training).bytes;
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

 private:
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, std::int64_t, OffloadTo, OffloadTo,
                      OffloadTo>,
           std::int64_t>
      persistent_;
  detail::DryRuns runs_;
};

/// The keys whose values differ.
std::vector<ConfigItem> differences(const Config& before, const Config& after) {
  const std::vector<ConfigItem> old_items = list_items(before), new_items = list_items(after);
  std::vector<ConfigItem> changes;
  for (std::size_t i = 0; i < new_items.size(); ++i) {
    if (new_items[i] != old_items[i]) changes.push_back(new_items[i]);
  }
  return changes;
}

}  // namespace

std::optional<PlanAdvice> advise(const Plan& plan, std::int64_t memory_bytes) {
  Memory memory;
  for (const Candidate& candidate : candidates(plan)) {
    const std::optional<std::int64_t> needed = memory.of(candidate, memory_bytes);
    if (needed && *needed <= memory_bytes)
      return PlanAdvice{differences(plan.config, candidate.config), candidate.processes, *needed};
  }
  return std::nullopt;
}

}  // namespace tessera
