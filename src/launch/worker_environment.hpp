#pragma once
#include <string>
#include <vector>

#include "tessera/launch/launch.hpp"

namespace tessera::launching {

/// What distinguishes one worker of an attempt.
struct WorkerPlace {
  int local_rank = 0;
  int attempt = 0;
  std::string store_address;  ///< host:port
  std::string secret;
};

/// Everything in the environment of one worker.
std::vector<std::string> worker_environment(const LaunchOptions& options, const WorkerPlace& place);

/// CPU cores this process may use, at least 1.
int usable_cores();

/// The share of one of `workers` workers in the cores this process may use: neighbouring ones, at least one.
std::vector<int> share_of_cores(int local_rank, int workers);

}  // namespace tessera::launching
