#include "engine/run_folder.hpp"

#include <algorithm>
#include <map>

#include "checkpoint/file_io.hpp"
#include "engine/run_data.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/engine/trainer.hpp"

namespace tessera {
namespace {

/// Keys whose change makes a different run: the model, the order of the data, the numbers' format.
bool identifies_run(const std::string& key) {
  if (key.starts_with("model."))
    return key != "model.init_from" && key != "model.reinitialize" && key != "model.init_std";
  return key == "training.seed" || key == "training.seq_length" || key == "training.decoder_seq_length" ||
         key == "training.global_batch_size" || key == "training.precision" || key == "optimizer.name" ||
         key == "data.split";
}

/// Whether there is nothing of anybody's in it; the launcher's logs of a run that is just starting, what one
/// leaves that was killed then, and the dumps of one that hung there before its first step do not count.
bool is_empty_folder(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) return !std::filesystem::exists(folder);
  const std::filesystem::directory_iterator entries(folder);
  return std::all_of(begin(entries), end(entries), [](const auto& entry) {
    const std::string name = entry.path().filename().string();
    return name == "ranks" || name == "flight" || name.starts_with(kRunLockName) ||
           name == checkpoint_detail::incomplete_name(kRunIdentityName);
  });
}

bool is_run_folder(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder / "config.yaml") ||
         std::filesystem::exists(folder / kRunIdentityName);
}

/// On the disk when it returns, with all its parents.
void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> parents;  // of what is not there yet
  for (auto missing = (folder / "").parent_path();
       !missing.empty() && !std::filesystem::exists(missing, error); missing = missing.parent_path())
    parents.push_back(missing.parent_path());
  std::filesystem::create_directories(folder, error);
  TESSERA_ENSURE(IoError, !error, "cannot make the folder ", folder.string(), ": ", error.message());
  for (const auto& parent : parents) checkpoint_detail::sync_directory(parent);
}

/// Whether a run got as far as its first step or checkpoint: before that there is nothing to mix up.
bool holds_work(const Config& config) {
  const std::filesystem::path metrics = std::filesystem::path(config.logging.dir) / "metrics.jsonl";
  std::error_code error;
  const auto bytes = std::filesystem::file_size(metrics, error);
  return (!error && bytes > 0) || !list_checkpoints(checkpoint_root(config)).empty();
}

}  // namespace

void check_run_folder(const Config& config, bool restarted) {
  const std::filesystem::path dir = config.logging.dir, root = checkpoint_root(config);
  TESSERA_ENSURE(ConfigError, is_empty_folder(dir) || is_run_folder(dir), "logging.dir ", dir.string(),
                 " is not empty and holds no run of Tessera: choose another folder");
  TESSERA_ENSURE(
      ConfigError, restarted || config.checkpoint.resume != "none" || list_checkpoints(root).empty(),
      root.string(),
      " holds checkpoints, which checkpoint.resume=none would mix with new ones: remove them or choose "
      "another logging.dir");
  for (const auto& folder : {dir, root}) RunLock::refuse_if_held(folder);
  identify_run(config);
}

Config load_run_config(const std::filesystem::path& path, const std::vector<std::string>& overrides,
                       const Logger& log) {
  Config config = load_config(path, overrides);
  read_data_lists(config);
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const bool given = std::any_of(overrides.begin(), overrides.end(),
                                 [](const std::string& text) { return text.starts_with("logging.dir="); });
  if (given || path.filename() != "config.yaml" || !std::filesystem::exists(folder / kRunIdentityName))
    return config;
  std::error_code absent;
  if (std::filesystem::equivalent(config.logging.dir, folder, absent)) return config;
  log.info("logging.dir is ", folder.string(), ", where this config.yaml lies (it says ", config.logging.dir,
           ": the run was moved or copied)");
  config.logging.dir = folder.string();
  return config;
}

RunFolder::RunFolder(const Config& config, const Logger& log, const RunFolderOptions& options)
    : config_(config), log_(log), restarted_(options.restarted), root_(checkpoint_root(config)) {
  check_run_folder(config, restarted_);
  const std::filesystem::path dir = config.logging.dir;
  make_folder(dir);
  const RunLock::Sighting seen = RunLock::sight(root_);
  locks_.emplace_back(dir, log, RunLockTimes{}, options.on_wait);
  write_identity(dir, identify_run(config));
  make_folder(root_);
  if (!std::filesystem::equivalent(dir, root_))
    locks_.emplace_back(root_, log, RunLockTimes{}, options.on_wait, seen);
  identity_ = identify_run(config);  // now that nobody else can change it
  write_identity(root_, identity_);
  if (std::filesystem::exists(dir / "config.yaml") && holds_work(config)) {
    check_same_run(load_config(dir / "config.yaml"), dir / "config.yaml");
  }
}

