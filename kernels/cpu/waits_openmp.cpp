/// libgomp reads how long threads spin (GOMP_SPINCOUNT) once, at its start. But where it has more threads
/// than there are cores, it takes a short time of its own (a hundred rounds, 3 microseconds), and it counts
/// the threads of all teams: so a team that sleeps makes the others wait shortly.

#include <omp.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "kernels/api/short_waits.hpp"

namespace tessera::kernels {

struct ShortWaits::Team {
  Team() {
    try {
      first = std::thread([this] { sleep(); });
    } catch (const std::system_error&) {
      // The system grants no more threads: waits stay as they are.
    }
  }
  ~Team() {
    {
      const std::lock_guard lock(mutex);
      over = true;
    }
    changed.notify_all();
    if (first.joinable()) first.join();
  }

  void sleep() {
#pragma omp parallel num_threads(omp_get_num_procs() + 1)
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return over; });
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::thread first;
};

ShortWaits::ShortWaits() : team_(std::make_unique<Team>()) {}
ShortWaits::~ShortWaits() = default;

}  // namespace tessera::kernels
