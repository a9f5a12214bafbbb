#include "tessera/engine/tune.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "engine/dry_terms.hpp"
#include "engine/stage.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/ops/backends.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// The folder of the file that this code was loaded from: the library, the program, or the Python module.
fs::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&default_gemm_table), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code error;
  return fs::canonical(info.dli_fname, error).parent_path();
}

void add_tables(const fs::path& folder, std::vector<std::string>& paths) {
  std::error_code error;
  std::set<std::string> sorted;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == ".txt") sorted.insert(entry.path().string());
  paths.insert(paths.end(), sorted.begin(), sorted.end());
}

/// The same shapes with as few layers as the layout allows, and a batch that fills its pipeline.
Config smallest(Config config) {
  const std::int64_t pieces = config.parallel.pipeline * pieces_per_stage(config.parallel);
  config.model.num_layers = pieces;
  if (spec_of(config.model.family).encoder_decoder) {
    config.model.num_layers = std::max<std::int64_t>(2, pieces);
    config.model.encoder_layers = config.model.num_layers / 2;
  }
  config.model.init_from.reset();
  config.model.reinitialize = false;
  config.parallel.pipeline_layout.reset();
  config.parallel.pipeline_split_rank.reset();
  // As few as share out the experts.
  config.parallel.data = config.parallel.expert / std::gcd(config.parallel.expert, config.parallel.context);
  config.device.cuda_graph = AutoSwitch::off;
  // What is computed again is computed as it was the first time.
  config.training.recompute = Recompute::none;
  config.training.global_batch_size =
      2 * config.parallel.pipeline * config.training.micro_batch_size * *config.parallel.data;
  return config;
}

/// First and last of `count`, and one between them: all there is that differs among them.
std::set<int> kinds_of(int count) { return {0, std::min(1, count - 1), count - 1}; }

/// A dry run of what a rank launches on `device`.
std::vector<TraceLane> step_of(const Config& config, Device device, const MeshShape& shape,
                               const MeshCoordinates& at) {
  EngineOptions options = EngineOptions::from(config);
  options.layout.mesh = ProcessMesh::alone(shape, rank_of(shape, at));
  const ExecCtx meta = ExecCtx::meta();
  Engine engine(make_model(config, *options.layout.mesh, pieces_of(config, at.pp), device), options, meta);
  const auto trace = std::make_shared<Trace>(*meta.stream);
  engine.set_trace(trace);
  engine.launch_step(
      blank_batch(detail::size_of(config, config.training.global_batch_size / shape.dp), engine.model()));
  engine.set_trace(nullptr);
  return trace->lanes();
}

}  // namespace

std::string default_gemm_table(const Environment& environment) {
  return environment.cache_dir ? *environment.cache_dir + "/tessera/gemm_table.txt" : "";
}

std::vector<std::string> gemm_tables(const Environment& environment) {
  std::vector<std::string> paths;
  if (const std::string own = default_gemm_table(environment); !own.empty()) paths.push_back(own);
  const fs::path folder = own_folder();
  if (folder.empty()) return paths;
  add_tables(folder / "gemm_tables", paths);
  add_tables(folder.parent_path() / "share/tessera/gemm_tables", paths);
  return paths;
}

std::vector<ops::RecordedProduct> products_of(const Config& config, Device device) {
  check_no_decay(config);
  const Config small = smallest(config);
  const MeshShape shape = mesh_shape(small.parallel, static_cast<int>(processes_needed(small)));
  std::vector<TraceLane> lanes;
  for (const int stage : kinds_of(shape.pp)) {
    for (const int tensor : kinds_of(shape.tp)) {
      for (TraceLane& lane : step_of(small, device, shape, {.tp = tensor, .pp = stage}))
        lanes.push_back(std::move(lane));
    }
  }
  return ops::recorded_products(lanes);
}

std::int64_t tune_products(ExecCtx ctx, const std::vector<ops::RecordedProduct>& products,
                           const std::string& output, const OnProduct& on_product) {
  TESSERA_ENSURE(ConfigError, ctx.device().is_cuda(), "matrix products are timed on a GPU, not on the ",
                 ctx.device());
  ctx.gemm_tuner = ops::make_gemm_tuner(true, output);
  std::int64_t timed = 0;
  for (const ops::RecordedProduct& product : products) {
    const ops::ProductTrial trial = ops::tune_product(ctx, product);
    timed += trial.known ? 0 : 1;
    on_product(product, trial);
  }
  return timed;
}

}  // namespace tessera
