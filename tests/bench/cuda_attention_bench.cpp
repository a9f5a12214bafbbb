/// Causal attention of CUDA device 0 in bf16 at the four shapes of docs/performance.md: by cuDNN, backward in
/// a fixed order and in any (device.deterministic), by our fused kernels, without and with dropout, and with
/// scores in memory, beside the device's GEMM rate. FLOPs are counted over the causal half: forward 4 S^2/2 d
/// a head, backward 2.5 times that. Ends with 1 where cuDNN does not take one of them. Usage:
/// cuda_attention_bench [text that a shape's name must contain]

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "cuda_bench.hpp"
#include "kernels/api/attention.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_fused.hpp"
#include "kernels/cuda/attention_own.hpp"

namespace tessera::bench {
namespace {

using kernels::AttentionShape;

struct Case {
  const char* name;
  int64_t seq, batch, heads, kv_heads, head_dim;
};

/// A micro-batch of each model there.
constexpr Case kCases[] = {{"GPT-2 124M, 1024", 1024, 64, 12, 12, 64},
                           {"GPT-2 XL, 1024", 1024, 16, 25, 25, 64},
                           {"LLaMA-7B, 4096", 4096, 2, 32, 32, 128},
                           {"LLaMA3-8B, 8192", 8192, 1, 32, 8, 128}};

/// Heads packed as a layer's product leaves them: [seq, batch, q k v].
AttentionShape shape_of(const Case& c) {
  const int64_t row = (c.heads + 2 * c.kv_heads) * c.head_dim;
  AttentionShape s;
  s.batch = c.batch;
  s.seq_q = s.seq_k = c.seq;
  s.heads = c.heads;
  s.kv_heads = c.kv_heads;
  s.head_dim = c.head_dim;
  s.dtype = DType::bf16;
  s.q_stride = s.k_stride = s.v_stride = {c.batch * row, row, c.head_dim};
  s.o_stride = {c.batch * c.heads * c.head_dim, c.heads * c.head_dim, c.head_dim};
  s.scale = 0.1f;
  s.total_heads = c.heads;
  s.seq_length = c.seq;
  return s;
}

double gemm_flops_s(const Gpu& gpu, int64_t size) {
  const Random a(gpu, DType::bf16, size * size), b(gpu, DType::bf16, size * size);
  const Memory c(static_cast<std::size_t>(size * size) * 2);
  kernels::Gemm call;
  call.a = a.data(), call.b = b.data(), call.c = c.data();
  call.m = call.n = call.k = call.lda = call.ldb = call.ldc = size;
  call.ab_dtype = call.c_dtype = DType::bf16;
  const auto n = static_cast<double>(size);
  return 2.0 * n * n * n / gpu.median([] {}, [&] { kernels::cuda::gemm(call, gpu.launch()); });
}

void row(const char* name, double flops, double seconds, double ceiling) {
  std::printf("  %-30s %9.3f ms %7.1f TFLOP/s %4.0f %% of GEMM\n", name, 1e3 * seconds,
              1e-12 * flops / seconds, 1e2 * flops / seconds / ceiling);
}

/// False if cuDNN does not take it.
bool measure(const Gpu& gpu, const Case& c, double ceiling) {
  const AttentionShape s = shape_of(c);
  AttentionShape any_order = s;
  any_order.deterministic = false;
  bool taken = true;
  for (const AttentionShape* shape : {&s, static_cast<const AttentionShape*>(&any_order)}) {
    for (const bool backward : {false, true}) {
      const std::string why = kernels::cuda::cudnn_refusal(*shape, backward);
      if (why.empty()) continue;
      std::printf("  FAILED   cuDNN does not take %s%s: %s\n", backward ? "backward of " : "", c.name,
                  why.c_str());
      taken = false;
    }
  }

  const int64_t tokens = c.seq * c.batch, row_size = (c.heads + 2 * c.kv_heads) * c.head_dim;
  const Random qkv(gpu, DType::bf16, tokens * row_size), d_o(gpu, DType::bf16, tokens * c.heads * c.head_dim);
  const Memory d_qkv(static_cast<std::size_t>(tokens * row_size) * 2),
      o(static_cast<std::size_t>(tokens * c.heads * c.head_dim) * 2),
      lse(static_cast<std::size_t>(tokens * c.heads) * sizeof(float));
  const Memory space(std::max({kernels::cuda::attention_forward_workspace(s, 0),
                               kernels::cuda::attention_backward_workspace(s, 0),
                               kernels::cuda::attention_backward_workspace(any_order, 0),
                               kernels::cuda::fused_attention_backward_workspace(s),
                               kernels::cuda::own_attention_forward_workspace(s),
                               kernels::cuda::own_attention_backward_workspace(s)}));
  const auto* q = static_cast<const bfloat16*>(qkv.data());
  auto* dq = static_cast<bfloat16*>(d_qkv.data());
  const int64_t k_at = c.heads * c.head_dim, v_at = k_at + c.kv_heads * c.head_dim;
  const kernels::AttentionForward forward{s, q, q + k_at, q + v_at, o.data(), lse.floats(), space.data()};
  const kernels::AttentionBackward backward{s,          q,  q + k_at,  q + v_at,  o.data(),    lse.floats(),
                                            d_o.data(), dq, dq + k_at, dq + v_at, space.data()};
  kernels::AttentionBackward loose = backward;
  loose.shape = any_order;
  const double flops =
      2.0 * static_cast<double>(c.seq * c.seq) * static_cast<double>(c.head_dim * c.heads * c.batch);
  const auto time = [&](auto&& call) { return gpu.median([] {}, call); };
  const kernels::Launch launch = gpu.launch();
  std::printf("%s, batch %lld, %lld heads of %lld\n", c.name, static_cast<long long>(c.batch),
              static_cast<long long>(c.heads), static_cast<long long>(c.head_dim));
  row("forward", flops, time([&] { kernels::cuda::attention_forward(forward, launch); }), ceiling);
  row("backward", 2.5 * flops, time([&] { kernels::cuda::attention_backward(backward, launch); }), ceiling);
  row("backward, any order", 2.5 * flops, time([&] { kernels::cuda::attention_backward(loose, launch); }),
      ceiling);
  const auto own = [&](const char* f, const char* b, auto&& run_forward, auto&& run_backward, float dropout) {
    kernels::AttentionForward one = forward;
    kernels::AttentionBackward other = backward;
    one.shape.dropout = other.shape.dropout = dropout;
    row(f, flops, time([&] { run_forward(one, launch); }), ceiling);
    row(b, 2.5 * flops, time([&] { run_backward(other, launch); }), ceiling);
  };
  using namespace kernels::cuda;
  own("fused forward", "fused backward", fused_attention_forward, fused_attention_backward, 0.0f);
  own("fused forward, dropout", "fused backward, dropout", fused_attention_forward, fused_attention_backward,
      0.1f);
  own(
      "scores in memory, forward", "scores in memory, backward",
      [](const auto& params, const auto& on) { own_attention_forward(params, on); },
      [](const auto& params, const auto& on) { own_attention_backward(params, on); }, 0.0f);
  return taken;
}

int run(const char* wanted) {
  const Gpu gpu;
  const double ceiling = gemm_flops_s(gpu, 8192);
  std::printf("%s\nbf16 GEMM 8192^3: %.1f TFLOP/s\n", cuda::describe(0).c_str(), 1e-12 * ceiling);
  bool taken = true;
  for (const Case& c : kCases) {
    if (std::strstr(c.name, wanted) != nullptr) taken = measure(gpu, c, ceiling) && taken;
    std::fflush(stdout);
  }
  return taken ? 0 : 1;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  if (tessera::cuda::device_count() == 0) {
    std::printf("no GPU: %s\n", tessera::cuda::why_none().c_str());
    return 1;
  }
  try {
    return tessera::bench::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
