#pragma once
/// Ranks as threads of the test: what most tests of parallel code run on.

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera::test {

using RankFunction = std::function<void(std::shared_ptr<Communicator>)>;

/// Runs `function` on `size` threads, each with its communicator of one "world". The first exception aborts
/// the world, so that the others end too, and is thrown again here once all threads have ended.
inline void run_local(int size, const CommOptions& options, const RankFunction& function) {
  const auto world = make_local_communicators(size, "world", options);
  std::mutex mutex;
  std::exception_ptr first;
  const auto failed = [&](const std::shared_ptr<Communicator>& comm, const char* what) {
    {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    comm->abort("rank " + std::to_string(comm->rank()) + " failed: " + what);
  };
  std::vector<std::thread> threads;
  for (const auto& comm : world) {
    threads.emplace_back([&, comm] {
      try {
        function(comm);
      } catch (const std::exception& error) {
        failed(comm, error.what());
      } catch (...) {
        failed(comm, "unknown exception");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

inline void run_local(int size, const RankFunction& function) {
  run_local(size, CommOptions{.timeout_s = 60}, function);
}

}  // namespace tessera::test
