/// Attention of CUDA device 0 in bf16, causal, 16 heads, as the launchers choose (cuDNN) and by our own path,
/// beside the device's GEMM rate. FLOPs are counted over the causal half: forward 4 S^2/2 d a head,
/// backward 2.5 times that. Usage: cuda_attention_bench [longest sequence, 8192 by default]

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "device/cuda.hpp"
#include "kernels/api/attention.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/cuda/attention_own.hpp"

namespace {

using namespace tessera;
using namespace tessera::kernels;

constexpr std::int64_t kHeads = 16;

/// Device memory holding what it did, or small values of both signs.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : data_(tessera::cuda::allocate(0, bytes)) {}
  Memory(std::int64_t n, void* stream) : Memory(static_cast<std::size_t>(n) * sizeof(bfloat16)) {
    std::vector<bfloat16> values;
    for (std::int64_t i = 0; i < n; ++i)
      values.push_back(bfloat16(static_cast<float>(i * 7919 % 1000) / 1000.0f - 0.5f));
    tessera::cuda::copy(data_, values.data(), values.size() * sizeof(bfloat16), stream);
    tessera::cuda::synchronize(stream);
  }
  ~Memory() { tessera::cuda::deallocate(data_); }
  Memory(const Memory&) = delete;
  bfloat16* get() const { return static_cast<bfloat16*>(data_); }

 private:
  void* data_;
};

/// Seconds of one call: the shortest of ten, after two that are not counted.
double seconds(void* stream, const std::function<void()>& call) {
  void* begin = tessera::cuda::create_event();
  void* end = tessera::cuda::create_event();
  double best = 1e30;
  for (int i = 0; i < 12; ++i) {
    tessera::cuda::record(begin, stream);
    call();
    tessera::cuda::record(end, stream);
    tessera::cuda::synchronize_event(end);
    if (i >= 2) best = std::min(best, tessera::cuda::seconds_between(begin, end));
  }
  tessera::cuda::destroy_event(begin);
  tessera::cuda::destroy_event(end);
  return best;
}

double gemm_rate(const Launch& launch, std::int64_t size) {
  const Memory a(size * size, launch.stream), b(size * size, launch.stream), c(size * size, launch.stream);
  Gemm call;
  call.a = a.get(), call.b = b.get(), call.c = c.get();
  call.m = call.n = call.k = call.lda = call.ldb = call.ldc = size;
  call.ab_dtype = call.c_dtype = DType::bf16;
  const double n = static_cast<double>(size);
  return 2e-12 * n * n * n / seconds(launch.stream, [&] { kernels::cuda::gemm(call, launch); });
}

void print(const char* path, double flops, double forward, double backward, double ceiling) {
  const double rate = 3.5e-12 * flops / (forward + backward);
  std::printf(
      "  %-8s forward %8.3f ms %6.1f TFLOP/s   backward %8.3f ms %6.1f TFLOP/s   both %3.0f %% of GEMM\n",
      path, forward * 1e3, 1e-12 * flops / forward, backward * 1e3, 2.5e-12 * flops / backward,
      100.0 * rate / ceiling);
}

void measure(std::int64_t seq, std::int64_t dim, std::int64_t batch, const Launch& launch, double ceiling) {
  const std::int64_t row = 3 * kHeads * dim, tokens = seq * batch;
  const Memory qkv(tokens * row, launch.stream), d_qkv(tokens * row, launch.stream),
      o(tokens * kHeads * dim, launch.stream), d_o(tokens * kHeads * dim, launch.stream);
  const Memory lse(static_cast<std::size_t>(tokens * kHeads) * sizeof(float));
  AttentionShape s;
  s.batch = batch, s.seq_q = s.seq_k = seq;
  s.heads = s.kv_heads = kHeads, s.head_dim = dim;
  s.dtype = DType::bf16;
  s.q_stride = s.k_stride = s.v_stride = {batch * row, row, dim};
  s.o_stride = {batch * kHeads * dim, kHeads * dim, dim};
  s.scale = 0.1f;
  const Memory space(std::max({kernels::cuda::attention_forward_workspace(s, 0),
                               kernels::cuda::attention_backward_workspace(s, 0),
                               kernels::cuda::own_attention_forward_workspace(s),
                               kernels::cuda::own_attention_backward_workspace(s)}));
  const bfloat16* q = qkv.get();
  bfloat16* dq = d_qkv.get();
  const std::int64_t part = kHeads * dim;
  float* sums = reinterpret_cast<float*>(lse.get());
  const AttentionForward forward{s, q, q + part, q + 2 * part, o.get(), sums, space.get()};
  const AttentionBackward backward{s,         q,  q + part,  q + 2 * part,  o.get(),    sums,
                                   d_o.get(), dq, dq + part, dq + 2 * part, space.get()};
  const double flops = 2.0 * static_cast<double>(seq * seq) * static_cast<double>(dim * kHeads * batch);
  std::printf("S %lld, d %lld, batch %lld\n", static_cast<long long>(seq), static_cast<long long>(dim),
              static_cast<long long>(batch));
  const auto time = [&](auto&& call) { return seconds(launch.stream, call); };
  const double f = time([&] { kernels::cuda::attention_forward(forward, launch); });
  print("chosen", flops, f, time([&] { kernels::cuda::attention_backward(backward, launch); }), ceiling);
  const double own = time([&] { kernels::cuda::own_attention_forward(forward, launch); });
  print("own", flops, own, time([&] { kernels::cuda::own_attention_backward(backward, launch); }), ceiling);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t longest = argc > 1 ? std::atoll(argv[1]) : 8192;
  if (tessera::cuda::device_count() == 0) {
    std::printf("no GPU: %s\n", tessera::cuda::why_none().c_str());
    return 1;
  }
  void* stream = tessera::cuda::create_stream(0, false);
  const Launch launch{stream, 1};
  const double ceiling = gemm_rate(launch, longest);
  std::printf("%s\nbf16 GEMM %lld^3: %.1f TFLOP/s\n", tessera::cuda::describe(0).c_str(),
              static_cast<long long>(longest), ceiling);
  for (const std::int64_t dim : {64, 128}) {
    for (std::int64_t seq = longest / 8; seq <= longest; seq *= 2)
      measure(seq, dim, std::max<std::int64_t>(longest / seq / 2, 1), launch, ceiling);
  }
  tessera::cuda::destroy_stream(stream);
}
