/// The products of one GPT-2 124M training step (1024 tokens) and of a small model, beside the rate of a 1024
/// x 1024 x 1024 product of the same dtype on the same machine. Usage: gemm_bench [threads] [text that the
/// row's name must contain]

#include <sys/resource.h>

#include <cstring>
#include <vector>

#include "kernels/api/gemm.hpp"
#include "kernels/bench/bench.hpp"

namespace tessera {
namespace {

using bench::Array;
using kernels::Gemm;

struct Layer {
  const char* name;
  std::int64_t tokens, in, out;
};

constexpr Layer kLayers[] = {
    {"124M qkv", 1024, 768, 2304},         {"124M proj", 1024, 768, 768},
    {"124M fc1", 1024, 768, 3072},         {"124M fc2", 1024, 3072, 768},
    {"124M head", 1024, 768, 50257},       {"small qkv", 512, 256, 768},
    {"small proj", 512, 256, 256},         {"small fc1", 512, 256, 1024},
    {"small fc2", 512, 1024, 256},         {"small head", 512, 256, 8192},
    {"decode fc1", 1, 768, 3072},          {"decode head", 1, 768, 50257},
    {"decode head of 4", 4, 768, 50257},   {"decode head of 8", 8, 768, 50257},
    {"decode head of 16", 16, 768, 50257},
};

long page_faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

double rate(const Gemm& g, double seconds) {
  return 2e-9 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k) / seconds;
}

double measure(const Gemm& g, int threads) {
  return rate(g, bench::shortest([&] { kernels::cpu::gemm(g, {.threads = threads}); }));
}

double ceiling(DType dtype, int threads) {
  constexpr std::int64_t n = 1024;
  Array a(dtype, n * n), b(dtype, n * n), c(dtype, n * n);
  return measure({.a = a.data(),
                  .b = b.data(),
                  .c = c.data(),
                  .m = n,
                  .n = n,
                  .k = n,
                  .lda = n,
                  .ldb = n,
                  .ldc = n,
                  .ab_dtype = dtype,
                  .c_dtype = dtype},
                 threads);
}

/// y = x W^T + b; dx = dy W; dW += dy^T x in fp32.
std::vector<std::pair<std::string, Gemm>> products(const Layer& l, DType dtype) {
  return {{"forward",
           {.m = l.tokens,
            .n = l.out,
            .k = l.in,
            .lda = l.in,
            .ldb = l.in,
            .ldc = l.out,
            .trans_b = true,
            .ab_dtype = dtype,
            .c_dtype = dtype}},
          {"input gradient",
           {.m = l.tokens,
            .n = l.in,
            .k = l.out,
            .lda = l.out,
            .ldb = l.in,
            .ldc = l.in,
            .ab_dtype = dtype,
            .c_dtype = dtype}},
          {"weight gradient",
           {.m = l.out,
            .n = l.in,
            .k = l.tokens,
            .lda = l.out,
            .ldb = l.in,
            .ldc = l.in,
            .trans_a = true,
            .ab_dtype = dtype,
            .c_dtype = DType::f32,
            .beta = 1.0f}}};
}

void run(const Layer& layer, DType dtype, double top, int threads, const char* filter) {
  for (auto& [what, g] : products(layer, dtype)) {
    const std::string name = std::string(layer.name) + " " + what + " " + std::string(name_of(dtype));
    if (name.find(filter) == std::string::npos) continue;
    Array a(dtype, g.m * g.k), b(dtype, g.k * g.n), c(g.c_dtype, g.m * g.n), bias(dtype, g.n);
    g.a = a.data();
    g.b = b.data();
    g.c = c.data();
    if (g.trans_b && layer.out < 8000) g.bias = bias.data();
    const double reached = measure(g, threads);
    const long before = page_faults();
    kernels::cpu::gemm(g, {.threads = threads});
    // How fast B is read matters where there are few rows beside it.
    const double gb_s = reached / (2.0 * static_cast<double>(g.m)) * static_cast<double>(size_of(dtype));
    std::printf("%-36s %6ld x %5ld x %5ld %7.0f GF/s %5.1f %% of 1024^3 %6.1f GB/s of B %3ld page faults\n",
                name.c_str(), static_cast<long>(g.m), static_cast<long>(g.n), static_cast<long>(g.k), reached,
                100.0 * reached / top, gb_s, page_faults() - before);
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const char* filter = argc > 2 ? argv[2] : "";
  bench::print_machine(threads);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double top = ceiling(dtype, threads);
    std::printf("1024 x 1024 x 1024 %s: %.0f GF/s\n", std::string(name_of(dtype)).c_str(), top);
    for (const Layer& layer : kLayers) run(layer, dtype, top, threads, filter);
  }
}
