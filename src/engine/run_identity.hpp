#pragma once
/// Who a run is: a random name, in run.json of its folder and of its checkpoint folder, and in every
/// checkpoint.

#include <filesystem>
#include <optional>
#include <string>

namespace tessera {

struct Config;

struct RunIdentity {
  std::string id;               ///< random, made when the run begins
  std::string folder;           ///< where the run's folder was when it was last started, absolute
  std::string began_from = "";  ///< the absolute checkpoint.resume of a run that branched off; "" of others

  friend bool operator==(const RunIdentity&, const RunIdentity&) = default;
};

constexpr const char* kRunIdentityName = "run.json";

/// What run.json in `folder` says; nothing if there is none. Errors: ConfigError if it cannot be understood.
std::optional<RunIdentity> read_identity(const std::filesystem::path& folder);

/// Writes it, if it does not say so already. Errors: IoError.
void write_identity(const std::filesystem::path& folder, const RunIdentity& identity);

/// The run that `config` trains: the one of logging.dir, or a new one. Changes nothing. Errors: ConfigError
/// if the checkpoint folder is another run's, or that of the run which this one is a copy of, saying how to
/// go on.
RunIdentity identify_run(const Config& config);

}  // namespace tessera
