/// Attention at GPT-2 124M's shape (12 heads of 64, 1024 positions, causal, batch 1) beside the machine's
/// GEMM rate. FLOPs are counted over the causal half: forward 4 S^2/2 d a head, backward 2.5 times that.
/// Usage: attention_bench [threads]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/api/attention.hpp"
#include "kernels/api/gemm.hpp"

namespace {

using namespace tessera;
using namespace tessera::kernels;

constexpr std::int64_t kSeq = 1024, kHeads = 12, kDim = 64;

/// Median seconds of one call.
template <typename F>
double median_seconds(F&& call) {
  call();
  std::vector<double> seconds;
  for (int i = 0; i < 15; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

template <typename T>
std::vector<T> noise(std::size_t n, std::uint32_t site) {
  std::vector<T> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = random_block({1, site, 0}, i).word[0];
    values[i] = static_cast<T>(static_cast<float>(word) / 2147483648.0f - 1.0f);
  }
  return values;
}

double gemm_rate(const Launch& launch) {
  const std::int64_t m = 1024, n = 3072, k = 768;
  const auto a = noise<float>(m * k, 1), b = noise<float>(k * n, 2);
  std::vector<float> c(m * n);
  Gemm call;
  call.a = a.data();
  call.b = b.data();
  call.c = c.data();
  call.m = m, call.n = n, call.k = k;
  call.lda = k, call.ldb = n, call.ldc = n;
  return 2.0 * m * n * k / median_seconds([&] { cpu::gemm(call, launch); }) * 1e-9;
}

template <typename T>
void measure(const char* name, const Launch& launch, double ceiling) {
  const std::int64_t row = 3 * kHeads * kDim;
  auto qkv = noise<T>(kSeq * row, 1);
  auto d_o = noise<T>(kSeq * kHeads * kDim, 2);
  std::vector<T> o(d_o.size()), d_qkv(qkv.size());
  std::vector<float> lse(kHeads * kSeq);
  AttentionShape shape;
  shape.batch = 1, shape.seq_q = shape.seq_k = kSeq;
  shape.heads = shape.kv_heads = kHeads, shape.head_dim = kDim;
  shape.dtype = dtype_of<T>::value;
  shape.q_stride = shape.k_stride = shape.v_stride = {row, row, kDim};
  shape.o_stride = {kHeads * kDim, kHeads * kDim, kDim};
  shape.scale = 0.125f;
  std::vector<char> workspace(std::max(cpu::attention_forward_workspace(shape, launch.threads),
                                       cpu::attention_backward_workspace(shape, launch.threads)));
  const T* k = qkv.data() + kHeads * kDim;
  const T* v = k + kHeads * kDim;
  const AttentionForward forward{shape, qkv.data(), k, v, o.data(), lse.data(), workspace.data()};
  const AttentionBackward backward{shape,
                                   qkv.data(),
                                   k,
                                   v,
                                   o.data(),
                                   lse.data(),
                                   d_o.data(),
                                   d_qkv.data(),
                                   d_qkv.data() + kHeads * kDim,
                                   d_qkv.data() + 2 * kHeads * kDim,
                                   workspace.data()};
  const double flops = 4.0 * kSeq * kSeq / 2 * kDim * kHeads;
  const double f = median_seconds([&] { cpu::attention_forward(forward, launch); });
  const double b = median_seconds([&] { cpu::attention_backward(backward, launch); });
  const double rate = 3.5 * flops / (f + b) * 1e-9;
  std::printf(
      "%s  forward %6.2f ms %6.1f GF/s   backward %6.2f ms %6.1f GF/s   both %6.1f GF/s = %3.0f %% of GEMM\n",
      name, f * 1e3, flops / f * 1e-9, b * 1e3, 2.5 * flops / b * 1e-9, rate, 100.0 * rate / ceiling);
}

}  // namespace

int main(int argc, char** argv) {
  const Launch launch{nullptr, argc > 1 ? std::atoi(argv[1]) : 2};
  const double ceiling = gemm_rate(launch);
  std::printf("threads %d, fp32 GEMM 1024 x 3072 x 768: %.1f GF/s\n", launch.threads, ceiling);
  measure<float>("fp32", launch, ceiling);
  measure<bfloat16>("bf16", launch, ceiling);
}
