#pragma once
/// Optimizer state that lies in host memory or in a file instead of the device's memory, and comes and goes
/// in tiles while the device updates others.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/config_optimizer.hpp"
#include "tessera/base/range.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/optim/state_piece.hpp"

namespace tessera {

/// fp32 numbers of several kinds, `numel` of each, zero at first. The file has no name in its folder:
/// whatever ends the process, nothing is left of it. Its bytes are reserved when it is made.
class OffloadedState {
 public:
  /// `rank` is named in errors. On meta there is no file. Errors: ConfigError for nvme without a path and for
  /// one that is no folder; IoError where the folder cannot be written or has no room.
  OffloadedState(const ExecCtx& ctx, const OffloadConfig& config, std::vector<std::string> kinds,
                 std::int64_t numel, int rank);
  /// Waits for what is under way.
  ~OffloadedState();
  OffloadedState(const OffloadedState&) = delete;
  OffloadedState& operator=(const OffloadedState&) = delete;

  const std::vector<std::string>& kinds() const { return kinds_; }
  /// The place of a kind among these, or nothing.
  std::optional<std::size_t> place_of(std::string_view kind) const;
  /// Elements of a tile; the last one may have fewer that count.
  std::int64_t tile() const { return tile_; }
  /// What is done with tile number `tile`: its elements of each kind, on the device.
  using Use = std::function<void(std::int64_t tile, const std::vector<Tensor>& state)>;
  /// Brings the given tiles, hands each to `use` in this order and takes it back. While one is used the next
  /// are read and those before are written. Errors: IoError; those of `use`.
  void walk(const std::vector<std::int64_t>& tiles, const Use& use);
  /// Elements `run` of one kind, to be read and written. Errors: InvalidArgument for another kind.
  StateValues values(const std::string& kind, const Range& run);

  /// Of the device's memory, or on the CPU of the host's.
  std::size_t resident_bytes() const;
  /// In host memory or in the file.
  std::size_t offloaded_bytes() const;
  /// What a log should say: a file system that does not do without its cache, or that is memory itself.
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  class Backing;
  class File;
  class Memory;
  class Window;
  class Threads;
  struct Slot;

  std::size_t bytes_of_tile() const { return static_cast<std::size_t>(tile_) * sizeof(float); }
  std::uint64_t offset_of(std::size_t kind, std::int64_t tile) const;
  Tensor of_slot(const Slot& slot, std::size_t kind) const;
  void ask(Slot& slot, std::int64_t tile);
  void put_back(Slot& slot, std::int64_t tile);
  void use_slot(const Slot& slot, std::int64_t tile, const Use& use);
  void wait();

  ExecCtx ctx_;
  std::vector<std::string> kinds_;
  std::int64_t tile_ = 0, tiles_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<Backing> backing_;  // null on meta
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Tensor> on_device_;                 // by kind, where the device is not the host
  std::vector<std::shared_ptr<Window>> windows_;  // by kind
  std::unique_ptr<Threads> threads_;              // the first to go: they work on what is above
};

}  // namespace tessera
