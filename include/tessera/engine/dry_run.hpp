#pragma once
/// Dry run: a training step of one rank on the meta device. The model, its parameters, optimizer and
/// communicators are those of a real run and run the same code; what they allocate, compute and send is
/// counted, and nothing else happens. No other rank need be there.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/nn/forward.hpp"
#include "tessera/pipeline/schedule.hpp"
#include "tessera/tensor/port.hpp"

namespace tessera {

/// A part of a rank's memory.
struct MemoryTerm {
  std::string_view name;
  std::int64_t bytes = 0;
};

/// What of a rank's lies outside the device, as `offload` says.
struct Elsewhere {
  std::int64_t host_bytes = 0, disk_bytes = 0;
  std::int64_t to_device = 0, to_host = 0;  ///< bytes that cross the device's link in a step

  bool operator==(const Elsewhere&) const = default;
};
/// What a rank sends to others, or over its device's link, for one purpose. `axis` is the group it goes
/// through, as AxisTraffic names it: "tp", "tp_block", "dp", "ep", "edp", "pp", "embedding" or
/// "world".
struct TrafficTerm {
  std::string axis, name;
  std::int64_t bytes = 0;
};

/// Axes of what crosses the device's link.
inline constexpr std::string_view kToDevice = "to_device", kToHost = "to_host";

/// Together, or those of one name alone.
std::int64_t bytes_of(const std::vector<MemoryTerm>& terms, std::string_view name = {});
/// Along all axes, or one.
std::int64_t bytes_of(const std::vector<TrafficTerm>& terms, std::string_view axis = {});

/// What some work does.
struct WorkRecord {
  double flops = 0;                    ///< of kernels
  double bytes = 0;                    ///< that kernels read and write at least
  std::int64_t peak = 0;               ///< most memory at once, besides what was there before
  std::vector<TrafficTerm> sent = {};  ///< by group and operation
};

/// A pass of one piece of a model with one micro-batch.
struct PassRecord : WorkRecord {
  std::int64_t kept = 0;     ///< held for this micro-batch afterwards, inputs and results aside
  std::int64_t passing = 0;  ///< when it begins: gradients on their way to the shares of data ranks
};

/// A piece of a model at work on one micro-batch.
struct PieceRecord {
  PassRecord forward, backward, weight_gradient;  ///< the last one only where it is put off
  std::vector<Port> inputs, outputs;
};

/// What data ranks share out while a column is walked: its gathers and reductions alone.
struct ShardRecord {
  std::vector<std::int64_t> gathered = {};  ///< bytes of whole weights beside each action's own
  std::vector<TrafficTerm> sent = {};
};

/// Where the device that a dry run stands for is no CPU.
struct DryDevice {
  bool memory_apart = false;     ///< OffloadConfig::memory_apart
  std::int64_t logit_bytes = 0;  ///< ExecCtx::logit_bytes
};

/// One rank of a mesh, alone.
class DryRank {
 public:
  /// This rank's pieces of a model, as the engine takes them.
  using MakeModel = std::function<std::unique_ptr<Model>(ProcessMesh&)>;
  /// Of `options` the mesh and the size of a micro-batch are replaced. Errors: as Engine's constructor.
  DryRank(const MakeModel& make, EngineOptions options, const MeshShape& mesh, int rank,
          const MicroBatchSize& micro_batch, const DryDevice& device = {});
  ~DryRank();
  DryRank(const DryRank&) = delete;
  DryRank& operator=(const DryRank&) = delete;

  /// Values it holds, the padding of buffers not counted.
  std::int64_t parameters() const;
  /// What stays between steps: "weights", "16-bit weights", "gradients", "optimizer", and as "tables" what
  /// belongs to these and, after pieces(), to the model.
  std::vector<MemoryTerm> persistent() const;
  /// What lies in host memory and on disk between steps.
  Elsewhere elsewhere() const;
  /// What each pass has in host memory until it is walked backwards; after pieces().
  std::int64_t host_bytes_of_pass() const;
  /// Bytes of one micro-batch's tokens, labels and positions.
  std::int64_t batch_bytes() const;
  /// Runs forward and backward of each piece. put_off: weight gradients on their own.
  std::vector<PieceRecord> pieces(bool put_off);
  /// Empty where gradients are whole.
  ShardRecord walk(const std::vector<Action>& column);
  /// What a step does once: gradients to their sums, the update, numbers that all ranks tell each other.
  WorkRecord once();
  /// What all ranks tell each other of a batch before a step.
  std::int64_t agreement_bytes();

 private:
  PieceRecord run_piece(Stage& stage, int chunk, bool put_off) const;
  void begin_piece(int chunk, bool put_off);
  std::int64_t held() const;
  struct Crossed {
    std::uint64_t to_device = 0, to_host = 0;
  };
  /// Bytes that crossed the device's link so far, for what stays between steps, or for activations.
  Crossed crossed() const;
  Crossed crossed_by_activations() const;
  static void add_crossed(std::vector<TrafficTerm>& terms, const Crossed& before, const Crossed& after);

  MicroBatchSize micro_batch_;
  Schedule order_;  ///< of the pieces; without actions
  std::unique_ptr<Engine> engine_;
};

/// What a stage holds at most while it walks its column, and sends to other stages meanwhile.
struct ColumnRecord {
  std::int64_t activations = 0, temporary = 0, messages = 0, batch = 0;
  int most_in_flight = 0;  ///< micro-batches x chunks whose activations it holds at once
  std::int64_t sent = 0;
  std::vector<TrafficTerm> shared = {};  ///< among data ranks meanwhile

  std::int64_t peak() const { return activations + temporary + messages + batch; }
};
/// DryRank::walk, if there is one.
using WalkShards = std::function<ShardRecord(const std::vector<Action>& column)>;
/// Walks the column with the pipeline's own executor; passes do what was recorded of them. `batch_bytes`: of
/// one micro-batch.
ColumnRecord run_column(const Schedule& schedule, int stage, const std::vector<PieceRecord>& pieces,
                        std::int64_t batch_bytes, const WalkShards& walk = nullptr);

/// A whole step of one rank.
struct DryRun {
  std::int64_t parameters = 0;
  std::vector<PieceRecord> pieces;
  int most_in_flight = 0;
  std::vector<MemoryTerm> memory = {};    ///< together what the rank's allocator has at its peak
  std::vector<TrafficTerm> traffic = {};  ///< together what its communicators count
  Elsewhere elsewhere = {};

  std::int64_t memory_bytes() const { return bytes_of(memory); }
  /// Along one axis, or all of them.
  std::int64_t bytes_sent(std::string_view axis = {}) const { return bytes_of(traffic, axis); }
};
/// Runs `micro_batches` micro-batches through the rank's column and updates. Errors: as DryRank.
DryRun dry_run(const DryRank::MakeModel& make, const EngineOptions& options, const MeshShape& mesh, int rank,
               const MicroBatchSize& micro_batch, std::int64_t micro_batches);

}  // namespace tessera
