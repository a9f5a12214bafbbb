#pragma once
/// What `preprocess` keeps while it works, so that after a kill the same call goes on where it was.

#include <optional>
#include <string>
#include <vector>

#include "data/documents.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {

/// How far a call is.
struct PreprocessMark {
  DocumentPosition position{};  ///< of the input
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t long_documents = 0;
  std::int64_t bytes = 0;           ///< of input
  std::vector<IndexedMark> keys{};  ///< of each dataset that is written
};

/// A folder that one process has for itself. It stays when the process is killed, or when destroyed after
/// keep(); otherwise it is removed.
class Unfinished {
 public:
  /// Makes the folder or takes over what is there. Errors: ConfigError if another process uses it; IoError.
  explicit Unfinished(std::string folder);
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

  const std::string& folder() const { return folder_; }
  /// What a call with the same `identity` left. `note` is told why there is nothing, where there was
  /// something.
  std::optional<PreprocessMark> find(const std::string& identity, std::string& note);
  /// Removes what earlier calls left in the folder. Errors: IoError.
  void clear();
  /// Replaces what find() finds. Errors: IoError.
  void write(const std::string& identity, const PreprocessMark& mark);
  bool has_mark() const { return has_mark_; }
  void keep() { keep_ = true; }

 private:
  std::string folder_;
  int lock_ = -1;
  bool has_mark_ = false;
  bool keep_ = false;
};

/// All that decides what a call writes: its input as it lies there, and its options, as JSON text.
std::string identity_of(const std::vector<std::string>& paths, const std::string& options);

}  // namespace tessera