bool RunFolder::is_own(const std::filesystem::path& checkpoint) const {
  std::error_code absent;
  return std::filesystem::equivalent(checkpoint.parent_path(), root_, absent);
}

std::optional<std::filesystem::path> RunFolder::given_checkpoint(const std::string& resume) {
  const auto steps = list_checkpoints(root_);
  const std::string source = std::filesystem::absolute(resume).lexically_normal().string();
  if (!steps.empty() && identity_.began_from == source) {
    log_.info("this run began from ", resume, " and goes on from its own checkpoints");
    return std::nullopt;
  }
  const std::filesystem::path chosen = resolve_checkpoint(resume);
  TESSERA_ENSURE(ConfigError, steps.empty() || is_own(chosen), root_.string(),
                 " holds checkpoints of this run, and beginning from ", chosen.string(),
                 " would write over them: leave checkpoint.resume out to go on, or give the new run a "
                 "logging.dir and checkpoint.dir of its own");
  TESSERA_ENSURE(ConfigError, !is_own(chosen) || chosen.filename() == checkpoint_name(steps.front()),
                 root_.string(), " holds checkpoints newer than ", chosen.filename().string(),
                 ", which a later resume would take for this run's: move them away, or give the branch a "
                 "logging.dir and checkpoint.dir of its own");
  if (!is_own(chosen)) {
    identity_.began_from = source;
    write_identity(config_.logging.dir, identity_);
  }
  return chosen;
}

std::vector<std::filesystem::path> RunFolder::checkpoints_to_try() {
  // What the first start was told is done: the run has begun where it should.
  const bool begun = restarted_ && !list_checkpoints(root_).empty();
  const std::string resume = begun ? "auto" : config_.checkpoint.resume;
  if (resume == "none") return {};
  if (resume != "auto") {
    given_ = given_checkpoint(resume);
    if (given_) return {*given_};
  }
  std::vector<std::filesystem::path> all;
  for (const std::int64_t step : list_checkpoints(root_)) all.push_back(root_ / checkpoint_name(step));
  return all;
}

void RunFolder::settle(const WholeCheckpoint& found) const {
  if (!found.dir && given_) {
    std::string problems;
    for (const std::string& problem : found.problems) problems += "\n  " + problem;
    throw CheckpointError(
        detail::concat(given_->string(), ", which checkpoint.resume names, is damaged:", problems));
  }
  for (const std::string& problem : found.problems) log_.warning("damaged checkpoint passed over: ", problem);
  TESSERA_ENSURE(CheckpointError, found.dir || found.problems.empty(), "no checkpoint in ", root_.string(),
                 " can be used (see the warnings above). Move them away to start anew");
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
  const std::filesystem::path dir = config_.logging.dir;
  checkpoint_detail::write_text(dir / "config.yaml", to_yaml(config_));
  checkpoint_detail::sync_directory(dir);
}

std::unique_ptr<MetricsFile> RunFolder::open_metrics(std::int64_t step,
                                                     const std::filesystem::path& resumed) const {
  const std::filesystem::path path = std::filesystem::path(config_.logging.dir) / "metrics.jsonl";
  auto file = std::make_unique<MetricsFile>(path, step);
  const MetricsHistory& history = file->history();
  if (!history.dropped.empty())
    log_.info(path.string(), ": ", history.dropped, ", after the last checkpoint, are computed again");
  if (!history.kept_as.empty()) {
    log_.warning("the run starts with step 1, as ", root_.string(), " holds no checkpoint, though ",
                 path.string(), " has its steps up to ", history.last, ": that file is now ",
                 history.kept_as.string());
  }
  // A run that branched off begins with the step after its checkpoint's.
  if (!history.missing.empty() && (history.lines > 0 || is_own(resumed))) {
    log_.warning(path.string(), " has no line for ", history.missing, ", though the checkpoint is of step ",
                 step, history.damage.empty() ? "" : " (" + history.damage + ")",
                 ": the record of the run has a gap there");
  }
  return file;
}

void RunFolder::check_still_ours() {
  for (RunLock& lock : locks_) lock.check_still_ours();
}

void RunFolder::refuse_if_seen_lost() const {
  for (const RunLock& lock : locks_) lock.refuse_if_seen_lost();
}

}  // namespace tessera
