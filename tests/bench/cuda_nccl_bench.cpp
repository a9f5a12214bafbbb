// Host time per operation over NCCL: what a call costs the thread that makes it, without waiting for the GPU.
// One rank of a job: tessera launch --num_processes 2 tests/gpu/rank.sh PATH/cuda_nccl_bench. Wanted: at most
// 15 us.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "tessera/base/env.hpp"
#include "tessera/comm/nccl.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/launch/world.hpp"

using namespace tessera;

namespace {

constexpr int kRounds = 200, kCalls = 20;

/// The median over rounds, in microseconds, of one of kCalls calls in a row; the GPU is idle at first.
double host_us(const ExecCtx& ctx, Communicator& group, const std::function<Pending()>& call) {
  std::vector<double> times;
  std::vector<Pending> pending;
  for (int round = 0; round < kRounds; ++round) {
    group.barrier(ctx);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      pending.push_back(call());
      pending.back().wait(ctx);
    }
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kCalls);
    ctx.stream->synchronize();
    pending.clear();
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

}  // namespace

int main() {
  try {
    const Environment environment = read_environment();
    auto host = connect_world(environment, 120);
    const int device =
        static_cast<int>(environment.local_rank.value_or(0)) % std::max(1, cuda_devices().count);
    const auto group = make_nccl_communicator(host, Device{DeviceType::cuda, device});
    const ExecCtx ctx = ExecCtx::cuda(device, 1);
    const int size = group->size(), rank = group->rank(), next = (rank + 1) % size,
              before = (rank + size - 1) % size;
    group->connect_to(size > 2 ? std::vector<int>{next, before} : std::vector<int>{next});
    const Tensor x = Tensor::empty(ctx, {1024}, DType::f32), y = Tensor::empty(ctx, {1024}, DType::f32);
    const Tensor all = Tensor::empty(ctx, {1024 * size}, DType::f32);
    const auto report = [&](const char* what, const std::function<Pending()>& call) {
      const double us = host_us(ctx, *group, call);
      if (rank == 0) std::printf("%-40s %8.1f us/operation on the host\n", what, us);
    };
    report("all_reduce, 4 KiB", [&] { return group->all_reduce(ctx, x); });
    report("all_gather, 4 KiB each", [&] { return group->all_gather(ctx, x, all); });
    report("reduce_scatter, 4 KiB each", [&] { return group->reduce_scatter(ctx, all, x); });
    report("exchange with both neighbours, 4 KiB", [&] {
      return group->exchange(ctx, {{Transfer::Kind::send, x, next, 0}, {Transfer::Kind::recv, y, before, 0}});
    });
    group->barrier(ctx);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_nccl_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
