#include "tessera/optim/offloaded_state.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <span>
#include <thread>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

/// What reading and writing without the system's cache asks of addresses, places and lengths.
constexpr std::size_t kAligned = 4096;

std::size_t rounded_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

std::string text_of(int code) { return std::generic_category().message(code); }

}  // namespace

/// Bytes outside the device, zero at first. Several threads may use ranges that do not overlap.
class OffloadedState::Backing {
 public:
  virtual ~Backing() = default;
  virtual void read(std::uint64_t offset, std::span<std::byte> out) const = 0;
  virtual void write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
};

class OffloadedState::Memory final : public Backing {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {}
  void read(std::uint64_t offset, std::span<std::byte> out) const override {
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  void write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
  }

 private:
  std::vector<std::byte> bytes_;
};

class OffloadedState::File final : public Backing {
 public:
  File(std::string folder, std::size_t bytes, int rank, std::vector<std::string>& notes)
      : folder_(std::move(folder)), rank_(rank) {
    struct stat found = {};
    TESSERA_ENSURE(ConfigError, ::stat(folder_.c_str(), &found) == 0 && S_ISDIR(found.st_mode),
                   "offload.path: ", folder_,
                   " is not a folder; make it, on the disk that is to hold the state");
    open_nameless(O_DIRECT);
    if (fd_ < 0 && errno == EINVAL) {
      open_nameless(0);
      notes.push_back("offload.path: the file system of " + folder_ +
                      " reads and writes through the system's cache only, which takes memory and time");
    }
    if (fd_ < 0) fail("make a file in", errno);
    int refused = 0;
    do {
      refused = bytes == 0 ? 0 : ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    } while (refused == EINTR);
    if (refused != 0) {
      ::close(fd_);
      fail(detail::concat("reserve ", bytes, " bytes in").c_str(), refused);
    }
    struct statfs system = {};
    if (::fstatfs(fd_, &system) == 0 && system.f_type == TMPFS_MAGIC)
      notes.push_back("offload.path: " + folder_ +
                      " is memory (tmpfs), so that nothing is gained; name a disk");
  }
  ~File() override { ::close(fd_); }

  void read(std::uint64_t offset, std::span<std::byte> out) const override {
    whole(offset, out.size(), "read", [&](std::size_t done) {
      return ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    });
  }
  void write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    whole(offset, bytes.size(), "write", [&](std::size_t done) {
      return ::pwrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    });
  }

 private:
  void open_nameless(int flags) {
    fd_ = ::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd_ >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return;
    std::string name = folder_ + "/tessera-offload-XXXXXX";  // of file systems without nameless files
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd_ < 0) return;
    ::unlink(name.c_str());
    if (flags == 0 || ::fcntl(fd_, F_SETFL, flags) == 0) return;
    ::close(fd_);
    fd_ = -1;
    errno = EINVAL;
  }
  [[noreturn]] void fail(const char* what, int code) const {
    throw IoError(detail::concat("offloaded optimizer state: rank ", rank_, " cannot ", what, " ", folder_,
                                 ": ", text_of(code),
                                 code == ENOSPC ? "; free space there, or name another offload.path" : ""));
  }
  template <typename Call>
  void whole(std::uint64_t offset, std::size_t bytes, const char* what, const Call& call) const {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t now = call(done);
      if (now < 0 && errno == EINTR) continue;
      if (now <= 0)
        fail(detail::concat(what, " ", bytes, " bytes at ", offset, " of its file in").c_str(),
             now < 0 ? errno : EIO);
      done += static_cast<std::size_t>(now);
    }
  }

  std::string folder_;
  int rank_;
  int fd_ = -1;
};

/// A few threads that do what they are given, each thing once, in order of asking.
class OffloadedState::Threads {
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

/// Host memory of a tile of each kind, and what is under way with it.
struct OffloadedState::Slot {
  Tensor memory = {};      // f32, with room to align it
  std::int64_t first = 0;  // where that makes it begin
  std::future<void> pending = {};

