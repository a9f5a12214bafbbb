#include "engine/run_folder.hpp"

#include <algorithm>
#include <fstream>
#include <map>

#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/engine/trainer.hpp"

namespace tessera {
namespace {

/// Keys whose change makes a different run: the model, the order of the data, the numbers' format.
bool identifies_run(const std::string& key) {
  if (key.starts_with("model.")) return key != "model.init_from" && key != "model.init_std";
  return key == "training.seed" || key == "training.seq_length" || key == "training.global_batch_size" ||
         key == "training.precision" || key == "optimizer.name" || key == "data.split" ||
         key == "data.tokenizer";
}

/// Whether there is nothing of anybody's in it; the launcher's logs of a run that is just starting do not
/// count.
bool is_empty_folder(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) return !std::filesystem::exists(folder);
  const std::filesystem::directory_iterator entries(folder);
  return std::all_of(begin(entries), end(entries),
                     [](const auto& entry) { return entry.path().filename() == "ranks"; });
}

/// Whether a run got as far as its first step or checkpoint: before that there is nothing to mix up.
bool holds_work(const Config& config) {
  const std::filesystem::path metrics = std::filesystem::path(config.logging.dir) / "metrics.jsonl";
  std::error_code error;
  const auto bytes = std::filesystem::file_size(metrics, error);
  return (!error && bytes > 0) || !list_checkpoints(checkpoint_root(config)).empty();
}

}  // namespace

void check_run_folder(const Config& config) {
  const std::filesystem::path dir = config.logging.dir;
  const bool foreign = !is_empty_folder(dir) && !std::filesystem::exists(dir / "config.yaml");
  TESSERA_ENSURE(ConfigError, !foreign, "logging.dir ", dir.string(),
                 " is not empty and holds no run of Tessera: choose another folder");
  TESSERA_ENSURE(
      ConfigError, config.checkpoint.resume != "none" || list_checkpoints(checkpoint_root(config)).empty(),
      checkpoint_root(config).string(),
      " holds checkpoints, which checkpoint.resume=none would mix with new ones: remove them or choose "
      "another logging.dir");
}

RunFolder::RunFolder(const Config& config, const Logger& log) : config_(config), log_(log) {
  check_run_folder(config);
  const std::filesystem::path dir = config.logging.dir;
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  TESSERA_ENSURE(IoError, !error, "cannot make the folder ", dir.string(), ": ", error.message());
  if (std::filesystem::exists(dir / "config.yaml") && holds_work(config)) {
    check_same_run(load_config(dir / "config.yaml"), dir / "config.yaml");
  }
}

std::optional<std::filesystem::path> RunFolder::checkpoint_to_resume() const {
  const std::string& resume = config_.checkpoint.resume;
  if (resume == "none") return std::nullopt;
  const std::filesystem::path root = checkpoint_root(config_);
  if (resume != "auto") {
    const std::filesystem::path chosen = resolve_checkpoint(resume);
    const auto steps = list_checkpoints(root);
    const bool rewinds = std::filesystem::exists(root) &&
                         std::filesystem::equivalent(chosen.parent_path(), root) && !steps.empty() &&
                         chosen.filename() != checkpoint_name(steps.front());
    TESSERA_ENSURE(ConfigError, !rewinds, root.string(), " holds checkpoints newer than ",
                   chosen.filename().string(),
                   ", which a later resume would take for this run's: move them away, or give the branch a "
                   "logging.dir and checkpoint.dir of its own");
    return chosen;
  }
  const FoundCheckpoint found = find_latest(root, {.check_contents = true});
  for (const std::string& problem : found.problems) log_.warning("damaged checkpoint passed over: ", problem);
  TESSERA_ENSURE(CheckpointError, found.dir || found.problems.empty(), "no checkpoint in ", root.string(),
                 " can be used (see the warnings above). Move them away to start anew");
  return found.dir;
}

void RunFolder::check_same_run(const Config& saved, const std::filesystem::path& from) const {
  std::map<std::string, std::string> before;
  for (const ConfigItem& item : list_items(saved)) before[item.key] = item.value;
  std::string differences;
  for (const ConfigItem& item : list_items(config_)) {
    const std::string& old = before[item.key];
    if (old == item.value) continue;
    if (identifies_run(item.key)) {
      differences += "\n  " + item.key + ": " + old + " there, " + item.value + " here";
    } else if (!item.key.starts_with("logging.") && !item.key.starts_with("checkpoint.")) {
      if (told_.insert(item.key).second) log_.info(item.key, " changes from ", old, " to ", item.value);
    }
  }
  TESSERA_ENSURE(ConfigError, differences.empty(), from.string(), " belongs to another run:", differences,
                 "\nChoose another logging.dir, or make the configurations agree");
}

void RunFolder::write_config() const {
  const std::filesystem::path path = std::filesystem::path(config_.logging.dir) / "config.yaml";
  const std::filesystem::path temporary = path.string() + ".tmp";
  {
    std::ofstream out(temporary);
    out << to_yaml(config_);
    out.flush();
    TESSERA_ENSURE(IoError, out.good(), "cannot write ", temporary.string());
  }
  std::filesystem::rename(temporary, path);
}

}  // namespace tessera
