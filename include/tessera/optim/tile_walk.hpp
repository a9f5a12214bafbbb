#pragma once
/// TileWalk: brings offloaded numbers to the device in tiles while others are used and go back.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/optim/offloaded_buffer.hpp"

namespace tessera {

class TileWalk {
 public:
  struct Part {
    std::shared_ptr<OffloadedBuffer> buffer;
    bool reads = true, writes = true;
  };
  /// `parts`: buffers of one place and of equal length.
  TileWalk(std::shared_ptr<OffloadPlace> place, std::vector<Part> parts);
  /// Waits for what is under way.
  ~TileWalk();
  TileWalk(const TileWalk&) = delete;
  TileWalk& operator=(const TileWalk&) = delete;

  /// Elements of a tile; the last one may have fewer that count.
  std::int64_t tile() const { return place_->config.tile; }
  /// Another buffer of the same kind takes a part's place.
  void exchange(std::size_t part, std::shared_ptr<OffloadedBuffer> buffer) {
    parts_[part].buffer = std::move(buffer);
  }
  /// What is done with tile number `tile`, on the device: its elements of each part.
  using Use = std::function<void(std::int64_t tile, const std::vector<Tensor>& values)>;
  /// Brings the given tiles, hands each to `use` in this order and takes it back. While one is used the next
  /// are read and those before are written. What is in host memory the device's stream does by itself; the
  /// host waits for files alone. Errors: IoError; those of `use`.
  void walk(const std::vector<std::int64_t>& tiles, const Use& use);
  /// Of the device's memory, or on the CPU of the host's: tiles that are under way.
  std::size_t resident_bytes() const;

 private:
  class Threads;
  struct Slot;

  bool staged(const Part& part) const { return part.buffer->in_file(); }
  /// Files are read to and written from the very memory that work uses.
  bool in_place() const { return all_in_files_ && !place_->apart(); }
  Slot& slot_of(std::size_t i) const { return *slots_[i % slots_.size()]; }
  void ask(std::size_t i, std::int64_t tile);
  void bring(std::size_t i, std::int64_t tile);
  void take_back(std::size_t i, std::int64_t tile);
  std::vector<Tensor> values_of(std::size_t i, std::int64_t tile) const;

  std::shared_ptr<OffloadPlace> place_;
  std::vector<Part> parts_;
  bool all_in_files_ = true;
  std::vector<std::unique_ptr<Slot>> slots_;    // of files: what is read ahead and written behind
  std::vector<std::vector<Tensor>> on_device_;  // two sets of tiles, by part
  std::vector<Event> there_;                    // of the sets
  std::unique_ptr<Threads> threads_;            // the first to go: they work on what is above
};

}  // namespace tessera
