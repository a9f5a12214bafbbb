#include "tessera/device/stream.hpp"

#include <cstring>
#include <deque>
#include <exception>
#include <thread>

#include "device/cuda.hpp"
#include "device/recording.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/trace.hpp"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Recording::Recording() : begin(cuda::create_event()), end(cuda::create_event()) {}

Recording::~Recording() {
  cuda::destroy_event(begin);
  cuda::destroy_event(end);
}

Event::State::~State() {
  if (cuda != nullptr) cuda::destroy_event(cuda);
}

void Event::State::reach() {
  {
    const std::lock_guard lock(mutex);
    done = true;
    time = Clock::now();
  }
  changed.notify_all();
}

void* Event::State::done_by() const {
  if (!recording) return cuda;
  TESSERA_ENSURE(InternalError, recording->stage != Recording::Stage::open,
                 "work was waited for while the graph it belongs to is being recorded");
  return recording->stage == Recording::Stage::launched ? recording->end : nullptr;
}

bool Event::State::is_done() const {
  if (in_open_recording()) return false;
  if (on_device()) return done_by() == nullptr || cuda::done(done_by());
  const std::lock_guard lock(mutex);
  return done;
}

bool Event::State::has_begun() const {
  if (!recording || recording->stage == Recording::Stage::abandoned) return is_done();
  return !in_open_recording() && cuda::done(recording->begin);
}

void Event::State::wait() const {
  if (on_device()) {
    if (void* const event = done_by()) cuda::synchronize_event(event);
    return;
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
}

Event::Event() : state_(std::make_shared<State>()) {}

bool Event::done() const { return state_->is_done(); }

bool Event::has_begun() const { return state_->has_begun(); }

void Event::synchronize() const { state_->wait(); }

double Event::seconds_between(const Event& begin, const Event& end) {
  const State &a = *begin.state_, &b = *end.state_;
  if (a.on_device() && b.on_device()) {
    const bool said = a.done_by() != nullptr && b.done_by() != nullptr;
    return said ? cuda::seconds_between(a.done_by(), b.done_by()) : 0;
  }
  if (a.time == Clock::time_point() || b.time == Clock::time_point()) return 0;
  return std::chrono::duration<double>(b.time - a.time).count();
}

/// A worker thread that runs work in order. The marker of a recorded event runs even after an error, so
/// nobody waits for ever on a stream that failed.
struct Stream::Queue {
  struct Item {
    std::function<void()> work;
    bool always = false;
  };

  Queue() : worker([this] { run(); }) {}
  ~Queue() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    worker.join();
  }

  void push(Item item) {
    {
      const std::lock_guard lock(mutex);
      items.push_back(std::move(item));
    }
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !items.empty(); });
      if (items.empty()) return;
      Item item = std::move(items.front());
      items.pop_front();
      busy = true;
      const bool skip = error != nullptr && !item.always;
      lock.unlock();
      std::exception_ptr thrown;
      if (!skip) {
        try {
          item.work();
        } catch (...) {
          thrown = std::current_exception();
        }
      }
      item.work = nullptr;
      lock.lock();
      if (thrown && !error) error = thrown;
      busy = false;
      changed.notify_all();
    }
  }

  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return items.empty() && !busy; });
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  bool busy = false;
  bool stopping = false;
  std::exception_ptr error;
  std::thread worker;
};

Stream::Stream(int threads, Mode mode) : threads_(threads) {
  TESSERA_CHECK(threads >= 1, "a CPU stream needs at least one thread, not ", threads);
  if (mode == Mode::queued) queue_ = std::make_unique<Queue>();
}

Stream::Stream(Device device, Priority priority) : device_(device) {
  TESSERA_CHECK(!device.is_cpu(), "a CPU stream is made from a number of threads");
  if (device.is_cuda()) native_ = cuda::create_stream(device.index, priority == Priority::high);
}

Stream::~Stream() {
  if (native_ != nullptr) cuda::destroy_stream(native_);
}

void Stream::make_current() const {
  if (native_ != nullptr) cuda::use_device(device_.index);
}

void Stream::enqueue(std::function<void()> work) {
  TESSERA_ENSURE(InternalError, queue_ != nullptr, "host work was launched on a CUDA stream");
  queue_->push({std::move(work)});
}

void Stream::copy(void* target, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  const TraceSpan span(*this, [&] {
    return Work{.kind = WorkKind::elementwise, .name = "copy", .bytes = 2.0 * static_cast<double>(bytes)};
  });
  if (native_ != nullptr) {
    if (recording_ && !cuda::is_device_memory(source)) recording_->reads_host = true;
    return cuda::copy(target, source, bytes, native_);
  }
  launch([=] { std::memcpy(target, source, bytes); });
}

void Stream::record(Event& event) {
  event.state_ = std::make_shared<Event::State>();
  if (native_ != nullptr) {
    make_current();
    event.state_->cuda = cuda::create_event();
    event.state_->recording = recording_;
    cuda::record(event.state_->cuda, native_);
  } else if (queue_ == nullptr) {
    event.state_->reach();  // everything launched before has run
  } else {
    event.state_->done = false;
    queue_->push({[state = event.state_] { state->reach(); }, true});
  }
}

void Stream::record_time(Event& event) {
  if (!recording_) return record(event);
  event.state_ = std::make_shared<Event::State>();
  event.state_->cuda = cuda::create_event();
  cuda::record_outside(event.state_->cuda, native_);
  recording_->named.push_back(event);
}

void Stream::when_relaunched(Relaunched told) {
  if (recording_) recording_->relaunched->push_back(std::move(told));
}

void Stream::wait(const Event& event) {
  if (native_ != nullptr && event.state_->on_device()) {
    wait_on_device(event);
  } else if (queue_ == nullptr) {
    event.synchronize();
  } else {
    queue_->push({[state = event.state_] { state->wait(); }, true});
  }
}

void Stream::wait_on_device(const Event& event) {
  const Event::State& state = *event.state_;
  if (state.in_open_recording()) {
    if (recording_ == nullptr) {
      Event before;  // what runs here already comes first in the graph as well
      record(before);
      recording_ = state.recording;
      recording_->joined.push_back(this);
      cuda::wait(native_, state.cuda);
      if (!recording_->lasting) return wait_on_device(before);
      return recording_->before.push_back(before);
    }
    cuda::wait(native_, state.cuda);
  } else if (state.done_by() == nullptr) {
    return;
  } else if (recording_) {
    cuda::wait_outside(native_, state.done_by());
    recording_->named.push_back(event);
  } else {
    cuda::wait(native_, state.done_by());
  }
}

void Stream::synchronize() {
  if (native_ != nullptr) return cuda::synchronize(native_);
  if (queue_ != nullptr) queue_->drain();
}

}  // namespace tessera
