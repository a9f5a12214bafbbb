#include "tessera/engine/build.hpp"

#include "tessera/base/families.hpp"
#include "tessera/comm/nccl.hpp"
#include "tessera/engine/agreement.hpp"
#include "tessera/nn/bodies.hpp"
#include "tessera/ops/backends.hpp"

namespace tessera {

int pieces_per_stage(const ParallelConfig& parallel) {
  return static_cast<int>(chunks_of(parallel.schedule, parallel.virtual_stages));
}

MeshShape mesh_shape(const ParallelConfig& parallel, int ranks) {
  const std::int64_t model = parallel.tensor * parallel.pipeline * parallel.context;
  const std::int64_t data = parallel.data.value_or(ranks / model);
  TESSERA_ENSURE(ConfigError, data >= 1 && model * data == ranks, "parallel.tensor ", parallel.tensor,
                 " x pipeline ", parallel.pipeline, " x context ", parallel.context, " x data ",
                 parallel.data ? std::to_string(*parallel.data) : "null", " does not make ", ranks,
                 " processes");
  return {.tp = static_cast<int>(parallel.tensor),
          .cp = static_cast<int>(parallel.context),
          .ep = static_cast<int>(parallel.expert),
          .dp = static_cast<int>(data),
          .pp = static_cast<int>(parallel.pipeline)};
}

Device device_of(const DeviceConfig& config) {
  if (config.type == DeviceChoice::cpu) return {};
  const CudaDevices cuda = cuda_devices();
  if (config.type == DeviceChoice::automatic && cuda.count == 0) return {};
  TESSERA_ENSURE(ConfigError, cuda.count > 0, "device.type is cuda, but ", cuda.why_none);
  return {DeviceType::cuda, static_cast<int>(config.index.value_or(0))};
}

void refuse_without_data(const ModelConfig& model, std::string_view what) {
  TESSERA_ENSURE(ConfigError, !model.num_labels,
                 "model.num_labels: a corpus has no classes of samples, so that ", what,
                 " does not take a classifier. Python's prepare() trains it, and build_engine of the C++ "
                 "interface, with batches of your own");
}

void check_no_decay(const Config& config) {
  if (config.optimizer.no_decay.empty()) return;
  std::vector<std::string> names;
  const auto whole = make_model(config.model, numerics_of(config.training));
  for (const Parameter* parameter : whole->parameters()) names.push_back(parameter->name());
  check_no_decay(config.optimizer, names);
}

namespace {

/// On the CPU products leave no processor to send with, so automatic means no overlap there.
int tensor_chunks(const ParallelConfig& parallel, Device device) {
  const auto chunks = static_cast<int>(parallel.tensor_chunks);
  return chunks == 0 && !device.is_cuda() ? 1 : chunks;
}

/// The engine of this rank of options.layout.mesh.
std::unique_ptr<Engine> assemble(const Config& config, Device device, const EngineOptions& options,
                                 std::shared_ptr<GemmTuner> gemm_tuner) {
  if (options.trainable && options.groups.groups.empty()) check_no_decay(config);
  const auto seed = static_cast<std::uint64_t>(config.training.seed);
  ExecCtx ctx = device.is_cpu() ? ExecCtx::cpu(static_cast<int>(config.device.threads), seed)
                                : ExecCtx::cuda(device.index, seed);
  ctx.gemm_tuner = std::move(gemm_tuner);
  if (ctx.stream->threads() > 1) ctx.cores = ops::watch_cores();
  ctx.require_fast_attention = options.trainable && config.device.require_fast_attention;
  ctx.deterministic = config.device.deterministic;
  const ProcessMesh& mesh = *options.layout.mesh;
  return std::make_unique<Engine>(make_model(config, mesh, pieces_of(config, mesh.coordinates().pp), device),
                                  options, ctx);
}

}  // namespace

std::unique_ptr<Model> make_model(const Config& config, const ProcessMesh& mesh,
                                  const std::vector<ModelPiece>& pieces, Device device) {
  return make_model(config.model, numerics_of(config.training),
                    Sharding{.tensor = {.comm = &mesh[Axis::tp],
                                        .sequence = config.parallel.sequence,
                                        .chunks = tensor_chunks(config.parallel, device)},
                             .experts = {.comm = &mesh[Axis::ep]},
                             .pieces = pieces,
                             .recompute = RecomputeOptions::from(config.training)});
}

std::unique_ptr<Engine> build_engine(const Config& given, bool trainable, std::shared_ptr<Communicator> world,
                                     ParamGroups groups, const std::vector<std::string>& gemm_tables,
                                     std::shared_ptr<ProcessMesh> mesh) {
  if (world) agree_on_config(given, *world);
  Config config = trainable ? settle_recompute(given, world) : given;
  // What is not trained keeps nothing that could be computed again.
  if (!trainable) config.training.recompute = Recompute::none;
  EngineOptions options = EngineOptions::from(config);
  options.trainable = trainable;
  options.groups = std::move(groups);
  const Device device = device_of(config.device);
  std::shared_ptr<GemmTuner> tuner;
  if (!device.is_cpu())
    tuner = ops::make_gemm_tuner(config.device.tune_gemm, config.device.gemm_cache.value_or(""), gemm_tables);
  if (world && world->size() > 1 && !device.is_cpu()) {
    world = make_nccl_communicator(std::move(world), device);
    mesh = nullptr;  // its groups know nothing of GPUs
  }
  const int ranks = world ? world->size() : 1;
  const MeshShape shape = mesh_shape(config.parallel, ranks);
  if (!mesh) mesh = world ? std::make_shared<ProcessMesh>(std::move(world), shape) : ProcessMesh::self();
  TESSERA_CHECK(mesh->shape() == shape, "the mesh given is not that of the section parallel");
  options.layout.mesh = std::move(mesh);
  return assemble(config, device, options, std::move(tuner));
}

}  // namespace tessera
