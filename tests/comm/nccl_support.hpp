#pragma once
/// Ranks over NCCL: threads of the test, a GPU each, or processes, which may share a GPU.

#include <algorithm>
#include <memory>

#include "tessera/comm/nccl.hpp"
#include "tests/comm/conformance.hpp"
#include "tests/support/process_ranks.hpp"

namespace tessera::test {

inline void with_nccl(std::shared_ptr<Communicator> host, int device, const RankFunction& function) {
  context = [device] { return ExecCtx::cuda(device, 1); };
  function(make_nccl_communicator(std::move(host), Device{DeviceType::cuda, device}));
}

inline void run_nccl(int size, const CommOptions& options, const RankFunction& function) {
  const auto work = [&](const auto& host) { with_nccl(host, host->rank() % cuda_devices().count, function); };
  const auto here = ProcessRank::from_environment();
  if (here && here->size > 0) return run_process(*here, size, options, work);
  run_local(size, options, work);
}

/// Sums of four ranks' marks are still exact in bf16, whatever the order.
inline Backend nccl_backend() {
  Backend backend{.name = "nccl", .max_ranks = 4, .run = run_nccl, .rank_order = false, .tags = false};
  const CudaDevices devices = cuda_devices();
  const auto here = ProcessRank::from_environment();
  backend.why_not = devices.why_none;
  backend.max_ranks = std::min(4, here && here->size > 0 ? here->size : devices.count);
  return backend;
}

}  // namespace tessera::test
