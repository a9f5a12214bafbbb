#include <optional>

#include "engine/ranks.hpp"
#include "engine/saved_parts.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/engine/state.hpp"

namespace tessera {
namespace {

/// Writes those that hold something, each rank its own at the same time. Returns, on every rank, the records
/// of all. Collective.
std::vector<std::string> write_shards(Communicator& world, const std::string& staging,
                                      const std::vector<Shard>& shards, const SaveOptions& options) {
  const ExecCtx host = ExecCtx::cpu(1);
  std::vector<std::string> records;
  for (const Shard& shard : shards) {
    std::string own;
    on_every_rank(host, world, [&] {
      if (!shard.tensors.empty()) own = write_checkpoint_shard(staging, shard.file, shard.tensors, options);
    });
    for (std::string& each : all_gather_bytes(world, own)) {
      if (!each.empty()) records.push_back(std::move(each));
    }
  }
  return records;
}

}  // namespace

std::string begin_save(const std::filesystem::path& root, Engine& engine, std::int64_t step,
                       const std::vector<Shard>& shards, const SaveOptions& options,
                       std::optional<CheckpointSave>& save) {
  Communicator& world = engine.mesh().world();
  std::uint64_t bytes = 0;
  for (const std::string& each : all_gather_bytes(world, std::to_string(bytes_of(shards))))
    bytes += std::stoull(each);
  return on_first_rank(ExecCtx::cpu(1), world, [&] {
    save.emplace(root, step, bytes, options);
    return save->staging().string();
  });
}

std::filesystem::path save_engine(const std::filesystem::path& root, Engine& engine, const RunState& run,
                                  const SaveOptions& given, const StateParts& parts) {
  const FlightCall open(engine.ctx().stream->flight(), "save_engine()");
  engine.params().weights().wait();
  engine.ctx().stream->synchronize();
  Communicator& world = engine.mesh().world();
  SaveOptions options = given;
  options.on_phase = [&](SavePhase phase) {
    heartbeat(world);
    if (given.on_phase) given.on_phase(phase);
  };
  const std::vector<Shard> shards = shards_of(engine, parts);
  std::optional<CheckpointSave> save;  // on rank 0
  const std::string staging = begin_save(root, engine, run.step, shards, options, save);
  const std::vector<std::string> records = write_shards(world, staging, shards, options);
  const CheckpointState state = checkpoint_state(engine, run, parts);
  return on_first_rank(ExecCtx::cpu(1), world, [&] { return save->commit(state, records).string(); });
}

}  // namespace tessera
