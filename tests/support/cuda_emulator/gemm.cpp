/// The stand-in for kernels/cuda/gemm, which calls cuBLASLt: products by the CPU's kernels, in the stream's
/// order.

#include "kernels/cuda/gemm.hpp"

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "kernels/api/backends.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/gemm_plan.hpp"
#include "kernels/cuda/gemm_run.hpp"
#include "kernels/cuda/gemm_sums.hpp"
#include "kernels/cuda/gemm_tuner.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

GemmTuner& first_suggestions() {
  static GemmTuner tuner{GemmTuning{}};
  return tuner;
}
GemmTuner& tuner_of(const Launch& launch) {
  return launch.gemm_tuner != nullptr ? *launch.gemm_tuner : first_suggestions();
}

void enqueue(const Launch& launch, const char* name, std::function<void()> work) {
  const cudaError_t code =
      tessera_emulator::enqueue(static_cast<cudaStream_t>(launch.stream), name, std::move(work));
  if (code == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(tessera::detail::concat(name, " failed: ", cudaGetErrorString(code)));
}

const void* at(const void* base, DType dtype, std::int64_t elements) {
  return static_cast<const char*>(base) + elements * static_cast<std::int64_t>(size_of(dtype));
}

/// C = alpha product + beta C, rounded once.
template <typename T>
void finish(const BatchedGemm& p, const std::vector<float>& product, T* c) {
  for (std::int64_t row = 0; row < p.m; ++row) {
    for (std::int64_t col = 0; col < p.n; ++col) {
      T& target = c[row * p.ldc + col];
      float value = p.alpha * product[static_cast<std::size_t>(row * p.n + col)];
      if (p.beta != 0.0f) value += p.beta * static_cast<float>(target);
      target = T(value);
    }
  }
}

void multiply(const BatchedGemm& p, std::int64_t index) {
  std::vector<float> product(static_cast<std::size_t>(p.m * p.n));
  Gemm one;
  one.a = at(p.a, p.ab_dtype, index * p.stride_a);
  one.b = at(p.b, p.ab_dtype, index * p.stride_b);
  one.c = product.data();
  one.m = p.m, one.n = p.n, one.k = p.k;
  one.lda = p.lda, one.ldb = p.ldb, one.ldc = p.n;
  one.trans_a = p.trans_a, one.trans_b = p.trans_b;
  one.ab_dtype = p.ab_dtype;
  one.c_dtype = DType::f32;
  cpu::gemm(one, {});
  void* const c = const_cast<void*>(at(p.c, p.c_dtype, index * p.stride_c));
  switch (p.c_dtype) {
    case DType::f32:
      return finish(p, product, static_cast<float*>(c));
    case DType::bf16:
      return finish(p, product, static_cast<bfloat16*>(c));
    case DType::f16:
      return finish(p, product, static_cast<float16*>(c));
    default:
      throw InvalidArgument(tessera::detail::concat("batched_gemm: dtype ", p.c_dtype, " is not supported"));
  }
}

std::atomic<int> fused_refusals = 0;

bool is_refused(std::atomic<int>& left) {
  if (left.fetch_sub(1) > 0) return true;
  ++left;
  return false;
}

void multiply_plainly(const Gemm& params, void* target, const Launch& launch) {
  Gemm plain = params;
  plain.c = target;
  plain.bias = nullptr;
  plain.pre = nullptr;
  plain.epilogue = Epilogue::none;
  plain.column_sums = nullptr;
  enqueue(launch, "gemm", [plain] { cpu::gemm(plain, {}); });
}

}  // namespace

/// The product with all that `params` wants but column sums, which the CPU's kernel rounds as passes of their
/// own would; or, where a fused one was refused, the plain product with passes of their own. Column sums that
/// cuBLASLt would fuse overwrite what is there, as those of its epilogue do.
void gemm(const Gemm& params, const Launch& launch) {
  if (params.m == 0 || params.n == 0) return;
  const Fused fused = choose_fused(params);
  if (fused.any() && is_refused(fused_refusals)) {
    tuner_of(launch).notes().add(refusal_note(product_of(params, fused), "CUBLAS_STATUS_NOT_SUPPORTED"));
    return run_gemm(params, launch, [&](const Product& p) {
      if (!p.fused.any()) multiply_plainly(params, const_cast<void*>(p.result.data), launch);
      return !p.fused.any();
    });
  }
  Gemm product = params;
  product.column_sums = fused.sums ? sums_target(params) : nullptr;
  product.sums_beta = 0.0f;
  enqueue(launch, "gemm", [product] {
    std::vector<float> scratch(product.column_sums != nullptr ? kReduceParts * product.m : 0);
    Gemm with_scratch = product;
    with_scratch.sums_scratch = scratch.data();
    cpu::gemm(with_scratch, {});
  });
  finish_sums(params, fused, launch);
}

void batched_gemm(const BatchedGemm& params, const Launch& launch) {
  if (params.batch == 0 || params.m == 0 || params.n == 0) return;
  enqueue(launch, "batched_gemm", [params] {
    for (std::int64_t index = 0; index < params.batch; ++index) multiply(params, index);
  });
}

std::string take_gemm_note() { return first_suggestions().notes().take(); }

/// There is one algorithm: it is timed, and kept as if there had been others.
GemmTrial tune_gemm(const Gemm& g, const Launch& launch) {
  const std::string key = gemm_cache_key("emulated", 1, key_of(product_of(g, choose_fused(g))).text());
  if (tuner_of(launch).is_tuned(key)) return {.known = true};
  const auto begin = std::chrono::steady_clock::now();
  gemm(g, launch);
  cudaStreamSynchronize(static_cast<cudaStream_t>(launch.stream));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  tuner_of(launch).keep(key, {.words = {1}, .timed = true});
  return {.candidates = 1, .first_s = seconds, .best_s = seconds};
}

void prepare_stream(void* stream) { cudnn_prepare(stream); }
void forget_stream(void* stream) noexcept { cudnn_forget(stream); }

Description describe() { return {{"cuda", "emulated on the host, for tests"}}; }

}  // namespace tessera::kernels::cuda

void tessera_emulator::plant_gemm_refusals(int count) { tessera::kernels::cuda::fused_refusals = count; }
