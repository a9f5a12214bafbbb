#pragma once
/// From a configuration to an engine.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/log.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/nn/sharding.hpp"
#include "tessera/pipeline/schedule.hpp"

namespace tessera {

struct Config;
struct DeviceConfig;
struct ModelConfig;
struct ParallelConfig;

/// Context, this rank's part of the model, and engine for `config`; training.recompute auto is settled
/// first. trainable = false leaves gradients and optimizer state out. `world`: all ranks of the job, null =
/// this one alone; then the call is collective over it. `groups`: instead of those of config.optimizer.
/// `gemm_tables`: files that `tessera tune` wrote, for products on CUDA (gemm_tables() of tune.hpp). `mesh`:
/// of `world` and of the layout's shape, which engines on CPUs share instead of making their own. Errors:
/// ConfigError for a layout that does not fit the model or the number of ranks.
std::unique_ptr<Engine> build_engine(const Config& config, bool trainable = true,
                                     std::shared_ptr<Communicator> world = nullptr, ParamGroups groups = {},
                                     const std::vector<std::string>& gemm_tables = {},
                                     std::shared_ptr<ProcessMesh> mesh = nullptr);

/// This rank's `pieces` of the model of `config`, for a device of that type; training.recompute is not auto.
/// Errors: ConfigError for a layout that does not fit the model.
std::unique_ptr<Model> make_model(const Config& config, const ProcessMesh& mesh,
                                  const std::vector<ModelPiece>& pieces, Device device);

/// `config` with training.recompute auto replaced by what fits on every rank: rank 0 decides, by the smallest
/// memory_limit of all ranks, and logs why. Anything else is left as it is, and nothing is sent. Collective
/// over `world` (null = this rank alone). Errors: ConfigError, with the least that was found and what would
/// fit, if nothing does.
Config settle_recompute(Config config, const std::shared_ptr<Communicator>& world,
                        const Logger& log = Logger::silent());
/// The same before there are ranks, of which `processes` will run on this machine.
Config settle_recompute(Config config, std::int64_t processes);

/// Refuses families whose data cannot be read yet, and which plans know nothing of, and heads that no corpus
/// has labels for. `what`: "tessera train". Errors: ConfigError.
void refuse_without_data(const ModelConfig& model, std::string_view what);

/// Refuses a glob of optimizer.no_decay that matches no parameter of the whole model, whatever part of it a
/// rank holds. Errors: ConfigError.
void check_no_decay(const Config& config);

/// The device a configuration asks for: auto is CUDA if there is a device. Errors: ConfigError, with the
/// reason, if cuda is asked for by name and there is none.
Device device_of(const DeviceConfig& config);

/// The mesh a layout needs over `ranks` ranks; parallel.data null takes what is left. Errors: ConfigError.
MeshShape mesh_shape(const ParallelConfig& parallel, int ranks);
/// Pieces of the model per pipeline stage: parallel.virtual_stages, and 2 for zb-v.
int pieces_per_stage(const ParallelConfig& parallel);
/// The pieces of the model that each pipeline stage holds. Unless parallel.pipeline_layout says it, layers
/// are handed out by what a dry run says that parts of the model cost: operations of kernels, and bytes they
/// move.
std::vector<std::vector<ModelPiece>> all_pieces_of(const Config& config);
/// The same with costs of the caller's, asked for where they matter.
std::vector<std::vector<ModelPiece>> all_pieces_of(const Config& config,
                                                   const std::function<PartCosts(const Config&)>& costs);
/// Those of one stage.
std::vector<ModelPiece> pieces_of(const Config& config, int stage);

}  // namespace tessera
