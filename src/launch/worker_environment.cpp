#include "launch/worker_environment.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "launch/environment.hpp"

namespace tessera::launching {

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

std::vector<int> share_of_cores(int local_rank, int workers) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  std::vector<int> cores, share;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) return share;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &usable)) cores.push_back(core);
  }
  const auto count = static_cast<std::int64_t>(cores.size());
  if (count == 0) return share;
  const std::int64_t begin = local_rank * count / workers;
  const std::int64_t end = std::max(begin + 1, (local_rank + 1) * count / workers);
  for (std::int64_t i = begin; i < end; ++i) share.push_back(cores[static_cast<std::size_t>(i % count)]);
  return share;
}

std::vector<std::string> worker_environment(const LaunchOptions& options, const WorkerPlace& place) {
  const int local_size = options.num_processes / options.num_machines;
  const int rank = options.machine_rank * local_size + place.local_rank;
  const auto colon = place.store_address.rfind(':');
  Variables result = options.environment;
  set_variable(result, "RANK", std::to_string(rank));
  set_variable(result, "LOCAL_RANK", std::to_string(place.local_rank));
  set_variable(result, "WORLD_SIZE", std::to_string(options.num_processes));
  set_variable(result, "LOCAL_WORLD_SIZE", std::to_string(local_size));
  set_variable(result, "GROUP_RANK", std::to_string(options.machine_rank));
  set_variable(result, "MASTER_ADDR", options.main_process_ip);
  set_variable(result, "MASTER_PORT", place.store_address.substr(colon + 1));
  set_variable(result, "TESSERA_STORE", place.store_address);
  set_variable(result, "TESSERA_JOB_SECRET", place.secret);
  set_variable(result, "TESSERA_RESTART", std::to_string(place.attempt));
  // Read by CUDA when it begins. Every group of ranks and every pair of neighbours has a stream of its own,
  // and streams that share a queue hold each other up; a kernel whose code is loaded at its first launch may
  // wait for everything on the device.
  default_variable(result, "CUDA_DEVICE_MAX_CONNECTIONS", "32");
  default_variable(result, "CUDA_MODULE_LOADING", "EAGER");
  const int share = std::max(1, usable_cores() / local_size);
  for (const char* name : {"OMP_NUM_THREADS", "TESSERA_THREADS"}) {
    if (options.threads_per_process > 0) {
      set_variable(result, name, std::to_string(options.threads_per_process));
    } else {
      default_variable(result, name, std::to_string(share));
    }
  }
  return result;
}

}  // namespace tessera::launching
