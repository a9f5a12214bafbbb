#include "tessera/device/stream.hpp"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "tessera/base/error.hpp"

namespace tessera {

struct Event::State {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool done = true;

  void set(bool value) {
    {
      const std::lock_guard lock(mutex);
      done = value;
    }
    changed.notify_all();
  }
  void wait() const {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

Event::Event() : state_(std::make_shared<State>()) {}

bool Event::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::synchronize() const { state_->wait(); }

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

Stream::~Stream() = default;

void Stream::enqueue(std::function<void()> work) { queue_->push({std::move(work)}); }

void Stream::record(Event& event) {
  event.state_ = std::make_shared<Event::State>();
  if (queue_ == nullptr) return;  // everything launched before has run: the new point is done
  event.state_->done = false;
  queue_->push({[state = event.state_] { state->set(true); }, true});
}

void Stream::wait(const Event& event) {
  if (queue_ == nullptr) {
    event.synchronize();
  } else {
    queue_->push({[state = event.state_] { state->wait(); }, true});
  }
}

void Stream::synchronize() {
  if (queue_ != nullptr) queue_->drain();
}

}  // namespace tessera
