#pragma once
/// What a ParamStore and an Optimizer keep outside the device's memory, in host memory or in a file.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/config_optimizer.hpp"
#include "tessera/base/range.hpp"
#include "tessera/device/host_link.hpp"
#include "tessera/optim/state_piece.hpp"

namespace tessera {

/// Where a rank's offloaded numbers are.
struct OffloadPlace {
  /// `rank` is named in errors.
  OffloadPlace(const ExecCtx& on, const OffloadConfig& settings, int rank);

  /// Whether the device has memory of its own.
  bool apart() const { return ctx.device().is_cuda() || config.memory_apart; }

  ExecCtx ctx;  ///< of the device
  OffloadConfig config;
  int rank = 0;
  HostLink link;
  std::size_t in_memory = 0, on_disk = 0;  ///< bytes of the buffers that there are
  /// What a log should say: a file system that does not do without its cache, or that is memory itself.
  std::vector<std::string> notes;
};

/// `numel` numbers, zero at first, of which OffloadConfig::ratio lie outside the device: whole tiles from the
/// first on. A file has no name in its folder: whatever ends the process, nothing is left of it. Its bytes
/// are reserved when it is made.
class OffloadedBuffer final : public StateSource {
 public:
  /// `to`: cpu or nvme. On meta there is no memory and no file. Errors: ConfigError for nvme without a path
  /// and for one that is no folder; IoError, naming `what`, where host memory or the folder has no room.
  OffloadedBuffer(std::shared_ptr<OffloadPlace> place, OffloadTo to, std::string what, DType dtype,
                  std::int64_t numel);
  ~OffloadedBuffer() override;
  OffloadedBuffer(const OffloadedBuffer&) = delete;
  OffloadedBuffer& operator=(const OffloadedBuffer&) = delete;

  const std::string& what() const { return what_; }
  DType dtype() const { return dtype_; }
  std::int64_t numel() const { return numel_; }
  bool in_file() const { return to_ == OffloadTo::nvme; }

  /// f32 values on the host, once nothing is under way. Not during a TileWalk.
  void read(const Range& run, float* out) override;
  void write(const Range& run, const float* source) override;
  StateValues values(std::shared_ptr<OffloadedBuffer> self, const Range& run) const;

  /// Of host memory: begins to copy elements `run` to `target` on the device; what reads it there waits for
  /// the event.
  Event fetch(const Range& run, const Tensor& target);
  /// The other way; `source` may be given back once the device's stream has waited for the event.
  Event put(const Range& run, const Tensor& source);
  /// A copy on the device, for work of its stream.
  Tensor load(const Range& run);
  /// Elements `run` become those of `source`, on the device.
  void store(const Range& run, const Tensor& source);
  /// The same of host memory for values that nobody changes any more: the device goes on while they leave.
  void give(const Range& run, Tensor source);

  /// Of the device's memory.
  std::size_t resident_bytes() const { return resident_ ? resident_.nbytes() : 0; }

 private:
  friend class TileWalk;
  class File;

  std::int64_t tile() const { return place_->config.tile; }
  std::size_t offloaded_bytes() const { return static_cast<std::size_t>(away_) * size_of(dtype_); }
  std::size_t& counted() const { return in_file() ? place_->on_disk : place_->in_memory; }
  std::size_t bytes_of_tile() const { return static_cast<std::size_t>(tile()) * size_of(dtype_); }
  /// Whether tile number `tile` is outside the device.
  bool is_away(std::int64_t tile) const { return tile * this->tile() < away_; }
  std::byte* host(std::int64_t element) const {
    return memory_ == nullptr
               ? nullptr
               : static_cast<std::byte*>(memory_.get()) + static_cast<std::size_t>(element) * size_of(dtype_);
  }
  /// Elements of the part that stays on the device.
  Tensor resident(const Range& run) const { return resident_.narrow(0, run.begin - away_, run.count); }
  void read_tile(std::int64_t tile, std::span<std::byte> out) const;
  void write_tile(std::int64_t tile, std::span<const std::byte> bytes);
  template <typename Part>
  void each_file_tile(const Range& run, const Part& part);
  void open_window(std::int64_t tile);
  void close_window();

  std::shared_ptr<OffloadPlace> place_;
  OffloadTo to_;
  std::string what_;
  DType dtype_;
  std::int64_t numel_;
  std::int64_t away_ = 0;         // elements outside the device, whole tiles
  std::shared_ptr<void> memory_;  // of the host
  std::unique_ptr<File> file_;
  Tensor resident_;                               // those that are not away
  std::deque<std::pair<Event, Tensor>> leaving_;  // given; their memory is free once they have left
  // The tile of the file that was read or written here last: checkpoints come in small pieces.
  std::shared_ptr<void> window_;
  std::int64_t window_at_ = -1;
  bool window_changed_ = false;
};

}  // namespace tessera
