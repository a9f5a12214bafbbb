/// Which attention goes to cuDNN, and in which pieces: decided without a device.

#include "kernels/cuda/attention_cudnn.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace tessera::kernels::cuda {
namespace {

/// An address that is never read.
template <typename T>
const T* somewhere() {
  return reinterpret_cast<const T*>(std::uintptr_t{4096});
}

AttentionShape packed_shape() {
  AttentionShape s;
  s.batch = 4;
  s.seq_q = s.seq_k = 1024;
  s.heads = 12;
  s.kv_heads = 4;
  s.head_dim = 64;
  s.dtype = DType::bf16;
  const std::int64_t row = (s.heads + 2 * s.kv_heads) * s.head_dim;
  s.q_stride = s.k_stride = s.v_stride = {s.batch * row, row, s.head_dim};
  s.o_stride = {s.batch * s.heads * s.head_dim, s.heads * s.head_dim, s.head_dim};
  return s;
}

TEST(CudnnAttention, TakesWhatItMeansAlike) {
  const AttentionShape base = packed_shape();
  EXPECT_TRUE(cudnn_means_the_same(base, 9));
  EXPECT_TRUE(cudnn_means_the_same(base, 8));
  EXPECT_FALSE(cudnn_means_the_same(base, 7));
  const auto with = [&base](auto change, int capability = 9) {
    AttentionShape s = base;
    change(s);
    return cudnn_means_the_same(s, capability);
  };
  EXPECT_TRUE(with([](AttentionShape& s) { s.causal = false; }));
  EXPECT_TRUE(with([](AttentionShape& s) { s.dtype = DType::f16; }));
  EXPECT_TRUE(with([](AttentionShape& s) { s.head_dim = 256; }));
  EXPECT_TRUE(with([](AttentionShape& s) { s.window = 30; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.window = 30, s.causal = false; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.softcap = 30.0f; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.head_dim = 256; }, 8));
  EXPECT_FALSE(with([](AttentionShape& s) { s.head_dim = 264; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.head_dim = 60; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.dtype = DType::f32; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.dropout = 0.1f; }));
  // Queries of a context rank end with the last key.
  EXPECT_TRUE(with([](AttentionShape& s) { s.seq_k += 512, s.query_offset = 512; }));
  EXPECT_TRUE(with([](AttentionShape& s) { s.seq_k += 512, s.query_offset = 512, s.window = 30; }));
  EXPECT_TRUE(with([](AttentionShape& s) { s.seq_k += 512, s.query_offset = 3, s.causal = false; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.query_offset = 1; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.seq_k += 512, s.query_offset = 511; }));
  EXPECT_FALSE(with(
      [](AttentionShape& s) { s.seq_k += 512, s.query_offset = 512, s.pages = somewhere<std::int32_t>(); }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.seq_q = 1; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.kv_heads = 5; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.k_stride.head = 68; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.o_stride.seq = 1 << 22; }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.alibi_slopes = somewhere<float>(); }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.key_begin = somewhere<std::int32_t>(); }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.key_end = somewhere<std::int32_t>(); }));
  EXPECT_FALSE(with([](AttentionShape& s) { s.document = somewhere<std::int32_t>(); }));
}

TEST(CudnnAttention, CutsBackwardToFitMemory) {
  const AttentionShape s = packed_shape();  // 25 MB a sample, 6 MB a group of heads
  const std::int64_t sample = 2 * 12 * 1024 * 1024;
  EXPECT_EQ(cudnn_score_bytes(s, {4, 4}), 4 * sample);
  EXPECT_EQ(cudnn_backward_piece(s, 4 * sample), (AttentionPiece{4, 4}));
  EXPECT_EQ(cudnn_backward_piece(s, 4 * sample - 1), (AttentionPiece{2, 4}));
  EXPECT_EQ(cudnn_backward_piece(s, 2 * sample - 1), (AttentionPiece{1, 4}));
  EXPECT_EQ(cudnn_backward_piece(s, sample - 1), (AttentionPiece{1, 2}));
  EXPECT_EQ(cudnn_backward_piece(s, sample / 2 - 1), (AttentionPiece{1, 1}));
  EXPECT_EQ(cudnn_backward_piece(s, 0), (AttentionPiece{1, 1}));
  AttentionShape odd = s;
  odd.seq_q = 65;
  odd.seq_k = 129;
  EXPECT_EQ(cudnn_score_bytes(odd, {1, 1}), 2 * 3 * 128 * 256);
}

}  // namespace
}  // namespace tessera::kernels::cuda
