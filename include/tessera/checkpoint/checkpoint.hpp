#pragma once
/// Checkpoints of a run: folders `step-00000500` that are either whole or not there.
///
/// A save writes `.incomplete-step-00000500~0123abcd` (safetensors files of every rank, then manifest.json
/// with sizes and checksums), syncs it, renames it and then moves the `latest` pointer. Killed at any moment,
/// the folder holds all checkpoints it held before.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/manifest.hpp"
#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera {

/// One rank's part of a tensor.
struct CheckpointTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;                          ///< of the whole tensor
  TensorSlice slice;                    ///< the box held here
  std::string placement = "replicate";  ///< for people and for inspect; reading goes by `slice`
  const std::byte* data = nullptr;      ///< contiguous in host memory; null: `read` gives it when it is due
  std::function<std::shared_ptr<const std::byte>()> read = nullptr;

  /// A tensor that this rank holds whole.
  static CheckpointTensor whole(const TensorView& view, std::string placement = "replicate") {
    return {view.name, view.dtype, view.shape, TensorSlice::whole(view.shape), std::move(placement),
            view.data, nullptr};
  }
};

/// Moments of a save, in order; what a hook sees and tests interrupt.
enum class SavePhase {
  started,           ///< the incomplete folder exists
  tensor_written,    ///< after each tensor
  shard_written,     ///< a rank's file is synced and has its name
  manifest_written,  ///< everything is in the incomplete folder
  published,         ///< the folder has its final name
  pointer_written,   ///< `latest` names it
  pruned             ///< older checkpoints beyond `keep` are gone
};

struct SaveOptions {
  int keep = 0;  ///< valid checkpoints to keep, the new one included; 0 = all
  std::uint64_t chunk_bytes = 16u << 20;
  std::function<void(SavePhase)> on_phase;  ///< may throw; the save then fails as if the disk had
};

/// Saves a whole checkpoint from one process, as one file model_tp_0_pp_0.safetensors; returns its folder.
/// Errors: IoError (disk full, read-only, ...) with bytes needed and free; the folder then holds what it held
/// before.
std::filesystem::path save_checkpoint(const std::filesystem::path& root, const CheckpointState& state,
                                      std::span<const CheckpointTensor> tensors,
                                      const SaveOptions& options = {});

/// The same in steps, for several ranks: rank 0 makes a CheckpointSave; every rank writes its shards into
/// staging(); rank 0 gathers what they return and commits. Destroyed before commit, it removes the incomplete
/// folder.
class CheckpointSave {
 public:
  /// Removes what earlier crashes left, checks that `bytes` fit, makes the incomplete folder.
  CheckpointSave(std::filesystem::path root, std::int64_t step, std::uint64_t bytes,
                 SaveOptions options = {});
  ~CheckpointSave();
  const std::filesystem::path& staging() const;
  /// Writes the manifest from the records of all shards, publishes the folder, moves `latest`, removes old
  /// ones.
  std::filesystem::path commit(const CheckpointState& state, std::span<const std::string> records);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
/// Writes one file of a rank, under a name that no other rank's file has; returns a record (JSON text) for
/// commit(). A tensor held whole by several ranks is given by one of them only; a file may have several boxes
/// of one tensor. Readers find files by the manifest, so names are for people.
std::string write_checkpoint_shard(const std::filesystem::path& staging, const std::string& file,
                                   std::span<const CheckpointTensor> tensors,
                                   const SaveOptions& options = {});

/// Reads tensors of a checkpoint by name and global index, from whichever shards hold them. Every chunk of
/// bytes is checked against the manifest before it is handed out. Const members may be called from several
/// threads.
class CheckpointReader {
 public:
  /// Checks the manifest and the files' sizes. `on_progress` is called after each chunk of bytes that was
  /// read, by whichever thread reads. Errors: CheckpointError, IoError.
  explicit CheckpointReader(const std::filesystem::path& dir, std::function<void()> on_progress = {});
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  const std::filesystem::path& dir() const;
  const Manifest& manifest() const;
  const CheckpointState& state() const { return manifest().state; }
  /// The tensor's entry, or null.
  const Manifest::Tensor* find(std::string_view name) const;
  /// Reads a whole tensor. Errors: CheckpointError if it is not there or its bytes are damaged.
  void read(std::string_view name, std::span<std::byte> out) const;
  /// Reads a box of it into a contiguous `out`.
  void read(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const;
  /// Checks every byte; returns one line per problem.
  std::vector<std::string> verify() const;
  /// Checks the `part`-th of `parts` shares, which together are every byte once and are about equally large.
  /// Where a checkpoint has one file, or set of files, per rank, each share is a rank's own files.
  std::vector<std::string> verify(int part, int parts) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct FindOptions {
  bool check_contents = false;           ///< also check every byte, not only manifest, sizes and headers
  std::int64_t before_step = INT64_MAX;  ///< only checkpoints of earlier steps
};
struct FoundCheckpoint {
  std::optional<std::filesystem::path> dir;  ///< nothing if there is no usable checkpoint
  std::int64_t step = 0;
  std::vector<std::string> problems;  ///< why newer ones were passed over
};
/// The newest checkpoint of a folder that is whole. A damaged one is reported and the one before it taken.
FoundCheckpoint find_latest(const std::filesystem::path& root, const FindOptions& options = {});

/// `path` itself if it is a checkpoint, else the newest of the folder. Errors: CheckpointError saying what
/// was wrong.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& path);

/// Steps of all folders named like checkpoints, whole or not, newest first.
std::vector<std::int64_t> list_checkpoints(const std::filesystem::path& root);
/// "step-00000500"
std::string checkpoint_name(std::int64_t step);

/// Removes all but the `keep` (>= 1) newest whole checkpoints and what crashes left behind; never `protect`,
/// never a folder that is not ours, nor, where `run` is given, a checkpoint that names another run. Damaged
/// ones go only when they are older than everything kept. Returns what was removed.
std::vector<std::filesystem::path> prune_checkpoints(const std::filesystem::path& root, int keep,
                                                     std::int64_t protect = -1, const std::string& run = "");

/// Checks every byte of a checkpoint; one line per problem, none if it is sound.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& dir);

struct CheckpointSummary {
  struct Group {
    std::string prefix;  ///< up to the first dot: "param", "adam_m", ...
    std::int64_t tensors = 0;
    std::int64_t elements = 0;
    std::uint64_t bytes = 0;
  };
  std::filesystem::path dir;
  Manifest manifest;
  std::uint64_t bytes = 0;  ///< of all shard files
  std::vector<Group> groups;
};
/// What a checkpoint holds. Errors: CheckpointError, IoError.
CheckpointSummary inspect_checkpoint(const std::filesystem::path& dir);

}  // namespace tessera
