#pragma once
/// Folders and files that appear only whole: written aside, synced, then put in place. Whoever is killed at
/// any moment leaves what was there before or what was to come, and nothing has to be repaired by hand.

#include <cstddef>
#include <filesystem>
#include <span>

namespace tessera {

/// What becomes of a folder that is there already when another is published in its place.
enum class Existing {
  refuse,   ///< an error, unless it is empty
  replace,  ///< the new one stands for it, whole
  update    ///< a model's files in it are replaced by the new ones, everything else in it stays
};

/// A folder while it is written, under a name that no other writer has. Destroyed before publish(), it is
/// removed, and the target is as it was. Of several that write one target each publishes its own, whole; the
/// last one stays.
class StagedDirectory {
 public:
  /// Makes an empty folder beside `target` (with Existing::update perhaps inside of it), after
  /// recover_directory(). Errors: IoError.
  explicit StagedDirectory(std::filesystem::path target, Existing existing = Existing::replace);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  /// Where to write.
  const std::filesystem::path& path() const { return staging_; }
  /// Syncs every file and folder in it, for writers that do not sync themselves. Errors: IoError.
  void sync() const;
  /// Puts the folder in place. What it takes the place of is exchanged with it atomically where the file
  /// system can do that (renameat2), and is removed only when the new one is whole and has its name. Once
  /// only. Errors: IoError; CheckpointError for a damaged safetensors file under Existing::update; the target
  /// is then as it was.
  void publish();

 private:
  void replace();
  void update();
  void unlock();

  std::filesystem::path target_;
  std::filesystem::path staging_;
  Existing existing_;
  bool inside_ = false;  // of the target
  int lock_ = -1;        // of the staging folder, so that nobody takes it for a leftover
};

/// Finishes or undoes what a killed process left of publishing `target`: the folder is then the old one or
/// the new one, and what was left beside it is gone. What a StagedDirectory of this machine still writes
/// stays. Errors: IoError.
void recover_directory(const std::filesystem::path& target);
/// The half of it that readers may do at any time, also beside a process that publishes: a folder of which
/// only the old one, set aside, is there gets its name back; an update that was decided is carried out.
/// Errors: IoError.
void settle_directory(const std::filesystem::path& target);

/// Removes a folder with all that is in it; killed half way, none of it is under that name any more. Links
/// are not followed. Errors: IoError.
void remove_directory(const std::filesystem::path& dir);

/// Writes a file under a temporary name, syncs it, renames it into place and syncs its folder: readers see
/// the old content or the new one. Errors: IoError; the old content then stays.
void publish_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

}  // namespace tessera
