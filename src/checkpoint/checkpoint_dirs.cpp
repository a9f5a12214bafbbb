#include "checkpoint/checkpoint_dirs.hpp"

#include <algorithm>
#include <charconv>
#include <iomanip>
#include <sstream>

#include "checkpoint/file_io.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace fs = std::filesystem;
using namespace checkpoint_detail;

namespace checkpoint_detail {
namespace {

constexpr std::string_view kIncomplete = ".incomplete-";
constexpr std::string_view kReplaced = "-replaced";

/// Folders and files directly in `root`; a link is neither.
std::vector<fs::directory_entry> entries_of(const fs::path& root) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  fs::directory_iterator it(root, error);
  if (error == std::errc::no_such_file_or_directory) return entries;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    if (!it->is_symlink()) entries.push_back(*it);
  }
  if (error) io_failed("list", root, error.value());
  return entries;
}

/// What a temporary name stands for.
std::optional<std::string> staged_target(std::string name) {
  if (!name.starts_with(kIncomplete)) return std::nullopt;
  name = without_mark(name.substr(kIncomplete.size())).string();
  if (name.ends_with(kReplaced)) name.resize(name.size() - kReplaced.size());
  return name;
}

/// Checkpoints that a crash has caught while they were replaced, back under their names; says where it fails.
std::vector<std::string> settle(const fs::path& root) {
  std::vector<std::string> problems;
  for (const auto& entry : entries_of(root)) {
    const auto target = staged_target(entry.path().filename().string());
    if (!target || !step_of(*target) || fs::exists(root / *target)) continue;
    try {
      settle_directory(root / *target);
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  }
  return problems;
}

bool is_sound(const fs::path& dir) {
  try {
    const CheckpointReader reader(dir);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Whether it is a checkpoint, and no other run's than `run`'s.
bool may_be_removed(const fs::path& dir, const std::string& run) {
  try {
    const std::string owner = read_manifest(dir / kManifestName).state.run;
    return run.empty() || owner.empty() || owner == run;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with("step-")) return std::nullopt;
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data() + 5, name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0 || checkpoint_name(step) != name)
    return std::nullopt;
  return step;
}

void remove_leftovers(const fs::path& root) {
  for (const auto& entry : entries_of(root)) {
    const auto target = staged_target(entry.path().filename().string());
    if (target && *target == kLatestName && entry.is_regular_file()) remove_tree(entry.path());
    if (target && step_of(*target) && entry.is_directory()) recover_directory(root / *target);
  }
}

}  // namespace checkpoint_detail

std::string checkpoint_name(std::int64_t step) {
  std::ostringstream name;
  name << "step-" << std::setfill('0') << std::setw(8) << step;
  return name.str();
}

std::vector<std::int64_t> list_checkpoints(const fs::path& root) {
  std::vector<std::int64_t> steps;
  for (const auto& entry : entries_of(root)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && entry.is_directory()) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

FoundCheckpoint find_latest(const fs::path& root, const FindOptions& options) {
  FoundCheckpoint found;
  found.problems = settle(root);
  for (const std::int64_t step : list_checkpoints(root)) {
    if (step >= options.before_step) continue;
    const fs::path dir = root / checkpoint_name(step);
    try {
      const CheckpointReader reader(dir);
      std::vector<std::string> problems;
      if (options.check_contents) problems = reader.verify();
      if (reader.state().step != step)
        problems.push_back(detail::concat(dir.string(), ": its manifest says step ", reader.state().step));
      if (problems.empty()) {
        found.dir = dir;
        found.step = step;
        return found;
      }
      found.problems.insert(found.problems.end(), problems.begin(), problems.end());
    } catch (const Error& error) {
      found.problems.emplace_back(error.what());
    }
  }
  return found;
}

fs::path resolve_checkpoint(const fs::path& path) {
  std::error_code error;
  if (step_of(path.filename().string())) settle_directory(path);
  if (fs::exists(path / kManifestName, error) || step_of(path.filename().string())) {
    const CheckpointReader check(path);
    return path;
  }
  if (!fs::is_directory(path, error)) bad_file(path, "", "there is no such folder", "Check the path.");
  const FoundCheckpoint found = find_latest(path);
  if (found.dir) return *found.dir;
  std::string reason = "holds no usable checkpoint";
  for (const auto& problem : found.problems) reason += "; " + problem;
  bad_file(path, "", reason, "Name a folder step-NNNNNNNN, or the folder that holds them.");
}

std::vector<fs::path> prune_checkpoints(const fs::path& root, int keep, std::int64_t protect,
                                        const std::string& run) {
  TESSERA_CHECK(keep >= 1, "at least one checkpoint must be kept, not ", keep);
  remove_leftovers(root);
  std::vector<fs::path> removed;
  int sound = protect >= 0 ? 1 : 0;
  for (const std::int64_t step : list_checkpoints(root)) {
    const fs::path dir = root / checkpoint_name(step);
    if (step == protect) continue;
    if (sound < keep) {
      if (is_sound(dir)) ++sound;
      continue;
    }
    if (!may_be_removed(dir, run)) continue;
    remove_directory(dir);
    removed.push_back(dir);
  }
  return removed;
}

}  // namespace tessera
