#include "tessera/optim/offloaded_buffer.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>

#include "tessera/base/error.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// What reading and writing without the system's cache asks of addresses, places and lengths.
constexpr std::int64_t kAlignedFloats = 4096 / sizeof(float);

std::string text_of(int code) { return std::generic_category().message(code); }

/// Once, however many files there are.
void note(std::vector<std::string>& notes, const std::string& text) {
  if (std::find(notes.begin(), notes.end(), text) == notes.end()) notes.push_back(text);
}

}  // namespace

OffloadPlace::OffloadPlace(const ExecCtx& on, const OffloadConfig& settings, int of_rank)
    : ctx(on), config(settings), rank(of_rank), link(on, settings.pin_memory) {
  TESSERA_CHECK(config.tile > 0 && config.tile % kAlignedFloats == 0, "a tile of ", config.tile,
                " elements is not a multiple of ", kAlignedFloats);
  TESSERA_CHECK(config.ratio > 0 && config.ratio <= 1, "offload.ratio is ", config.ratio,
                "; it must be above 0 and at most 1");
}

/// A file without a name, zeros at first. Several threads may use ranges that do not overlap.
class OffloadedBuffer::File {
 public:
  File(std::string folder, std::size_t bytes, std::string whose, std::vector<std::string>& notes)
      : folder_(std::move(folder)), whose_(std::move(whose)) {
    struct stat found = {};
    TESSERA_ENSURE(ConfigError, ::stat(folder_.c_str(), &found) == 0 && S_ISDIR(found.st_mode),
                   "offload.path: ", folder_,
                   " is not a folder; make it, on the disk that is to hold the state");
    open_nameless(O_DIRECT);
    if (fd_ < 0 && errno == EINVAL) {
      open_nameless(0);
      note(notes, "offload.path: the file system of " + folder_ +
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
      note(notes, "offload.path: " + folder_ + " is memory (tmpfs), so that nothing is gained; name a disk");
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void read(std::uint64_t offset, std::span<std::byte> out) const {
    whole(offset, out.size(), "read", [&](std::size_t done) {
      return ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    });
  }
  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
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
    throw IoError(detail::concat(whose_, " cannot ", what, " ", folder_, ": ", text_of(code),
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
  std::string whose_;
  int fd_ = -1;
};

OffloadedBuffer::OffloadedBuffer(std::shared_ptr<OffloadPlace> place, OffloadTo to, std::string what,
                                 DType dtype, std::int64_t numel)
    : place_(std::move(place)), to_(to), what_(std::move(what)), dtype_(dtype), numel_(numel) {
  const std::int64_t tiles = (numel + tile() - 1) / tile();
  const auto away = static_cast<std::int64_t>(std::ceil(static_cast<double>(tiles) * place_->config.ratio));
  away_ = away * tile();
  const std::string whose = detail::concat("offloaded ", what_, ": rank ", place_->rank);
  if (away < tiles) {
    resident_ = Tensor::empty(place_->ctx, {(tiles - away) * tile()}, dtype);
    ops::fill_zero(place_->ctx, resident_);
  }
  if (in_file()) {
    TESSERA_ENSURE(InternalError, dtype == DType::f32, "files hold fp32, not ", dtype);
    TESSERA_ENSURE(ConfigError, place_->config.path,
                   "offload to nvme needs offload.path, a folder on the disk that is to hold ", what_);
    if (!place_->ctx.device().is_meta())
      file_ = std::make_unique<File>(*place_->config.path, offloaded_bytes(), whose, place_->notes);
  } else {
    memory_ = place_->link.memory(offloaded_bytes(), whose);
  }
  counted() += offloaded_bytes();
}

OffloadedBuffer::~OffloadedBuffer() {
  counted() -= offloaded_bytes();
  try {
    place_->link.synchronize();  // it may be on its way from or to this memory
  } catch (const std::exception&) {
    // Whoever waits for what is copied hears of it there.
  }
}

void OffloadedBuffer::read_tile(std::int64_t tile, std::span<std::byte> out) const {
  file_->read(static_cast<std::uint64_t>(tile) * bytes_of_tile(), out);
}

void OffloadedBuffer::write_tile(std::int64_t tile, std::span<const std::byte> bytes) {
  file_->write(static_cast<std::uint64_t>(tile) * bytes_of_tile(), bytes);
}

void OffloadedBuffer::open_window(std::int64_t tile) {
  if (window_at_ == tile) return;
  close_window();
  window_ = HostLink::host_memory(bytes_of_tile(), what_);
  read_tile(tile, {static_cast<std::byte*>(window_.get()), bytes_of_tile()});
  window_at_ = tile;
}

void OffloadedBuffer::close_window() {
  if (window_changed_) write_tile(window_at_, {static_cast<std::byte*>(window_.get()), bytes_of_tile()});
  window_changed_ = false;
  window_at_ = -1;
  window_.reset();
}

/// part(values in a tile of the file, place in `run`, how many), tile by tile.
template <typename Part>
void OffloadedBuffer::each_file_tile(const Range& run, const Part& part) {
  for (std::int64_t done = 0; done < run.count;) {
    const std::int64_t element = run.begin + done, inside = element % tile();
    const std::int64_t count = std::min(run.count - done, tile() - inside);
    open_window(element / tile());
    part(static_cast<float*>(window_.get()) + inside, done, static_cast<std::size_t>(count) * sizeof(float));
    done += count;
  }
}

void OffloadedBuffer::read(const Range& run, float* out) {
  TESSERA_CHECK(dtype_ == DType::f32, what_, " is ", dtype_, ", not float32");
  const Range away = overlap(run, {0, away_}), rest = overlap(run, {away_, numel_});
  place_->link.synchronize();
  if (rest.count > 0) resident(rest).copy_to_host(out + (rest.begin - run.begin));
  if (away.count == 0) return;
  if (!in_file()) {
    std::memcpy(out, host(away.begin), static_cast<std::size_t>(away.count) * sizeof(float));
    return;
  }
  each_file_tile(away, [&](const float* values, std::int64_t done, std::size_t bytes) {
    std::memcpy(out + done, values, bytes);
  });
}

void OffloadedBuffer::write(const Range& run, const float* source) {
  TESSERA_CHECK(dtype_ == DType::f32, what_, " is ", dtype_, ", not float32");
  const Range away = overlap(run, {0, away_}), rest = overlap(run, {away_, numel_});
  place_->ctx.stream->synchronize();  // whatever it was given may be copied from or to here
  place_->link.synchronize();
  if (rest.count > 0) resident(rest).copy_from_host(source + (rest.begin - run.begin));
  if (away.count == 0) return;
  if (!in_file()) {
    std::memcpy(host(away.begin), source, static_cast<std::size_t>(away.count) * sizeof(float));
    return;
  }
  each_file_tile(away, [&](float* values, std::int64_t done, std::size_t bytes) {
    std::memcpy(values, source + done, bytes);
    window_changed_ = true;
  });
}

StateValues OffloadedBuffer::values(std::shared_ptr<OffloadedBuffer> self, const Range& run) const {
  return {.source = std::move(self), .run = run};
}

Event OffloadedBuffer::fetch(const Range& run, const Tensor& target) {
  const Range away = overlap(run, {0, away_}), rest = overlap(run, {away_, numel_});
  TESSERA_CHECK_EQ(target.numel(), run.count, "elements on the device for those of ", what_);
  TESSERA_ENSURE(InternalError, target.dtype() == dtype_ && !in_file(), what_, " is fetched as ",
                 target.dtype());
  const auto part = [&](const Range& of) { return target.narrow(0, of.begin - run.begin, of.count); };
  Event there;
  if (rest.count > 0)
    there = place_->link.to_device(part(rest).raw(), resident(rest).raw(), part(rest).nbytes());
  if (away.count > 0) there = place_->link.to_device(part(away).raw(), host(away.begin), part(away).nbytes());
  return there;
}

Event OffloadedBuffer::put(const Range& run, const Tensor& source) {
  const Range away = overlap(run, {0, away_}), rest = overlap(run, {away_, numel_});
  TESSERA_CHECK_EQ(source.numel(), run.count, "elements on the device for those of ", what_);
  TESSERA_ENSURE(InternalError, source.dtype() == dtype_ && !in_file(), what_, " is put as ", source.dtype());
  const auto part = [&](const Range& of) { return source.narrow(0, of.begin - run.begin, of.count); };
  Event there;
  if (rest.count > 0)
    there = place_->link.to_host(resident(rest).raw(), part(rest).raw(), part(rest).nbytes());
  if (away.count > 0) there = place_->link.to_host(host(away.begin), part(away).raw(), part(away).nbytes());
  return there;
}

Tensor OffloadedBuffer::load(const Range& run) {
  Tensor copy = Tensor::empty(place_->ctx, {run.count}, dtype_);
  if (run.count == 0) return copy;
  if (!in_file()) {
    place_->ctx.stream->wait(fetch(run, copy));
  } else if (file_) {
    std::vector<float> values(static_cast<std::size_t>(run.count));
    read(run, values.data());
    copy.copy_from_host(values.data());
  }
  return copy;
}

void OffloadedBuffer::give(const Range& run, Tensor source) {
  for (; leaving_.size() > 1; leaving_.pop_front()) place_->ctx.stream->wait(leaving_.front().first);
  Event left = put(run, source);
  leaving_.emplace_back(std::move(left), std::move(source));
}

void OffloadedBuffer::store(const Range& run, const Tensor& source) {
  if (run.count == 0) return;
  if (!in_file()) {
    place_->ctx.stream->wait(put(run, source));
  } else if (file_) {
    std::vector<float> values(static_cast<std::size_t>(run.count));
    source.copy_to_host(values.data());
    write(run, values.data());
  }
}

}  // namespace tessera
