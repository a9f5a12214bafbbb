#pragma once
/// Plan: what a layout costs, found out without starting it: ranks and groups, memory, bytes sent, bubble.
/// Each kind of rank makes a dry run (dry_run.hpp) of each of its passes, so whatever a model and its layout
/// do is counted as it is done.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/config_file.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/device/topology.hpp"
#include "tessera/engine/dry_run.hpp"
#include "tessera/nn/sharding.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

struct RankPlan {
  int rank = 0;
  MeshCoordinates at;
  std::vector<ModelPiece> pieces;  ///< by chunk
  std::int64_t parameters = 0;     ///< values it holds, the padding of buffers not counted
  int most_in_flight = 0;          ///< micro-batches x chunks whose activations it holds at once
  std::vector<MemoryTerm> memory;
  Elsewhere elsewhere;
  std::vector<TrafficTerm> traffic;

  /// Of one term; 0 if there is none of that name.
  std::int64_t memory_of(std::string_view name) const { return bytes_of(memory, name); }
  std::int64_t memory_bytes() const { return bytes_of(memory); }
  /// Weights, copies, gradients and optimizer state: what stays between steps.
  std::int64_t persistent_bytes() const;
  /// Along one axis, or all of them.
  std::int64_t bytes_sent(std::string_view axis = {}) const { return bytes_of(traffic, axis); }
};

/// What a plan may fill on one rank, and where that number comes from.
struct MemoryLimit {
  std::int64_t bytes = 0;
  std::string source;  ///< "device.memory_gb", or what was asked
};

/// device.memory_gb. Where that is null: for a job whose `ranks` ranks are all on this machine, the memory of
/// its smallest GPU, or each rank's share of the machine's, in both cases less a reserve for what plans do
/// not count. Errors: ConfigError if device.type asks for a GPU and there is none.
MemoryLimit memory_limit(const DeviceConfig& device, std::int64_t ranks);

/// A way to recompute, and what the rank that needs most needs with it.
struct RecomputeCandidate {
  RecomputeOptions options;
  std::int64_t memory_bytes = 0;
};

/// What training.recompute auto is for one layout. `tried` holds none, selective, full with the smallest
/// `block` that fits, full with the `uniform` segments that need least, each of which costs more time than
/// the one before, up to the first that fits.
struct RecomputeChoice {
  MemoryLimit limit;
  std::vector<RecomputeCandidate> tried;
  RecomputeCandidate chosen;  ///< the last one tried; if none fits, the one that needs least

  bool fits() const { return chosen.memory_bytes <= limit.bytes; }
};

struct RankGroups {
  std::string_view axis;
  std::vector<std::vector<int>> groups;
};

struct Plan {
  Config config = Settings{};  ///< parallel.data and what to recompute given
  MeshShape mesh;
  std::int64_t parameters = 0;     ///< of the model
  std::int64_t micro_batches = 0;  ///< per step and data rank
  std::vector<RankGroups> groups;  ///< along every axis of several ranks
  std::vector<ModelPiece> pieces;  ///< in the order the model runs
  Schedule schedule;               ///< with one stage its first micro-batches only: they are all alike
  std::vector<PassTimes> times;    ///< per piece, relative: operations of its kernels, and bytes they move
  double bubble = 0;               ///< idle share of the step at these times, transfers taking none
  double even_bubble = 0;          ///< at equal pieces, backward twice as long as forward
  std::vector<RankPlan> ranks;
  std::optional<RecomputeChoice> recompute;  ///< how training.recompute auto was settled, if it was auto

  /// The rank that needs most memory.
  const RankPlan& largest() const;
};

/// Plans `config` on so many processes (null: processes_needed); training.recompute auto by memory_limit as
/// if all of them were here. Errors: ConfigError as resolve_layout and memory_limit, and for schedules of
/// more passes than can be simulated.
Plan make_plan(const Config& config, std::optional<std::int64_t> processes = std::nullopt);

/// Changes to a configuration that make it fit.
struct PlanAdvice {
  std::vector<ConfigItem> changes;
  std::int64_t processes = 0;
  std::int64_t memory_bytes = 0;  ///< the largest rank's, after them
};
/// The cheapest changes found with which every rank needs at most `memory_bytes`: ZeRO stages 1 to 3,
/// sequence parallelism, selective recomputation, smaller micro-batches, more pipeline or tensor ranks, full
/// recomputation; with as many processes, or, if that is impossible, with up to 64 times as many. Each was
/// planned. Nothing if none was found.
std::optional<PlanAdvice> advise(const Plan& plan, std::int64_t memory_bytes);
/// The same as a sentence.
std::string advice_text(const Plan& plan, std::int64_t memory_bytes);

/// What speaks against the plan's tensor groups on machines of such GPUs, each with as many ranks as GPUs, in
/// the ranks' order: groups that leave a machine, groups that leave an NVLink island. A line for each, with
/// what to do; none for a plan without tensor ranks or a topology without GPUs.
std::vector<std::string> link_warnings(const Plan& plan, const Topology& topology);

/// For people: tables, groups, the schedule as a picture of at most `width` columns. `memory_bytes`: what
/// each rank has, to say whether it fits and what to change.
std::string to_text(const Plan& plan, std::optional<std::int64_t> memory_bytes = std::nullopt,
                    int width = 100);
/// "auto is selective, the first that fits into 80.0 GB (device.memory_gb): none 81.2 GB, selective 78.9 GB".
std::string to_text(const RecomputeChoice& choice);
/// For programs: everything, bytes as integers.
std::string to_json(const Plan& plan, std::optional<std::int64_t> memory_bytes = std::nullopt);

}  // namespace tessera
