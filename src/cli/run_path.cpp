#include "cli/run_path.hpp"

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

LoadedModel load_model(const std::filesystem::path& path, std::int64_t threads,
                       const std::vector<std::string>& gemm_tables) {
  LoadedModel loaded;
  if (is_model_folder(path)) {
    const ModelConfig model = open_model(path).config().model;
    loaded.config.model = model;
    for (const char* file : {"tokenizer.json", "vocab.json", "merges.txt"}) {
      if (std::filesystem::exists(path / file))
        checkpoint_detail::open_for_reading(path / file, SymbolicLinks::within_folder);  // no link elsewhere
    }
    if (std::filesystem::exists(path / "tokenizer.json"))
      loaded.config.data.tokenizer = (path / "tokenizer.json").string();
    else if (std::filesystem::exists(path / "vocab.json") && std::filesystem::exists(path / "merges.txt"))
      loaded.config.data.tokenizer = path.string();
    loaded.config.device.threads = threads;
    loaded.engine = build_engine(loaded.config, false, nullptr, {}, gemm_tables);
    load_pretrained(path, model, *loaded.engine);
    return loaded;
  }
  const CheckpointReader reader(checkpoint_in(path));
  const RunState state = read_run_state(reader);
  loaded.config = state.config;
  loaded.tokenizer = state.tokenizer;
  loaded.config.parallel = {};  // whatever layout trained it, one process generates
  loaded.config.device.threads = threads;
  loaded.engine = build_engine(loaded.config, false, nullptr, {}, gemm_tables);
  load_engine(reader, *loaded.engine);
  return loaded;
}

}  // namespace tessera::cli
