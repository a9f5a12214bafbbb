#pragma once
/// Checkpoints that training does not wait for.

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

#include "tessera/engine/state.hpp"

namespace tessera {

/// Host memory for a copy of what is saved, kept from one save to the next: its pages are there already.
class StagingMemory {
 public:
  /// At least so many bytes; what was in it may be lost.
  std::byte* at_least(std::size_t bytes);
  std::size_t size() const { return size_; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_ = 0;
};

/// A save by a thread of low priority. Made, it has copied this rank's part to host memory, and the engine
/// may go on. Each rank's thread writes its files into the incomplete folder and leaves a record of them
/// there; rank 0's puts the checkpoint in place when it has found the records of all: no message is sent
/// meanwhile. A process that dies before leaves what was there.
class BackgroundSave {
 public:
  /// As save_engine, whose arguments these are; options.on_phase is called by the thread. `memory` is the
  /// copy's until the end of this object. Collective. Errors: IoError, on every rank.
  BackgroundSave(const std::filesystem::path& root, Engine& engine, const RunState& run,
                 const SaveOptions& options, const StateParts& parts, StagingMemory& memory);
  /// Finishes this rank's files; rank 0 gives the others ten seconds and gives up then.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  std::int64_t step() const;
  /// Whether wait() would return, or throw, without waiting: on rank 0 the checkpoint is there, or something
  /// failed on any rank; on another one its own part is written. Not collective.
  bool settled() const;
  /// Waits until the checkpoint is in place; returns its folder. Collective. Errors: what went wrong on the
  /// first rank where something did, on every rank; what was saved before stays.
  std::filesystem::path wait();
  /// The same of this rank alone, in any thread: rank 0's checkpoint is in place, another rank's part is
  /// written. Errors: IoError.
  std::filesystem::path wait_here();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether saving in the background fits into the hosts' memory, and what it needs.
struct BackgroundRoom {
  bool fits = false;
  std::int64_t needed_bytes = 0;  ///< of the host with the least room: copies of all its ranks' parts
  std::int64_t free_bytes = 0;    ///< there
  std::string host;
  std::int64_t largest_bytes = 0;  ///< the largest part of a rank
};
/// Collective. `parts`: as they will be saved.
BackgroundRoom background_room(Engine& engine, const StateParts& parts = {});

}  // namespace tessera
