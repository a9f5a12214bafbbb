#include "tessera/engine/watchdog.hpp"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <future>
#include <mutex>
#include <string_view>
#include <thread>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kPeriod = 0.25;
/// For a dump: the file system may be what hangs.
constexpr std::chrono::seconds kWriteTimeout{2};

/// Whether a communicator failed because a wait for other ranks came to nothing, in the words of floor comm,
/// rather than by an error that a rank reported.
bool is_lost_wait(const std::string& failure) {
  constexpr std::array<std::string_view, 4> kWords{" did not finish within ", " did not come within ",
                                                   "lost the connection to ",
                                                   " operation began or ended for "};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](std::string_view words) { return failure.find(words) != std::string::npos; });
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  const std::filesystem::path temporary = path.string() + ".new";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  TESSERA_ENSURE(IoError, file.good(), temporary.string(), ": cannot be written");
  std::filesystem::rename(temporary, path);
}

/// In a thread of its own, which shares nothing: if it hangs it is left behind.
void write_in_time(const std::filesystem::path& path, std::string text) {
  const auto written = std::make_shared<std::promise<void>>();
  std::future<void> result = written->get_future();
  std::thread([written, path, text = std::move(text)] {
    try {
      write_file(path, text);
      written->set_value();
    } catch (...) {
      written->set_exception(std::current_exception());
    }
  }).detach();
  TESSERA_ENSURE(IoError, result.wait_for(kWriteTimeout) == std::future_status::ready, path.string(),
                 ": its file system does not answer");
  try {
    result.get();
  } catch (const std::filesystem::filesystem_error& error) {
    throw IoError(error.what());
  }
}

/// What an earlier job left does not count as what this one did.
void set_aside_old(const std::filesystem::path& dump) {
  std::error_code failed;
  if (!std::filesystem::exists(dump, failed)) return;
  const std::filesystem::path before = dump.parent_path() / "before";
  std::filesystem::create_directories(before, failed);
  std::filesystem::rename(dump, before / dump.filename(), failed);
}

/// Signals are for the thread that the program gave to them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t old_{};
};

std::string text_of(const FlightRecord& record) {
  std::string shape;
  for (int i = 0; i < record.what.dims; ++i)
    shape += detail::concat(i > 0 ? "x" : " ", record.what.shape[static_cast<std::size_t>(i)]);
  return std::string(record.what.name) + shape;
}

}  // namespace

struct Watchdog::State {
  State(std::shared_ptr<Communicator> of, WatchdogOptions given)
      : world(std::move(of)), options(std::move(given)), flight(world->flight()) {}

  const std::shared_ptr<Communicator> world;
  WatchdogOptions options;
  const std::shared_ptr<FlightRecorder> flight;

  std::mutex mutex;  ///< guards the three below and options.folder
  std::condition_variable changed;
  bool stopping = false;
  bool lost_wait_written = false;
  std::thread thread;

  // Of the watching thread alone.
  std::uint64_t events = 0;
  double still_s = 0;  ///< for so long a call was open and nothing happened
  bool ended = false;  ///< the world was ended from here

  std::filesystem::path file() {
    const std::lock_guard lock(mutex);
    return options.folder / detail::concat("rank-", world->rank(), ".json");
  }

  std::filesystem::path dump(const std::string& why) {
    const std::filesystem::path path = file();
    write_in_time(path, flight_json(flight->snapshot(), world->rank(), world->size(), why));
    return path;
  }

  /// For messages: where the dump is, or why there is none.
  std::string try_dump(const std::string& why) {
    try {
      return "what it did last is in " + dump(why).string();
    } catch (const std::exception& error) {
      return detail::concat("what it did last could not be written: ", error.what());
    }
  }

  void note_lost_wait() {
    {
      const std::lock_guard lock(mutex);
      if (lost_wait_written) return;
    }
    const std::string failure = world->failure();
    if (failure.empty() || !is_lost_wait(failure)) return;
    {
      const std::lock_guard lock(mutex);
      if (std::exchange(lost_wait_written, true)) return;
    }
    try_dump(failure);
  }

