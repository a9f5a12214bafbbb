#pragma once
/// Plan: what a layout costs, computed without starting it: ranks and groups, memory, bytes sent, bubble. The
/// parameters are those of the very model a rank would build, laid out as its ParamStore would (padding
/// included); activations and communication are formulas (docs/guides/choose_a_layout.md has them).

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/config_file.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/nn/sharding.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

/// A part of a rank's memory.
struct MemoryTerm {
  std::string_view name;
  std::int64_t bytes = 0;
};

/// What a rank sends to others in one training step, for one purpose. `axis` is the group it goes through, as
/// AxisTraffic names it: "tp", "tp_block", "dp", "pp", "embedding" or "world".
struct TrafficTerm {
  std::string_view axis, name;
  std::int64_t bytes = 0;
};

struct RankPlan {
  int rank = 0;
  MeshCoordinates at;
  std::vector<ModelPiece> pieces;  ///< by chunk
  std::int64_t parameters = 0;     ///< values it holds, the padding of buffers not counted
  int most_in_flight = 0;          ///< micro-batches x chunks whose activations it holds at once
  std::vector<MemoryTerm> memory;
  std::vector<TrafficTerm> traffic;

  /// Of one term; 0 if there is none of that name.
  std::int64_t memory_of(std::string_view name) const;
  std::int64_t memory_bytes() const;
  /// Weights, copies, gradients and optimizer state: what stays between steps.
  std::int64_t persistent_bytes() const;
  /// Along one axis, or all of them.
  std::int64_t bytes_sent(std::string_view axis = {}) const;
};

struct RankGroups {
  std::string_view axis;
  std::vector<std::vector<int>> groups;
};

struct Plan {
  Config config;  ///< resolved, parallel.data given
  MeshShape mesh;
  std::int64_t parameters = 0;     ///< of the model
  std::int64_t micro_batches = 0;  ///< per step and data rank
  std::vector<RankGroups> groups;  ///< along every axis of several ranks
  std::vector<ModelPiece> pieces;  ///< in the order the model runs
  Schedule schedule;               ///< with one stage its first micro-batches only: they are all alike
  std::vector<PassTimes> times;    ///< per piece, relative, from floating-point operations
  double bubble = 0;               ///< idle share of the step at these times, transfers taking none
  double even_bubble = 0;          ///< at equal pieces, backward twice as long as forward
  std::vector<RankPlan> ranks;

  /// The rank that needs most memory.
  const RankPlan& largest() const;
};

/// Plans `config` on so many processes (null: processes_needed). Errors: ConfigError as resolve_layout, and
/// for schedules of more passes than can be simulated.
Plan make_plan(const Config& config, std::optional<std::int64_t> processes = std::nullopt);

/// Changes to a configuration that make it fit.
struct PlanAdvice {
  std::vector<ConfigItem> changes;
  std::int64_t processes = 0;
  std::int64_t memory_bytes = 0;  ///< the largest rank's, after them
};
/// The cheapest changes found with which every rank needs at most `memory_bytes`: ZeRO stage 1, sequence
/// parallelism, selective recomputation, smaller micro-batches, more pipeline or tensor ranks, full
/// recomputation; with as many processes, or, if that is impossible, with up to 64 times as many. Each was
/// planned. Nothing if none was found.
std::optional<PlanAdvice> advise(const Plan& plan, std::int64_t memory_bytes);

/// For people: tables, groups, the schedule as a picture of at most `width` columns. `memory_bytes`: what
/// each rank has, to say whether it fits and what to change.
std::string to_text(const Plan& plan, std::optional<std::int64_t> memory_bytes = std::nullopt,
                    int width = 100);
/// For programs: everything, bytes as integers.
std::string to_json(const Plan& plan, std::optional<std::int64_t> memory_bytes = std::nullopt);

}  // namespace tessera
