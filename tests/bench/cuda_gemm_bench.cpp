/// The products of GPT-2 and Llama training on GPU 0, forward, input gradient and weight gradient, on random
/// data (products of zeros or constants draw less power and run faster). Usage: cuda_gemm_bench [text that a
/// row's name must contain] [tune] [file of algorithms]. "tune" times cuBLASLt's candidates first and keeps
/// winners in the file.

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "cuda_bench.hpp"
#include "kernels/api/backends.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/cuda/gemm.hpp"
#include "kernels/cuda/gemm_tuner.hpp"

namespace tessera::bench {
namespace {

using kernels::Epilogue;
using kernels::Gemm;

constexpr int kRuns = 20;  // in a row: the gaps of one are not what is measured
/// Dense bf16 of H100 SXM and H200.
constexpr double kPeak = 989.4;

struct Layer {
  const char* name;
  std::int64_t tokens, in, out;
  bool gelu = false;         ///< of the result
  bool gelu_before = false;  ///< of the input
};

constexpr Layer kLayers[] = {
    {"124M qkv", 65536, 768, 2304},
    {"124M proj", 65536, 768, 768},
    {"124M fc1", 65536, 768, 3072, true},
    {"124M fc2", 65536, 3072, 768, false, true},
    {"124M head", 512, 768, 50304},
    {"XL qkv", 16384, 1600, 4800},
    {"XL proj", 16384, 1600, 1600},
    {"XL fc1", 16384, 1600, 6400, true},
    {"XL fc2", 16384, 6400, 1600, false, true},
    {"7B qkv", 8192, 4096, 12288},
    {"7B proj", 8192, 4096, 4096},
    {"7B gate-up", 8192, 4096, 22016},
    {"7B down", 8192, 11008, 4096},
    {"8B qkv", 8192, 4096, 6144},
    {"8B gate-up", 8192, 4096, 28672},
    {"8B down", 8192, 14336, 4096},
    {"8B head", 512, 4096, 128256},
    {"square 4096", 4096, 4096, 4096},
    {"square 8192", 8192, 8192, 8192},
};

/// y = gelu(x W^T + b); dx = dy W, times gelu's slope; dW += dy^T x in fp32, alone and with db += the sums of
/// dy.
std::vector<std::pair<std::string, Gemm>> products(const Layer& l, DType dtype) {
  Gemm forward, input, weight;
  forward.m = l.tokens, forward.n = l.out, forward.k = l.in;
  forward.lda = l.in, forward.ldb = l.in, forward.ldc = l.out;
  forward.trans_b = true;
  if (l.gelu) forward.epilogue = Epilogue::gelu_tanh;
  if (l.gelu_before) input.epilogue = Epilogue::dgelu_tanh;
  input.m = l.tokens, input.n = l.in, input.k = l.out;
  input.lda = l.out, input.ldb = l.in, input.ldc = l.in;
  weight.m = l.out, weight.n = l.in, weight.k = l.tokens;
  weight.lda = l.out, weight.ldb = l.in, weight.ldc = l.in;
  weight.trans_a = true;
  weight.beta = 1.0f;
  for (Gemm* g : {&forward, &input, &weight}) g->ab_dtype = g->c_dtype = dtype;
  weight.c_dtype = DType::f32;
  return {{"forward", forward},
          {"input gradient", input},
          {"weight gradient", weight},
          {"weight and bias gradient", weight}};
}

void run(const Gpu& gpu, const Layer& layer, DType dtype, const kernels::Launch& launch, const char* filter) {
  for (auto& [what, g] : products(layer, dtype)) {
    const std::string name = std::string(layer.name) + " " + what + " " + std::string(name_of(dtype));
    if (name.find(filter) == std::string::npos) continue;
    const Random a(gpu, dtype, g.m * g.k), b(gpu, dtype, g.k * g.n), c(gpu, g.c_dtype, g.m * g.n),
        bias(gpu, dtype, g.n), pre(gpu, dtype, g.epilogue == Epilogue::none ? 1 : g.m * g.n),
        sums(gpu, DType::f32, g.m), scratch(gpu, DType::f32, kernels::kReduceParts * g.m);
    g.a = a.data(), g.b = b.data(), g.c = c.data();
    if (g.trans_b) g.bias = bias.data();
    if (g.epilogue != Epilogue::none) g.pre = pre.data();
    if (what == "weight and bias gradient") {
      g.column_sums = sums.floats(), g.sums_scratch = scratch.floats();
      g.sums_beta = 1.0f;
    }
    const auto several = [&] {
      for (int i = 0; i < kRuns; ++i) kernels::cuda::gemm(g, launch);
    };
    const double seconds = gpu.median([] {}, several) / kRuns;
    const double rate =
        2e-12 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k) / seconds;
    std::printf("%-42s %6ld x %6ld x %6ld %9.1f us %7.1f TFLOP/s", name.c_str(), static_cast<long>(g.m),
                static_cast<long>(g.n), static_cast<long>(g.k), 1e6 * seconds, rate);
    dtype == DType::f32 ? std::printf("\n") : std::printf(" %5.1f %% of %.0f\n", 100.0 * rate / kPeak, kPeak);
    std::fflush(stdout);
  }
}

void run_all(const char* filter, const kernels::GemmTuning& options) {
  const Gpu gpu;
  GemmTuner tuner(options);
  kernels::Launch launch = gpu.launch();
  launch.gemm_tuner = &tuner;
  for (const Layer& layer : kLayers) run(gpu, layer, DType::bf16, launch, filter);
  // A second each: of the other types one model tells enough.
  for (const DType dtype : {DType::f16, DType::f32})
    for (const Layer& layer : kLayers)
      if (std::string(layer.name).starts_with("124M")) run(gpu, layer, dtype, launch, filter);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;
  if (cuda::device_count() == 0) {
    std::printf("nothing to measure: %s\n", cuda::why_none().c_str());
    return 0;
  }
  for (const auto& [what, value] : kernels::cuda::describe())
    std::printf("%s: %s   ", what.c_str(), value.c_str());
  std::printf("\n");
  const bool tune = argc > 2 && std::strcmp(argv[2], "tune") == 0;
  try {
    bench::run_all(argc > 1 ? argv[1] : "",
                   {.tune = tune, .cache_path = argc > 3 ? argv[3] : "", .tables = {}});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