  /// The operation that has been under way for longest, or the last one that ended.
  std::string what_it_did() const {
    const FlightSnapshot seen = flight->snapshot();
    const auto last_with = [&](auto fits) -> const FlightRecord* {
      const auto found = std::find_if(seen.records.rbegin(), seen.records.rend(), fits);
      return found == seen.records.rend() ? nullptr : &*found;
    };
    using Of = FlightRecord::State;
    if (const auto* running = last_with([](const auto& r) { return r.state == Of::running; }))
      return text_of(*running) + " is running";
    if (const auto* queued = last_with([](const auto& r) { return r.state == Of::queued; }))
      return text_of(*queued) + " was launched last";
    if (const auto* done = last_with([](const auto& r) { return r.state == Of::done; }))
      return text_of(*done) + " was the last to end";
    return "there was none before";
  }

  void end_run(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    const std::string call = flight->snapshot().call;
    const std::string hang =
        detail::concat("rank ", world->rank(), " hangs in ", call, ": no operation began or ended for ",
                       options.timeout_s, " s (parallel.timeout_s); ", what_it_did());
    const std::string message = hang + "; " + try_dump(hang);
    {
      const std::lock_guard guard(mutex);
      lost_wait_written = true;
    }
    world->abort(message);
    ended = true;
    lock.lock();
    const auto end = Clock::now() + std::chrono::duration<double>(options.grace_s);
    while (!stopping && flight->pulse().calls > 0 && Clock::now() < end) wait(lock);
    const bool returned = stopping || flight->pulse().calls == 0;
    lock.unlock();
    if (!returned && options.on_hang) options.on_hang(message);
    lock.lock();
  }

  void wait(std::unique_lock<std::mutex>& lock) {
    changed.wait_for(lock, std::chrono::duration<double>(std::min(kPeriod, options.timeout_s / 10)));
  }

  void look(double passed_s) {
    const FlightRecorder::Pulse pulse = flight->pulse();
    // A wait for other ranks has a deadline of its own, which heartbeats renew and which says who is missing.
    const bool still = pulse.calls > 0 && pulse.waits == 0 && pulse.events == events;
    events = pulse.events;
    // A process that was stopped comes back after a long time in which nothing could happen.
    still_s = still ? still_s + std::min(passed_s, 4 * kPeriod) : 0;
  }

  bool hangs() const { return !ended && still_s >= options.timeout_s; }

  void run() {
    auto last = Clock::now();
    std::unique_lock lock(mutex);
    while (!stopping) {
      wait(lock);
      const auto now = Clock::now();
      look(std::chrono::duration<double>(now - last).count());
      last = now;
      if (stopping) break;
      lock.unlock();
      if (options.dump_asked && options.dump_asked()) {
        const std::string said = try_dump("asked for by a signal");
        if (options.on_dump) options.on_dump(detail::concat("rank ", world->rank(), ": ", said));
      }
      note_lost_wait();
      lock.lock();
      if (hangs()) end_run(lock);
    }
  }
};

Watchdog::Watchdog(std::shared_ptr<Communicator> world, WatchdogOptions options) {
  TESSERA_CHECK(world != nullptr && options.timeout_s > 0, "a watchdog needs a world and a time, not ",
                options.timeout_s, " s");
  if (!world->flight()) world->set_flight(std::make_shared<FlightRecorder>());
  state_ = std::make_unique<State>(std::move(world), std::move(options));
  set_aside_old(state_->file());
  const SignalsBlocked signals;
  state_->thread = std::thread([state = state_.get()] { state->run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  state_->thread.join();
  state_->note_lost_wait();
}

void Watchdog::set_folder(const std::filesystem::path& folder) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->options.folder == folder) return;
    state_->options.folder = folder;
  }
  set_aside_old(state_->file());
}

std::filesystem::path Watchdog::dump(const std::string& why) { return state_->dump(why); }

}  // namespace tessera
