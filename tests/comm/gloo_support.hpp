#pragma once
/// Ranks over Gloo as threads of the test, each with its own client of one store.

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/gloo.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {

/// `while_waiting` is rank 0's alone.
inline void run_gloo_watched(int size, const CommOptions& options, const RankFunction& function,
                             const WhileWaiting& while_waiting) {
  const StoreServer server("127.0.0.1", 0, "secret");
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::shared_ptr<Communicator> comm;
      const auto failed = [&](const char* what) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        if (comm) comm->abort("rank " + std::to_string(rank) + " failed: " + what);
      };
      try {
        auto store = std::make_shared<Store>("127.0.0.1", server.port(), "secret", 20);
        GlooOptions gloo{.comm = options};
        if (rank == 0) gloo.while_waiting = while_waiting;
        comm = make_gloo_communicator(std::move(store), rank, size, gloo);
        function(comm);
      } catch (const std::exception& error) {
        failed(error.what());
      } catch (...) {
        failed("unknown exception");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

inline void run_gloo(int size, const CommOptions& options, const RankFunction& function) {
  run_gloo_watched(size, options, function, {});
}

}  // namespace tessera::test
