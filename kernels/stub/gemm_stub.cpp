/// What products on CUDA offer beyond kernels/api, in a build that has no CUDA: refused by name.

#include "kernels/cuda/gemm.hpp"
#include "kernels/cuda/gemm_finish.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void no_cuda(const char* what) {
  throw ConfigError(
      tessera::detail::concat("this build of Tessera has no CUDA backend (wanted by ", what,
                              "): set device.type to cpu or auto, or build with -DTESSERA_CUDA=ON"));
}

}  // namespace

void batched_gemm(const BatchedGemm&, const Launch&) { no_cuda("batched_gemm"); }
void gemm_finish(const GemmFinish&, const Launch&) { no_cuda("gemm_finish"); }
void forget_stream(void*) noexcept {}
void prepare_stream(void*) { no_cuda("prepare_stream"); }
void load_kernels() { no_cuda("load_kernels"); }
void write_time(std::int64_t*, void*) { no_cuda("write_time"); }
GemmTrial tune_gemm(const Gemm&, const Launch&) { no_cuda("tune_gemm"); }
std::string take_gemm_note() { return ""; }
std::string take_attention_note() { return ""; }

}  // namespace tessera::kernels::cuda