  void wait() {
    if (pending.valid()) pending.get();
  }
};

/// One kind's elements in any order, as checkpoints read and write them: through the tile that was used last.
class OffloadedState::Window final : public StateSource {
 public:
  Window(OffloadedState& state, std::size_t kind) : state_(state), kind_(kind) {}

  void read(const Range& run, float* out) override {
    each_tile(run, [&](float* values, std::int64_t count, std::int64_t done) {
      std::memcpy(out + done, values, static_cast<std::size_t>(count) * sizeof(float));
    });
  }
  void write(const Range& run, const float* source) override {
    each_tile(run, [&](float* values, std::int64_t count, std::int64_t done) {
      std::memcpy(values, source + done, static_cast<std::size_t>(count) * sizeof(float));
      changed_ = true;
    });
  }
  /// Writes what was changed and forgets the tile.
  void close() {
    if (changed_) state_.backing_->write(state_.offset_of(kind_, at_), bytes());
    changed_ = false;
    at_ = -1;
    memory_.reset();
  }

 private:
  struct Freed {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kAligned}); }
  };
  std::span<std::byte> bytes() const { return {memory_.get(), state_.bytes_of_tile()}; }

  template <typename Part>
  void each_tile(const Range& run, const Part& part) {
    state_.wait();
    for (std::int64_t done = 0; done < run.count;) {
      const std::int64_t element = run.begin + done, tile = element / state_.tile_,
                         inside = element % state_.tile_;
      open(tile);
      const std::int64_t count = std::min(run.count - done, state_.tile_ - inside);
      part(reinterpret_cast<float*>(memory_.get()) + inside, count, done);
      done += count;
    }
  }
  void open(std::int64_t tile) {
    if (at_ == tile) return;
    close();
    memory_.reset(new (std::align_val_t{kAligned}) std::byte[state_.bytes_of_tile()]);
    state_.backing_->read(state_.offset_of(kind_, tile), bytes());
    at_ = tile;
  }

  OffloadedState& state_;
  std::size_t kind_;
  std::unique_ptr<std::byte[], Freed> memory_;
  std::int64_t at_ = -1;
  bool changed_ = false;
};

OffloadedState::OffloadedState(const ExecCtx& ctx, const OffloadConfig& config,
                               std::vector<std::string> kinds, std::int64_t numel, int rank)
    : ctx_(ctx),
      kinds_(std::move(kinds)),
      tile_(config.tile),
      tiles_((numel + config.tile - 1) / config.tile) {
  const bool to_file = config.optimizer == OffloadTo::nvme;
  TESSERA_ENSURE(
      ConfigError, !to_file || config.path,
      "offload.optimizer: nvme needs offload.path, a folder on the disk that is to hold the state");
  TESSERA_CHECK(tile_ > 0 && bytes_of_tile() % kAligned == 0, "a tile of ", tile_,
                " elements is not a multiple of ", kAligned / sizeof(float));
  const bool host = !ctx_.device().is_cuda();
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    windows_.push_back(std::make_shared<Window>(*this, i));
    if (!host) on_device_.push_back(Tensor::empty(ctx_, {tile_}, DType::f32));
  }
  const ExecCtx memory = host ? ctx_ : ExecCtx::cpu(1);
  for (std::int64_t i = 0; i < config.buffers; ++i) {
    auto slot = std::make_unique<Slot>();
    const auto elements = static_cast<std::int64_t>(kinds_.size()) * tile_;
    slot->memory =
        Tensor::empty(memory, {elements + static_cast<std::int64_t>(kAligned / sizeof(float))}, DType::f32);
    if (!ctx_.device().is_meta()) {
      const auto address = reinterpret_cast<std::uintptr_t>(slot->memory.raw());
      slot->first = static_cast<std::int64_t>((rounded_up(address, kAligned) - address) / sizeof(float));
    }
    slots_.push_back(std::move(slot));
  }
  if (ctx_.device().is_meta()) return;
  if (to_file) {
    backing_ = std::make_unique<File>(*config.path, offloaded_bytes(), rank, notes_);
  } else {
    backing_ = std::make_unique<Memory>(offloaded_bytes());
  }
  threads_ = std::make_unique<Threads>(slots_.size());
}

