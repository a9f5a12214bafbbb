#include "tessera/optim/tile_walk.hpp"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "tessera/base/error.hpp"

namespace tessera {

/// A few threads that do what they are given, each thing once, in order of asking.
class TileWalk::Threads {
 public:
  explicit Threads(std::size_t count) {
    sigset_t all, before;  // signals are for the thread that trains
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (std::size_t i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Threads() {
    {
      const std::lock_guard lock(mutex_);
      leaving_ = true;
    }
    asked_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  std::future<void> run(std::function<void()> work) {
    std::packaged_task<void()> task(std::move(work));
    std::future<void> done = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    asked_.notify_one();
    return done;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      asked_.wait(lock, [this] { return leaving_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable asked_;
  std::deque<std::packaged_task<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool leaving_ = false;
};

/// Host memory of a tile of each part that is in a file, and what is under way with it.
struct TileWalk::Slot {
  std::vector<std::shared_ptr<void>> memory = {};  // by part; null where the part is in no file
  std::future<void> pending = {};

  void wait() {
    if (pending.valid()) pending.get();
  }
};

TileWalk::TileWalk(std::shared_ptr<OffloadPlace> place, std::vector<Part> parts)
    : place_(std::move(place)), parts_(std::move(parts)) {
  bool any_file = false;
  for (const Part& part : parts_) {
    TESSERA_CHECK_EQ(part.buffer->numel(), parts_[0].buffer->numel(), "elements of ", part.buffer->what());
    any_file = any_file || staged(part);
    all_in_files_ = all_in_files_ && staged(part);
  }
  for (std::int64_t i = 0; any_file && i < place_->config.buffers; ++i) {
    slots_.push_back(std::make_unique<Slot>());
    for (const Part& part : parts_)
      slots_.back()->memory.push_back(
          staged(part) ? place_->link.memory(part.buffer->bytes_of_tile(), "offload.buffers") : nullptr);
  }
  if (!in_place()) {
    there_.resize(2);
    on_device_.resize(2);
    for (std::vector<Tensor>& set : on_device_) {
      for (const Part& part : parts_)
        set.push_back(Tensor::empty(place_->ctx, {tile()}, part.buffer->dtype()));
    }
  }
  if (any_file && !place_->ctx.device().is_meta()) threads_ = std::make_unique<Threads>(slots_.size());
}

TileWalk::~TileWalk() {
  try {
    place_->link.synchronize();
  } catch (const std::exception&) {
    // Whoever waits for what is copied hears of it there.
  }
}

std::size_t TileWalk::resident_bytes() const {
  std::size_t bytes = 0;
  for (const std::vector<Tensor>& set : on_device_) {
    for (const Tensor& tensor : set) bytes += tensor.nbytes();
  }
  if (!in_place()) return bytes;
  for (const Part& part : parts_) bytes += slots_.size() * part.buffer->bytes_of_tile();
  return bytes;
}

/// Files: tile number `tile` begins to be read for the walk's `i`th turn.
void TileWalk::ask(std::size_t i, std::int64_t tile) {
  if (!threads_ || !parts_[0].buffer->is_away(tile)) return;
  Slot& slot = slot_of(i);
  slot.wait();
  slot.pending = threads_->run([this, &slot, tile] {
    for (std::size_t k = 0; k < parts_.size(); ++k) {
      if (!staged(parts_[k]) || !parts_[k].reads) continue;
      parts_[k].buffer->read_tile(
          tile, {static_cast<std::byte*>(slot.memory[k].get()), parts_[k].buffer->bytes_of_tile()});
    }
  });
}

/// It begins to come to the device.
void TileWalk::bring(std::size_t i, std::int64_t tile) {
  if (!parts_[0].buffer->is_away(tile)) return;
  if (threads_) slot_of(i).wait();
  if (in_place()) return;
  for (std::size_t k = 0; k < parts_.size(); ++k) {
    if (!parts_[k].reads) continue;
    OffloadedBuffer& buffer = *parts_[k].buffer;
    const Tensor& target = on_device_[i % 2][k];
    const void* const source =
        threads_ && staged(parts_[k]) ? slot_of(i).memory[k].get() : buffer.host(tile * this->tile());
    there_[i % 2] = place_->link.to_device(target.raw(), source, target.nbytes());
  }
}

std::vector<Tensor> TileWalk::values_of(std::size_t i, std::int64_t tile) const {
  std::vector<Tensor> values;
  for (std::size_t k = 0; k < parts_.size(); ++k) {
    OffloadedBuffer& buffer = *parts_[k].buffer;
    if (!buffer.is_away(tile)) {
      values.push_back(buffer.resident({tile * this->tile(), this->tile()}));
    } else if (!in_place()) {
      values.push_back(on_device_[i % 2][k]);
    } else if (threads_) {
      values.push_back(Tensor::wrap(slot_of(i).memory[k].get(), {this->tile()}, buffer.dtype()));
    } else {
      values.push_back(Tensor::empty(place_->ctx, {this->tile()}, buffer.dtype()));  // meta
    }
  }
  return values;
}

/// It begins to go back.
void TileWalk::take_back(std::size_t i, std::int64_t tile) {
  if (!parts_[0].buffer->is_away(tile)) return;
  Event left;
  for (std::size_t k = 0; k < parts_.size() && !in_place(); ++k) {
    if (!parts_[k].writes) continue;
    const Tensor& source = on_device_[i % 2][k];
    void* const target = threads_ && staged(parts_[k]) ? slot_of(i).memory[k].get()
                                                       : parts_[k].buffer->host(tile * this->tile());
    left = place_->link.to_host(target, source.raw(), source.nbytes());
  }
  if (!threads_) return;
  if (in_place()) place_->ctx.stream->synchronize();
  slot_of(i).pending = threads_->run([this, &slot = slot_of(i), tile, left] {
    left.synchronize();  // and so what was read from here has come to the device
    for (std::size_t k = 0; k < parts_.size(); ++k) {
      if (!staged(parts_[k]) || !parts_[k].writes) continue;
      parts_[k].buffer->write_tile(
          tile, {static_cast<const std::byte*>(slot.memory[k].get()), parts_[k].buffer->bytes_of_tile()});
    }
  });
}

void TileWalk::walk(const std::vector<std::int64_t>& tiles, const Use& use) {
  for (const Part& part : parts_) part.buffer->close_window();
  // Half of the slots read ahead; the others are being written meanwhile.
  const std::size_t ahead = std::max<std::size_t>(1, slots_.size() / 2);
  for (std::size_t i = 0; i < std::min(ahead, tiles.size()); ++i) ask(i, tiles[i]);
  if (!tiles.empty()) bring(0, tiles[0]);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (i + ahead < tiles.size()) ask(i + ahead, tiles[i + ahead]);
    // The set of the tile before is free once that has gone back, beside which this one is used.
    if (i + 1 < tiles.size() && !in_place()) bring(i + 1, tiles[i + 1]);
    if (in_place()) bring(i, tiles[i]);
    if (!in_place()) place_->ctx.stream->wait(there_[i % 2]);
    use(tiles[i], values_of(i, tiles[i]));
    take_back(i, tiles[i]);
  }
  for (const auto& slot : slots_) slot->wait();
}

}  // namespace tessera
