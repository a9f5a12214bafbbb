#pragma once
/// Ranks as processes: what tests/gpu/rank_processes.py starts, because NCCL takes one rank per process on a
/// GPU that several share. All processes run the same tests in the same order.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/gloo.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {

/// This process among those of a test run: TESSERA_TEST_RANK, TESSERA_TEST_WORLD, TESSERA_TEST_PORT.
struct ProcessRank {
  int rank = 0;
  int size = 0;  ///< 0: there is no GPU that ranks could share, and no other process
  int port = 0;
  /// Nothing if the environment says nothing.
  static std::optional<ProcessRank> from_environment() {
    const auto number = [](const char* name) {
      const char* text = std::getenv(name);
      return text ? std::atoi(text) : 0;
    };
    if (std::getenv("TESSERA_TEST_WORLD") == nullptr) return std::nullopt;
    return ProcessRank{number("TESSERA_TEST_RANK"), number("TESSERA_TEST_WORLD"),
                       number("TESSERA_TEST_PORT")};
  }
};

/// This process's part of what run_local does; a process beyond the `size` ranks has none.
inline void run_process(const ProcessRank& here, int size, const CommOptions& options,
                        const RankFunction& function) {
  static int job = 0;
  ++job;
  if (here.rank >= size) return;
  const auto port = static_cast<std::uint16_t>(here.port);
  static const auto server =
      here.rank == 0 ? std::make_unique<StoreServer>("127.0.0.1", port, "secret") : nullptr;
  auto store = std::make_shared<Store>("127.0.0.1", port, "secret", 60);
  const auto host = make_gloo_communicator(std::move(store), here.rank, size,
                                           {.comm = options, .job = std::to_string(job)});
  try {
    function(host);
  } catch (const std::exception& error) {
    host->abort("rank " + std::to_string(here.rank) + " failed: " + error.what());
    throw;
  }
}

}  // namespace tessera::test
