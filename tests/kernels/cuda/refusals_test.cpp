/// Libraries that refuse: what is computed then, and what is said of it.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/api/attention.hpp"
#include "kernels/api/backends.hpp"
#include "kernels/api/gemm.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"
#include "tests/kernels/cuda/random_values.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include "emulator.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::random;

constexpr std::int64_t kM = 24, kN = 32, kK = 16;

struct Computed {
  std::vector<bfloat16> c, pre;
  std::vector<float> weight, sums;
};

/// fc1 of a layer, and the gradient of a weight with that of its bias.
Computed compute() {
  const DeviceStream stream;
  const DeviceBuffer<bfloat16> a(stream, random<bfloat16>(kM * kK, 1)),
      b(stream, random<bfloat16>(kK * kN, 2)), bias(stream, random<bfloat16>(kN, 3)),
      c(stream, random<bfloat16>(kM * kN, 4)), pre(stream, random<bfloat16>(kM * kN, 5));
  cuda::gemm({.a = a.data(),
              .b = b.data(),
              .c = c.data(),
              .bias = bias.data(),
              .pre = pre.data(),
              .m = kM,
              .n = kN,
              .k = kK,
              .lda = kK,
              .ldb = kN,
              .ldc = kN,
              .ab_dtype = DType::bf16,
              .c_dtype = DType::bf16,
              .epilogue = Epilogue::gelu_tanh},
             stream.launch());
  const DeviceBuffer<float> weight(stream, random<float>(kK * kN, 6)), sums(stream, random<float>(kK, 7)),
      scratch(stream, std::vector<float>(kReduceParts * kK));
  cuda::gemm({.a = a.data(),
              .b = c.data(),
              .c = weight.data(),
              .column_sums = sums.data(),
              .sums_scratch = scratch.data(),
              .m = kK,
              .n = kN,
              .k = kM,
              .lda = kK,
              .ldb = kN,
              .ldc = kN,
              .trans_a = true,
              .ab_dtype = DType::bf16,
              .c_dtype = DType::f32,
              .beta = 1.0f,
              .sums_beta = 1.0f},
             stream.launch());
  return {c.host(), pre.host(), weight.host(), sums.host()};
}

TEST(CudaRefusals, AProductIsComputedAnotherWayAndItIsSaidOnce) {
  cuda::take_gemm_note();
  const Computed plain = compute();
  EXPECT_EQ(cuda::take_gemm_note(), "");
  tessera_emulator::plant_gemm_refusals(2);
  const Computed refused = compute();
  const std::string note = cuda::take_gemm_note();
  for (const char* part :
       {"with bias, with gelu and its input", "with column sums", "refused it when it was to run"})
    EXPECT_NE(note.find(part), std::string::npos) << note;
  tessera_emulator::plant_gemm_refusals(2);
  compute();
  EXPECT_EQ(cuda::take_gemm_note(), "") << "said already";
  ASSERT_EQ(plain.c.size(), refused.c.size());
  for (std::size_t i = 0; i < plain.c.size(); ++i) {
    ASSERT_NEAR(static_cast<float>(plain.c[i]), static_cast<float>(refused.c[i]), 0.02f) << i;
    ASSERT_NEAR(static_cast<float>(plain.pre[i]), static_cast<float>(refused.pre[i]), 0.02f) << i;
  }
  for (std::size_t i = 0; i < plain.weight.size(); ++i)
    ASSERT_NEAR(plain.weight[i], refused.weight[i], 0.2f) << i;
  for (std::size_t i = 0; i < plain.sums.size(); ++i) ASSERT_NEAR(plain.sums[i], refused.sums[i], 1e-3f) << i;
}

AttentionShape shape_of(DType dtype) {
  AttentionShape s;
  s.batch = 2;
  s.seq_q = s.seq_k = 16;
  s.heads = s.kv_heads = 2;
  s.head_dim = 136;  // too wide for the fused kernel
  s.dtype = dtype;
  s.q_stride = s.k_stride = s.v_stride =
      s.o_stride = {s.batch * s.heads * s.head_dim, s.heads * s.head_dim, s.head_dim};
  s.seq_length = 16;
  s.total_heads = 2;
  return s;
}

TEST(CudaRefusals, SlowAttentionIsSaidOnceOrRefused) {
  // Said here, or already by a test before in this process.
  std::string note = cuda::take_attention_note();
  AttentionShape shape = shape_of(DType::bf16);
  cuda::attention_forward_workspace(shape, 0);
  cuda::attention_backward_workspace(shape, 0);
  note += cuda::take_attention_note();
  EXPECT_NE(note.find("the emulator has no cuDNN"), std::string::npos) << note;
  EXPECT_EQ(note.find("the emulator has no cuDNN"), note.rfind("the emulator has no cuDNN")) << note;
  cuda::attention_forward_workspace(shape, 0);
  cuda::attention_forward_workspace(shape_of(DType::f32), 0);
  EXPECT_EQ(cuda::take_attention_note(), "") << "said already, or expected";
  shape.dropout = 0.1f;
  cuda::attention_forward_workspace(shape, 0);
  EXPECT_NE((note + cuda::take_attention_note()).find("dropout on attention"), std::string::npos);
  shape.fast_only = true;
  try {
    cuda::attention_backward_workspace(shape, 0);
    ADD_FAILURE() << "it was not refused";
  } catch (const DeviceError& error) {
    const std::string message = error.what();
    for (const char* part :
         {"device.require_fast_attention", "backward", "2 x 2 heads", "dropout on attention"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace tessera::kernels
#endif
