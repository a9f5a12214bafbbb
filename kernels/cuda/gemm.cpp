/// gemm and batched_gemm on cuBLASLt.
///
/// State of the process, all of it memos: per device a cuBLASLt handle, the choices of whoever brings no
/// GemmTuner, and a workspace per stream (work of one stream never overlaps, so that its products can share
/// one), which ends with the stream (forget_stream). The rest is made at first use and never freed: at the
/// end of the process the driver takes it back, and by then the CUDA runtime may be gone.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/gemm_choice.hpp"
#include "kernels/cuda/gemm_cublaslt.hpp"
#include "kernels/cuda/gemm_finish.hpp"
#include "kernels/cuda/gemm_plan.hpp"
#include "kernels/cuda/gemm_run.hpp"
#include "kernels/cuda/gemm_stopwatch.hpp"
#include "kernels/cuda/gemm_sums.hpp"
#include "kernels/cuda/gemm_tuner.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

/// What NVIDIA recommends for Hopper.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr int kCandidates = 16;
constexpr int kTimedRuns = 5;
using Choice = GemmTuner::Choice;

struct DeviceState {
  cublasLtHandle_t handle = nullptr;
  std::string name;
  GemmTuner first_suggestions{GemmTuning{}};
  std::mutex mutex;  ///< guards what follows
  std::unordered_map<cudaStream_t, void*> workspaces;
};

struct ProcessState {
  std::mutex mutex;
  std::unordered_map<int, std::unique_ptr<DeviceState>> devices;
};

ProcessState& process() {
  static ProcessState* const state = new ProcessState;
  return *state;
}

