#include "tessera/engine/background_save.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "checkpoint/file_io.hpp"
#include "device/host_memory.hpp"
#include "engine/ranks.hpp"
#include "engine/saved_parts.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/device/flight.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{20};
constexpr std::chrono::seconds kFarewell{10};
constexpr std::uint64_t kMostRecordBytes = std::uint64_t{1} << 30;
constexpr int kNice = 10;

fs::path record_of(const fs::path& staging, int rank) {
  return staging / detail::concat("rank-", rank, ".record");
}

/// Training waits for it, so with as many threads as training has.
void copy_with(int threads, std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kWorthAThread = std::size_t{4} << 20;
  const auto most = static_cast<std::size_t>(threads);
  const std::size_t parts = std::clamp<std::size_t>(bytes / kWorthAThread, 1, most);
  const std::size_t part = (bytes + parts - 1) / parts;
  std::vector<std::jthread> others;
  for (std::size_t begin = part; begin < bytes; begin += part)
    others.emplace_back([=] { std::memcpy(to + begin, from + begin, std::min(part, bytes - begin)); });
  std::memcpy(to, from, std::min(part, bytes));
}

/// Copies all boxes to `memory`, one after the other; the shards then read them from there.
void stage(std::vector<Shard>& shards, StagingMemory& memory, int threads) {
  std::byte* at = memory.at_least(static_cast<std::size_t>(bytes_of(shards)));
  for (Shard& shard : shards) {
    for (CheckpointTensor& tensor : shard.tensors) {
      const auto bytes = static_cast<std::size_t>(tensor.slice.shape.numel()) * size_of(tensor.dtype);
      if (bytes > 0) copy_with(threads, at, tensor.read().get(), bytes);
      tensor.data = at;
      tensor.read = nullptr;
      at += bytes;
    }
  }
}

/// Signals are for the thread that trains, and so are the cores.
std::thread start_quietly(std::function<void()> work) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([work = std::move(work)] {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
    work();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

/// Bytes in the folder: they grow as long as anybody writes.
std::uintmax_t bytes_in(const fs::path& folder) {
  std::uintmax_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::uintmax_t size = it->file_size(gone);
    if (!gone) bytes += size;
  }
  return bytes;
}

}  // namespace

std::byte* StagingMemory::at_least(std::size_t bytes) {
  if (bytes > size_) {
    bytes_.reset();
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    size_ = bytes;
  }
  return bytes_.get();
}

struct BackgroundSave::Impl {
  explicit Impl(Communicator& communicator)
      : world(communicator), rank(communicator.rank()), ranks(communicator.size()) {}

  Communicator& world;  // for waiting together; the thread sends nothing
  const int rank, ranks;
  std::vector<Shard> shards;
  SaveOptions options;
  CheckpointState state;
  fs::path staging;
  double timeout_s = 0;
  std::optional<CheckpointSave> save;  // on rank 0
  std::thread thread;
  std::atomic<bool> leaving = false;
  mutable std::mutex mutex;
  mutable std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;
  fs::path folder;

  void work() {
    std::exception_ptr failure;
    const nlohmann::json own = write_own(failure);
    try {
      // Whoever still writes into the folder must be done before it goes, so all are heard whatever happened.
      if (save) {
        const std::vector<std::string> records = hear_all(own);
        if (!failure) commit(records);
      } else {
        leave(own);
      }
    } catch (const std::exception& problem) {
      if (!failure) failure = std::current_exception();
      if (!save) leave_failure(problem);
    }
    save.reset();  // removes the incomplete folder, unless it has its name
    const std::lock_guard lock(mutex);
    error = failure;
    done = true;
    ended.notify_all();
  }

  /// What rank 0 must know of it: what this rank's files hold, or why there are none.
  nlohmann::json write_own(std::exception_ptr& failure) const {
    nlohmann::json record = {{"records", nlohmann::json::array()}};
    try {
      for (const Shard& shard : shards) {
        if (!shard.tensors.empty())
          record["records"].push_back(write_checkpoint_shard(staging, shard.file, shard.tensors, options));
      }
    } catch (const std::exception& problem) {
      failure = std::current_exception();
      record = {{"error", problem.what()}};
    }
    return record;
  }

