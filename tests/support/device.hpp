#pragma once
/// The device that tests of everything above the kernels run on: CUDA if there is one, unless
/// TESSERA_TEST_DEVICE=cpu.

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/nccl.hpp"
#include "tests/support/process_ranks.hpp"

namespace tessera::test {

inline bool on_cuda() {
  const char* name = std::getenv("TESSERA_TEST_DEVICE");
  return cuda_devices().count > 0 && !(name != nullptr && std::string(name) == "cpu");
}

/// A context of its own. `threads` counts on the CPU.
inline ExecCtx context(int threads = 1, std::uint64_t seed = 0) {
  return on_cuda() ? ExecCtx::cuda(0, seed) : ExecCtx::cpu(threads, seed);
}

/// A group as code on the device needs it.
inline std::shared_ptr<Communicator> on_device(std::shared_ptr<Communicator> group) {
  return on_cuda() ? make_nccl_communicator(std::move(group), {DeviceType::cuda, 0}) : group;
}

/// Skips the test that runs, from wherever it is.
[[noreturn]] inline void skip(const std::string& why) {
  [&] { GTEST_SKIP() << why; }();
  throw ::testing::AssertionException({::testing::TestPartResult::kSkip, __FILE__, __LINE__, why.c_str()});
}

/// run_local for ranks that compute on the device. Where ranks are processes (process_ranks.hpp) this is one
/// of them, and a test for another number of ranks is skipped.
inline void run_ranks(int size, const CommOptions& options, const RankFunction& function) {
  const auto here = ProcessRank::from_environment();
  if (!here || size == 1) return run_local(size, options, function);
  if (here->size != size) skip("needs " + std::to_string(size) + " ranks: tests/gpu/rank_processes.py");
  run_process(*here, size, options, function);
}

/// The same with groups that take tensors of the device.
inline void run_on_device(int size, const CommOptions& options, const RankFunction& function) {
  run_ranks(size, options,
            [&](std::shared_ptr<Communicator> group) { function(on_device(std::move(group))); });
}
inline void run_on_device(int size, const RankFunction& function) {
  run_on_device(size, CommOptions{.timeout_s = 60}, function);
}

/// Changes a contiguous tensor on the host: fn(its values).
template <typename Fn>
void edit(const Tensor& tensor, Fn&& fn) {
  auto values = tensor.to_vector<float>();
  fn(values);
  tensor.copy_from_host(values.data());
}

}  // namespace tessera::test
