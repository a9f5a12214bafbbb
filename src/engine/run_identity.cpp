#include "engine/run_identity.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/file_io.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/engine/run_lock.hpp"
#include "tessera/engine/trainer.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string absolute_text(const fs::path& path) {
  return fs::absolute(path / "").lexically_normal().parent_path().string();
}

/// Whose the checkpoints of a folder are.
struct Owner {
  bool known = false;
  std::string id, folder;
};

/// Nothing if there are no checkpoints and nobody has claimed the folder.
std::optional<Owner> owner_of(const fs::path& root) {
  if (const auto claimed = read_identity(root)) return Owner{true, claimed->id, claimed->folder};
  std::optional<Owner> owner;
  for (const std::int64_t step : list_checkpoints(root)) {
    owner.emplace();
    try {
      owner->id = read_manifest(root / checkpoint_name(step) / "manifest.json").state.run;
      owner->known = !owner->id.empty();
      return owner;
    } catch (const Error&) {
      continue;  // a damaged one says nothing; the next may
    }
  }
  return owner;
}

bool lies_in(const fs::path& inner, const fs::path& outer) {
  const fs::path within = fs::path(absolute_text(inner)).lexically_relative(absolute_text(outer));
  return !within.empty() && *within.begin() != "..";
}

std::string own_folder_hint(const fs::path& dir) {
  return detail::concat("a checkpoint.dir of its own (null = ", (dir / "checkpoints").string(), ")");
}

}  // namespace

std::optional<RunIdentity> read_identity(const fs::path& folder) {
  const fs::path path = folder / kRunIdentityName;
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  try {
    const auto json = nlohmann::json::parse(text);
    return RunIdentity{json.at("run"), json.at("folder"), json.value("began_from", "")};
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat(path.string(), " does not say which run this is (", error.what(),
                                     "): remove it if the checkpoints in this folder are its own"));
  }
}

void write_identity(const fs::path& folder, const RunIdentity& identity) {
  if (read_identity(folder) == identity) return;
  nlohmann::ordered_json json{{"run", identity.id}, {"folder", identity.folder}};
  if (!identity.began_from.empty()) json["began_from"] = identity.began_from;
  checkpoint_detail::write_text(folder / kRunIdentityName, json.dump() + "\n");
  checkpoint_detail::sync_directory(folder);
}

RunIdentity identify_run(const Config& config) {
  const fs::path dir = config.logging.dir, root = checkpoint_root(config);
  const auto own = read_identity(dir);
  const auto owner = owner_of(root);
  // What lies in the run's folder is the run's: also if run.json was lost, or the folder copied or moved.
  const bool inside = lies_in(root, dir);
  RunIdentity run = own.value_or(RunIdentity{});
  if (!own) run.id = inside && owner && owner->known ? owner->id : random_name(16);
  run.folder = absolute_text(dir);
  if (!owner || (inside && !owner->known)) return run;

  const std::string whose = owner->folder.empty() ? "" : " (that in " + owner->folder + ")";
  TESSERA_ENSURE(ConfigError, owner->known, root.string(),
                 " holds checkpoints that name no run, and new ones would be mixed with them. To begin from "
                 "them, give checkpoint.resume=",
                 root.string(), " and this run ", own_folder_hint(dir));
  TESSERA_ENSURE(ConfigError, owner->id == run.id, "the checkpoints in ", root.string(), " are another run's",
                 whose, ", which is never written to. To begin from them as a new run, ",
                 "give checkpoint.resume=", root.string(), " and ", own_folder_hint(dir),
                 owner->folder.empty() ? "" : "; to go on with that run, give logging.dir=" + owner->folder);
  const bool elsewhere = !inside && !owner->folder.empty() && owner->folder != run.folder;
  if (elsewhere) {
    const auto original = read_identity(owner->folder);
    TESSERA_ENSURE(ConfigError, !original || original->id != run.id, dir.string(),
                   " is a copy of the run in ", owner->folder, ", whose checkpoints are in ", root.string(),
                   ": give this one ", own_folder_hint(dir));
  }
  return run;
}

}  // namespace tessera
