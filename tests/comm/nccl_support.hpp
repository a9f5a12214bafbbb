#pragma once
/// Ranks over NCCL: threads of the test, a GPU each, or, where TESSERA_TEST_RANK, TESSERA_TEST_WORLD and
/// TESSERA_TEST_PORT are set, one rank of so many processes, which may share a GPU if their NCCL_HOSTID
/// differ.

#include <cstdlib>
#include <string>

#include "tessera/comm/gloo.hpp"
#include "tessera/comm/nccl.hpp"
#include "tests/comm/conformance.hpp"

namespace tessera::test {

/// Ranks that are processes, as the environment says; size 0 if it says nothing.
struct NcclProcesses {
  int rank = 0, size = 0, port = 0;
  static NcclProcesses from_environment() {
    const auto number = [](const char* name) {
      const char* text = std::getenv(name);
      return text ? std::atoi(text) : 0;
    };
    return {number("TESSERA_TEST_RANK"), number("TESSERA_TEST_WORLD"), number("TESSERA_TEST_PORT")};
  }
};

inline void with_nccl(std::shared_ptr<Communicator> host, int device, const RankFunction& function) {
  context = [device] { return ExecCtx::cuda(device, 1); };
  function(make_nccl_communicator(std::move(host), Device{DeviceType::cuda, device}));
}

/// This process's part; the others run the same tests in the same order.
inline void run_nccl_process(const NcclProcesses& here, int size, const CommOptions& options,
                             const RankFunction& function) {
  static int job = 0;
  ++job;
  if (here.rank >= size) return;
  static const auto server =
      here.rank == 0 ? std::make_unique<StoreServer>("127.0.0.1", here.port, "secret") : nullptr;
  auto store = std::make_shared<Store>("127.0.0.1", here.port, "secret", 60);
  auto host = make_gloo_communicator(std::move(store), here.rank, size,
                                     {.comm = options, .job = std::to_string(job)});
  with_nccl(std::move(host), here.rank % cuda_devices().count, function);
}

inline void run_nccl(int size, const CommOptions& options, const RankFunction& function) {
  const NcclProcesses here = NcclProcesses::from_environment();
  if (here.size > 0) return run_nccl_process(here, size, options, function);
  run_local(size, options,
            [&](const auto& host) { with_nccl(host, host->rank() % cuda_devices().count, function); });
}

/// Sums of four ranks' marks are still exact in bf16, whatever the order.
inline Backend nccl_backend() {
  Backend backend{.name = "nccl", .max_ranks = 4, .run = run_nccl, .rank_order = false, .tags = false};
  const CudaDevices devices = cuda_devices();
  const NcclProcesses here = NcclProcesses::from_environment();
  backend.why_not = devices.why_none;
  backend.max_ranks = std::min(4, here.size > 0 ? here.size : devices.count);
  return backend;
}

}  // namespace tessera::test
