#include "cli/run_path.hpp"

#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/staged_directory.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/trainer.hpp"

namespace tessera::cli {

std::filesystem::path checkpoint_in(const std::filesystem::path& path) {
  return resolve_checkpoint(checkpoint_folder(path));
}

std::filesystem::path checkpoint_folder(const std::filesystem::path& path) {
  // What Accelerator.save_state wrote: a checkpoint per model.
  const std::filesystem::path saved = path / "tessera_state";
  settle_directory(saved);
  if (std::filesystem::exists(saved / "model_0")) {
    TESSERA_ENSURE(ConfigError, !std::filesystem::exists(saved / "model_1"), path.string(),
                   " holds several models: name one of them, such as ", (saved / "model_0").string());
    return saved / "model_0";
  }
  if (!std::filesystem::exists(path / "config.yaml")) return path;
  // A run may have been moved: its own checkpoints folder comes before the one its configuration names.
  if (std::filesystem::exists(path / "checkpoints")) return path / "checkpoints";
  return checkpoint_root(load_run_config(path / "config.yaml", {}, Logger::silent()));
}

namespace {

Config config_of_folder(const std::filesystem::path& path) {
  Settings config;
  config.model = open_model(path).config().model;
  // Nothing is trained on it, but layouts are checked with it.
  config.training.seq_length = std::min(config.training.seq_length, config.model.max_positions);
  for (const char* file : {"tokenizer.json", "vocab.json", "merges.txt"}) {
    if (std::filesystem::exists(path / file))
      checkpoint_detail::open_for_reading(path / file, SymbolicLinks::within_folder);  // no link elsewhere
  }
  if (std::filesystem::exists(path / "tokenizer.json"))
    config.data.tokenizer = (path / "tokenizer.json").string();
  else if (std::filesystem::exists(path / "vocab.json") && std::filesystem::exists(path / "merges.txt"))
    config.data.tokenizer = path.string();
  return config;
}

/// Whatever layout trained it, one process generates unless the overrides say more.
Config settled(Config config, const LoadOptions& options) {
  config.parallel = {};
  config.offload = {};  // which goes with stages of ZeRO
  if (!options.overrides.empty())
    config = parse_config(to_yaml(config), "the model's configuration", options.overrides);
  config.device.threads = options.threads;
  if (!config.device.index) config.device.index = options.device_index;
  return config;
}

}  // namespace

Config config_to_load(const std::filesystem::path& path, const LoadOptions& options) {
  if (is_model_folder(path)) return settled(config_of_folder(path), options);
  return settled(read_run_state(CheckpointReader(checkpoint_in(path))).config, options);
}

LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options) {
  LoadedModel loaded;
  if (is_model_folder(path)) {
    loaded.config = settled(config_of_folder(path), options);
    loaded.engine = build_engine(loaded.config, false, options.world, {}, options.gemm_tables);
    load_pretrained(path, loaded.config.model, *loaded.engine);
    return loaded;
  }
  const CheckpointReader reader(checkpoint_in(path));
  const RunState state = read_run_state(reader);
  loaded.config = settled(state.config, options);
  loaded.tokenizer = state.tokenizer;
  loaded.engine = build_engine(loaded.config, false, options.world, {}, options.gemm_tables);
  load_engine(reader, *loaded.engine);
  return loaded;
}

}  // namespace tessera::cli