OffloadedState::~OffloadedState() = default;

std::size_t OffloadedState::resident_bytes() const {
  std::size_t bytes = 0;
  for (const Tensor& tensor : on_device_) bytes += tensor.nbytes();
  if (!on_device_.empty()) return bytes;
  for (const auto& slot : slots_) bytes += slot->memory.nbytes();
  return bytes;
}

std::size_t OffloadedState::offloaded_bytes() const {
  return kinds_.size() * static_cast<std::size_t>(tiles_) * bytes_of_tile();
}

std::optional<std::size_t> OffloadedState::place_of(std::string_view kind) const {
  const auto found = std::find(kinds_.begin(), kinds_.end(), kind);
  if (found == kinds_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - kinds_.begin());
}

std::uint64_t OffloadedState::offset_of(std::size_t kind, std::int64_t tile) const {
  return (kind * static_cast<std::uint64_t>(tiles_) + static_cast<std::uint64_t>(tile)) * bytes_of_tile();
}

Tensor OffloadedState::of_slot(const Slot& slot, std::size_t kind) const {
  return slot.memory.narrow(0, slot.first + static_cast<std::int64_t>(kind) * tile_, tile_);
}

void OffloadedState::ask(Slot& slot, std::int64_t tile) {
  slot.wait();
  slot.pending = threads_->run([this, &slot, tile] {
    for (std::size_t i = 0; i < kinds_.size(); ++i)
      backing_->read(offset_of(i, tile), {static_cast<std::byte*>(of_slot(slot, i).raw()), bytes_of_tile()});
  });
}

void OffloadedState::put_back(Slot& slot, std::int64_t tile) {
  slot.pending = threads_->run([this, &slot, tile] {
    for (std::size_t i = 0; i < kinds_.size(); ++i)
      backing_->write(offset_of(i, tile), {static_cast<std::byte*>(of_slot(slot, i).raw()), bytes_of_tile()});
  });
}

void OffloadedState::use_slot(const Slot& slot, std::int64_t tile, const Use& use) {
  std::vector<Tensor> state = on_device_;
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    if (on_device_.empty()) {
      state.push_back(of_slot(slot, i));
    } else {
      state[i].copy_from_host(of_slot(slot, i).raw());
    }
  }
  use(tile, state);
  ctx_.stream->synchronize();
  for (std::size_t i = 0; i < on_device_.size(); ++i) state[i].copy_to_host(of_slot(slot, i).raw());
}

void OffloadedState::walk(const std::vector<std::int64_t>& tiles, const Use& use) {
  if (!backing_) {
    for (const std::int64_t tile : tiles) use_slot(*slots_[0], tile, use);
    return;
  }
  wait();
  for (const auto& window : windows_) window->close();
  // Half of the slots read ahead; the others are being written meanwhile.
  const std::size_t ahead = std::max<std::size_t>(1, slots_.size() / 2);
  const auto slot_of = [&](std::size_t i) -> Slot& { return *slots_[i % slots_.size()]; };
  for (std::size_t i = 0; i < std::min(ahead, tiles.size()); ++i) ask(slot_of(i), tiles[i]);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (i + ahead < tiles.size()) ask(slot_of(i + ahead), tiles[i + ahead]);
    slot_of(i).wait();
    use_slot(slot_of(i), tiles[i], use);
    put_back(slot_of(i), tiles[i]);
  }
}

void OffloadedState::wait() {
  for (const auto& slot : slots_) slot->wait();
}

StateValues OffloadedState::values(const std::string& kind, const Range& run) {
  const std::optional<std::size_t> place = place_of(kind);
  TESSERA_CHECK(place, "this optimizer keeps no ", kind);
  return {.source = windows_[*place], .run = run};
}

}  // namespace tessera