  void leave(const nlohmann::json& record) const {
    checkpoint_detail::write_text(record_of(staging, rank),
                                  record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  /// In place of a record that could not be written, so that rank 0 does not wait for it.
  void leave_failure(const std::exception& problem) const noexcept {
    try {
      leave({{"error", problem.what()}});
    } catch (const std::exception&) {
      // Nothing can be written any more: rank 0 gives up when it sees that nobody writes.
    }
  }

  /// The record that another rank leaves; it is removed.
  nlohmann::json hear(int writer) const {
    const fs::path path = record_of(staging, writer);
    await(path, writer);
    auto record =
        nlohmann::json::parse(checkpoint_detail::read_text(path, kMostRecordBytes, SymbolicLinks::refuse));
    fs::remove(path);
    return record;
  }

  /// What all ranks' files hold. Errors: IoError naming the first rank that failed, when all have ended.
  std::vector<std::string> hear_all(const nlohmann::json& own) const {
    std::vector<std::string> records;
    std::string problem;
    for (int each_rank = 0; each_rank < ranks; ++each_rank) {
      const nlohmann::json record = each_rank == rank ? own : hear(each_rank);
      if (record.contains("error") && problem.empty())
        problem = detail::concat("rank ", each_rank, ": ", record.at("error").get<std::string>());
      for (const auto& each : record.value("records", nlohmann::json::array()))
        records.push_back(each.get<std::string>());
    }
    TESSERA_ENSURE(IoError, problem.empty(), problem);
    return records;
  }

  void commit(const std::vector<std::string>& records) {
    const fs::path published = save->commit(state, records);
    const std::lock_guard lock(mutex);
    folder = published;
  }

  /// Errors: IoError if nobody writes any more and it is not there.
  void await(const fs::path& path, int writer) const {
    std::uintmax_t seen = 0;
    auto last = Clock::now();
    while (!fs::exists(path)) {
      std::this_thread::sleep_for(kLook);
      const std::uintmax_t bytes = bytes_in(staging);
      const auto quiet = Clock::now() - last;
      if (bytes != seen) {
        seen = bytes;
        last = Clock::now();
      } else if (quiet > std::chrono::duration<double>(timeout_s) || (leaving && quiet > kFarewell)) {
        throw IoError(detail::concat(
            staging.string(), ": rank ", writer, " has not written its part of the checkpoint for ",
            std::chrono::duration<double>(quiet).count(),
            " s; all ranks need one folder, on several machines on a file system that they share"));
      }
    }
  }

  /// Calls `meanwhile` now and then until the thread has ended.
  void join(const std::function<void()>& meanwhile) {
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, std::chrono::milliseconds(200), [&] { return done; })) {
      lock.unlock();
      meanwhile();
      lock.lock();
    }
    lock.unlock();
    if (thread.joinable()) thread.join();
    if (error) std::rethrow_exception(error);
  }
};

BackgroundSave::BackgroundSave(const fs::path& root, Engine& engine, const RunState& run,
                               const SaveOptions& options, const StateParts& parts, StagingMemory& memory)
    : impl_(std::make_unique<Impl>(engine.mesh().world())) {
  const FlightCall open(engine.ctx().stream->flight(), "BackgroundSave");
  Impl& self = *impl_;
  engine.params().weights().wait();
  engine.ctx().stream->synchronize();
  self.shards = shards_of(engine, parts);
  self.options = options;
  self.timeout_s = run.config.parallel.timeout_s;
  self.staging = begin_save(root, engine, run.step, self.shards, options, self.save);
  on_every_rank(ExecCtx::cpu(1), self.world,
                [&] { stage(self.shards, memory, engine.ctx().stream->threads()); });
  self.state = checkpoint_state(engine, run, parts);
  self.thread = start_quietly([&self] { self.work(); });
}

BackgroundSave::~BackgroundSave() {
  impl_->leaving = true;
  if (impl_->thread.joinable()) impl_->thread.join();
}

std::int64_t BackgroundSave::step() const { return impl_->state.step; }

bool BackgroundSave::settled() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->done;
}

fs::path BackgroundSave::wait_here() {
  impl_->join([] {});
  return impl_->folder;
}

fs::path BackgroundSave::wait() {
  const ExecCtx host = ExecCtx::cpu(1);
  on_every_rank(host, impl_->world, [&] { impl_->join([&] { heartbeat(impl_->world); }); });
  return on_first_rank(host, impl_->world, [&] { return impl_->folder.string(); });
}

BackgroundRoom background_room(Engine& engine, const StateParts& parts) {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  const auto own = static_cast<std::int64_t>(bytes_of(shards_of(engine, parts)));
  const nlohmann::json here = {{"host", name.data()}, {"bytes", own}, {"free", free_host_memory_bytes()}};
  struct Host {
    std::int64_t bytes = 0, free = 0;
  };
  std::map<std::string, Host> hosts;
  BackgroundRoom room;
  for (const std::string& text : all_gather_bytes(engine.mesh().world(), here.dump())) {
    const auto rank = nlohmann::json::parse(text);
    const auto bytes = rank.at("bytes").get<std::int64_t>(), free = rank.at("free").get<std::int64_t>();
    const auto [at, is_new] = hosts.try_emplace(rank.at("host").get<std::string>(), Host{0, free});
    at->second.bytes += bytes;
    at->second.free = std::min(at->second.free, free);
    room.largest_bytes = std::max(room.largest_bytes, bytes);
  }
  const auto tightest = std::ranges::min_element(
      hosts, {}, [](const auto& host) { return host.second.free - host.second.bytes; });
  room.host = tightest->first;
  room.needed_bytes = tightest->second.bytes;
  room.free_bytes = tightest->second.free;
  room.fits = room.needed_bytes <= room.free_bytes / 2;  // training itself has hardly begun to take memory
  return room;
}

}  // namespace tessera