DeviceState& device_state() {
  int device = 0;
  check_runtime(cudaGetDevice(&device), "cudaGetDevice", {});
  ProcessState& all = process();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<DeviceState>& state = all.devices[device];
  if (state == nullptr) {
    auto made = std::make_unique<DeviceState>();
    cudaDeviceProp properties;
    check_runtime(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", {});
    made->name = properties.name;
    check_library(cublasLtCreate(&made->handle), "cublasLtCreate", {});
    state = std::move(made);
  }
  return *state;
}

GemmTuner& tuner_of(DeviceState& device, const Launch& launch) {
  return launch.gemm_tuner != nullptr ? *launch.gemm_tuner : device.first_suggestions;
}

void* workspace_of(DeviceState& device, cudaStream_t stream) {
  const std::lock_guard lock(device.mutex);
  void*& workspace = device.workspaces[stream];
  if (workspace == nullptr) {
    check_runtime(cudaMalloc(&workspace, kWorkspaceBytes), "cudaMalloc of 32 MiB of workspace", {});
  }
  return workspace;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_runtime(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing", {});
  return status != cudaStreamCaptureStatusNone;
}

/// Frees device memory whatever happens, in the order of the stream: cudaFree would wait for other ranks.
struct Trial {
  cudaStream_t stream;
  void* c = nullptr;
  void* pre = nullptr;
  explicit Trial(cudaStream_t of) : stream(of) {}
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  ~Trial() {
    for (void* const memory : {c, pre}) {
      if (memory != nullptr) cudaFreeAsync(memory, stream);
    }
  }
  /// False if the device has not enough.
  bool allocate(void** memory, std::size_t bytes) const {
    if (cudaMallocAsync(memory, bytes, stream) == cudaSuccess) return true;
    cudaGetLastError();  // the runtime keeps the last error until it is read
    *memory = nullptr;
    return false;
  }
};

/// A copy of p that writes elsewhere, into memory of `trial`, so that timing changes nothing the caller sees;
/// but for column sums, which the product that follows overwrites anyway. Empty if the device has no memory
/// to spare.
std::optional<Product> on_copies(const Product& p, Trial& trial, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(extent(p.result, p.batch)) * size_of(p.result.dtype);
  Product copy = p;
  const auto offset = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16; };
  const std::size_t shift = offset(p.result.data);
  if (!trial.allocate(&trial.c, bytes + shift)) return std::nullopt;
  copy.result.data = static_cast<char*>(trial.c) + shift;
  if (p.fused.pre) {
    if (!trial.allocate(&trial.pre, bytes)) return std::nullopt;
    copy.pre = trial.pre;
  }
  check_runtime(cudaMemcpyAsync(const_cast<void*>(copy.result.data), p.result.data, bytes,
                                cudaMemcpyDeviceToDevice, stream),
                "cudaMemcpyAsync", p);
  return copy;
}

/// Seconds of one run; empty if the algorithm does not run.
std::optional<double> time_of(DeviceState& device, const Descriptors& descriptors, const Product& p,
                              const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                              const Stopwatch& stopwatch, cudaStream_t stream) {
  const auto once = [&] {
    return multiply(device.handle, descriptors, p, algorithm, workspace, kWorkspaceBytes, stream);
  };
  if (once() != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return stopwatch.seconds(kTimedRuns, [&] { check_library(once(), "cublasLtMatmul", p); });
}

/// The fastest of the candidates; the first where the device has no memory for a trial.
std::optional<cublasLtMatmulAlgo_t> fastest(DeviceState& device, const Product& p,
                                            const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                            void* workspace, cudaStream_t stream) {
  Trial trial(stream);
  const std::optional<Product> copy = on_copies(p, trial, stream);
  if (!copy) return std::nullopt;
  const Stopwatch stopwatch(stream);
  const Descriptors descriptors(*copy);
  std::optional<cublasLtMatmulAlgo_t> best;
  double least = 0.0;
  for (const cublasLtMatmulAlgo_t& candidate : candidates) {
    const std::optional<double> time =
        time_of(device, descriptors, *copy, candidate, workspace, stopwatch, stream);
    if (!time || (best && *time >= least)) continue;
    best = candidate;
    least = *time;
  }
  return best;
}

std::string cache_key(const DeviceState& device, const ProductKey& key) {
  return gemm_cache_key(device.name, cublasLtGetVersion(), key.text());
}

cublasLtMatmulAlgo_t algorithm_of(const AlgorithmWords& words) {
  cublasLtMatmulAlgo_t algorithm;
  std::copy(words.begin(), words.end(), algorithm.data);
  return algorithm;
}

AlgorithmWords words_of(const cublasLtMatmulAlgo_t& algorithm) {
  AlgorithmWords words{};
  std::copy(std::begin(algorithm.data), std::end(algorithm.data), words.begin());
  return words;
}

/// The choice of an earlier run, if this library accepts it for this problem; of a tuner that
/// times only the fastest.
std::optional<Choice> remembered(const GemmTuner& tuner, const DeviceState& device, const Product& p,
                                 const Descriptors& descriptors, const ProductKey& key) {
  const auto kept = tuner.kept(cache_key(device, key), tuner.times());
  if (!kept) return std::nullopt;
  if (kept->separate()) return p.fused.any() ? std::optional(Choice{}) : std::nullopt;
  if (!accepts(device.handle, descriptors, algorithm_of(kept->words), kWorkspaceBytes)) return std::nullopt;
  return Choice{.exists = true, .algorithm = kept->words};
}

Choice choose(GemmTuner& tuner, DeviceState& device, const Product& p, const Descriptors& descriptors,
              const ProductKey& key, cudaStream_t stream) {
  if (const auto known = remembered(tuner, device, p, descriptors, key)) return *known;
  const auto candidates =
      candidates_for(device.handle, descriptors, p, kWorkspaceBytes, tuner.times() ? kCandidates : 1);
  if (candidates.empty()) return {};
  Choice choice{.exists = true, .algorithm = words_of(candidates.front())};
  bool timed = tuner.times() && candidates.size() == 1;  // there is nothing to compare it with
  if (tuner.times() && !timed) {
    if (is_captured(stream)) {
      choice.settled = false;
      return choice;
    }
    if (const auto best = fastest(device, p, candidates, workspace_of(device, stream), stream)) {
      choice.algorithm = words_of(*best);
      timed = true;
    }
  }
  tuner.keep(cache_key(device, key), {.words = choice.algorithm, .timed = timed});
  return choice;
}

/// Whether a call found out that its algorithm does not serve: nothing was launched. Other failures are
/// errors.
bool is_refusal(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

/// After `status` refused the choice for p: what is fused is left to passes of their own from now on, plain
/// products take the next algorithm that runs. Whether p was computed.
bool recover(GemmTuner& tuner, DeviceState& device, const Product& p, const Descriptors& descriptors,
             const ProductKey& key, cublasStatus_t status, void* workspace, cudaStream_t stream) {
  Choice choice;
  if (!p.fused.any()) {
    for (const cublasLtMatmulAlgo_t& each :
         candidates_for(device.handle, descriptors, p, kWorkspaceBytes, kCandidates)) {
      const cublasStatus_t tried =
          multiply(device.handle, descriptors, p, each, workspace, kWorkspaceBytes, stream);
      if (is_refusal(tried)) continue;
      check_library(tried, "cublasLtMatmul", p);
      choice = {.exists = true, .algorithm = words_of(each)};
      break;
    }
    if (!choice.exists) check_library(status, "cublasLtMatmul", p);
  }
  tuner.set_choice(key, choice);
  tuner.notes().add(refusal_note(p, cublasLtGetStatusName(status)));
  return choice.exists;
}

/// False, and nothing done, if cuBLASLt has no algorithm for p or refuses what it fuses.
bool run(const Product& p, const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  DeviceState& device = device_state();
  GemmTuner& tuner = tuner_of(device, launch);
  const Descriptors descriptors(p);
  const ProductKey key = key_of(p);
  const Choice choice = tuner.choice(key, [&] { return choose(tuner, device, p, descriptors, key, stream); });
  if (!choice.exists) return false;
  void* const workspace = workspace_of(device, stream);
  const cublasStatus_t status = multiply(device.handle, descriptors, p, algorithm_of(choice.algorithm),
                                         workspace, kWorkspaceBytes, stream);
  if (is_refusal(status)) return recover(tuner, device, p, descriptors, key, status, workspace, stream);
  check_library(status, "cublasLtMatmul", p);
  return true;
}

void run_or_throw(const Product& p, const Launch& launch) {
  if (!run(p, launch))
    throw DeviceError(tessera::detail::concat("cuBLASLt offers no algorithm for a ", describe_product(p)));
}

}  // namespace

void gemm(const Gemm& g, const Launch& launch) {
  if (g.m == 0 || g.n == 0) return;
  check_dtypes(g.ab_dtype, g.c_dtype);
  if (g.k == 0) {
    if (g.beta == 0.0f || needs_finish(g, {})) gemm_finish(finish_of(g, {}), launch);
    finish_sums(g, {}, launch);
    return;
  }
  run_gemm(g, launch, [&](const Product& p) { return run(p, launch); });
}

void batched_gemm(const BatchedGemm& g, const Launch& launch) {
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  check_dtypes(g.ab_dtype, g.c_dtype);
  TESSERA_CHECK(g.k > 0, "a batched product needs k > 0");
  run_or_throw(product_of(g), launch);
}

void prepare_stream(void* stream) {
  workspace_of(device_state(), static_cast<cudaStream_t>(stream));
  cudnn_prepare(stream);
}

void forget_stream(void* stream) noexcept {
  cudnn_forget(stream);
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return;
  ProcessState& all = process();
  const std::lock_guard lock(all.mutex);
  const auto known = all.devices.find(device);
  if (known == all.devices.end()) return;
  const std::lock_guard of_device(known->second->mutex);
  const auto found = known->second->workspaces.find(static_cast<cudaStream_t>(stream));
  if (found == known->second->workspaces.end()) return;
  cudaFree(found->second);
  known->second->workspaces.erase(found);
}

LtDevice lt_device() { return {device_state().handle, kWorkspaceBytes}; }

bool is_tuned(const GemmTuner& tuner, const Product& p) {
  return tuner.is_tuned(cache_key(device_state(), key_of(p)));
}

void use_algorithm(GemmTuner& tuner, const Product& p, const cublasLtMatmulAlgo_t* algorithm) {
  Choice choice{.exists = algorithm != nullptr};
  if (algorithm != nullptr) choice.algorithm = words_of(*algorithm);
  tuner.set_choice(key_of(p), choice);
}

void keep_algorithm(GemmTuner& tuner, const Product& p, const cublasLtMatmulAlgo_t* algorithm) {
  use_algorithm(tuner, p, algorithm);
  const AlgorithmWords words = algorithm != nullptr ? words_of(*algorithm) : AlgorithmWords{};
  tuner.keep(cache_key(device_state(), key_of(p)), {.words = words, .timed = true});
}

std::string take_gemm_note() { return device_state().first_suggestions.notes().take(); }

}  // namespace tessera::kernels::cuda
