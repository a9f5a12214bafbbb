#include "kernels/cuda/attention_own.hpp"

#include <algorithm>

#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/gemm.hpp"

namespace tessera::kernels::cuda {
namespace {

/// A matrix for every (sample, KV head, member of its group) of a block: the first one, the elements between
/// its rows and between matrices.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t ld = 0;
  std::int64_t batch = 0, kv = 0, member = 0;

  /// This operand, `elements` further on.
  Operand shifted(std::int64_t elements) const {
    Operand other = *this;
    other.data = static_cast<const char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
    return other;
  }
};

/// C = alpha op(A) op(B) + beta C for every matrix of a block.
struct Product {
  Operand a, b, c;
  std::int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;
  float alpha = 1.0f, beta = 0.0f;
};

/// One direction in which a product repeats.
struct Axis {
  std::int64_t count, a, b, c;
};

/// As few calls as one stride per operand allows: directions that continue each other become one.
void multiply(const Product& p, std::int64_t batch, std::int64_t kv, std::int64_t members,
              const Launch& launch) {
  const Axis given[] = {{members, p.a.member, p.b.member, p.c.member},
                        {kv, p.a.kv, p.b.kv, p.c.kv},
                        {batch, p.a.batch, p.b.batch, p.c.batch}};
  Axis axes[3] = {{1, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}};
  int used = 0;
  for (const Axis& axis : given) {
    if (axis.count == 1) continue;
    if (used > 0) {
      Axis& inner = axes[used - 1];
      if (axis.a == inner.count * inner.a && axis.b == inner.count * inner.b &&
          axis.c == inner.count * inner.c) {
        inner.count *= axis.count;
        continue;
      }
    }
    axes[used++] = axis;
  }
  std::sort(axes, axes + 3, [](const Axis& x, const Axis& y) { return x.count > y.count; });
  BatchedGemm call;
  call.m = p.m, call.n = p.n, call.k = p.k;
  call.lda = p.a.ld, call.ldb = p.b.ld, call.ldc = p.c.ld;
  call.trans_a = p.trans_a, call.trans_b = p.trans_b;
  call.ab_dtype = p.a.dtype, call.c_dtype = p.c.dtype;
  call.alpha = p.alpha, call.beta = p.beta;
  call.batch = axes[0].count;
  call.stride_a = axes[0].a, call.stride_b = axes[0].b, call.stride_c = axes[0].c;
  for (std::int64_t i = 0; i < axes[1].count; ++i) {
    for (std::int64_t j = 0; j < axes[2].count; ++j) {
      call.a = p.a.shifted(i * axes[1].a + j * axes[2].a).data;
      call.b = p.b.shifted(i * axes[1].b + j * axes[2].b).data;
      call.c = const_cast<void*>(p.c.shifted(i * axes[1].c + j * axes[2].c).data);
      batched_gemm(call, launch);
    }
  }
}

/// The operands of a block's products. A single query per head makes products of one row: then the heads of a
/// group, which read the same keys, become the rows.
class Operands {
 public:
  Operands(const AttentionShape& shape, const ScoreBlock& block)
      : shape_(shape), block_(block), grouped_(block.rows == 1) {}

  std::int64_t rows() const { return grouped_ ? block_.members : block_.rows; }
  std::int64_t members() const { return grouped_ ? 1 : block_.members; }

  /// The block's queries, or what is laid out like them.
  Operand queries(const void* data, const HeadStrides& stride) const {
    const std::int64_t group = shape_.heads / shape_.kv_heads;
    Operand x{data,         shape_.dtype,        grouped_ ? stride.head : stride.seq,
              stride.batch, group * stride.head, stride.head};
    return x.shifted(block_.row0 * stride.seq + block_.batch0 * stride.batch +
                     (block_.kv0 * group + block_.member0) * stride.head);
  }
  /// The block's keys or values.
  Operand keys(const void* data, const HeadStrides& stride) const {
    Operand x{data, shape_.dtype, stride.seq, stride.batch, stride.head, 0};
    return x.shifted(block_.batch0 * stride.batch + block_.kv0 * stride.head);
  }
  /// Score matrices in fp32, or in a narrower dtype where softmax.hpp leaves that.
  Operand scores(const float* data, DType dtype) const {
    const std::int64_t row = block_.row_stride * static_cast<std::int64_t>(sizeof(float) / size_of(dtype));
    const std::int64_t matrix = block_.rows * row;
    return {data, dtype, row, block_.kv * block_.members * matrix, block_.members * matrix, matrix};
  }

  /// [rows, keys] = alpha x y^T, x per query, y per key.
  void scores_of(const Operand& x, const Operand& y, float alpha, float* scores, const Launch& launch) const {
    Product p{x, y, this->scores(scores, DType::f32), rows(), block_.keys, shape_.head_dim};
    p.trans_b = true, p.alpha = alpha;
    multiply(p, block_.batch, block_.kv, members(), launch);
  }
  /// x = alpha weights y, x per query, y per key.
  void sum_over_keys(const float* weights, const Operand& y, float alpha, const Operand& x,
                     const Launch& launch) const {
    Product p{scores(weights, shape_.dtype), y, x, rows(), shape_.head_dim, block_.keys};
    p.alpha = alpha;
    multiply(p, block_.batch, block_.kv, members(), launch);
  }
  /// y = alpha weights^T x, summed over the members; `add` to what y holds.
  void sum_over_queries(const float* weights, const Operand& x, float alpha, const Operand& y, bool add,
                        const Launch& launch) const {
    Product p{scores(weights, shape_.dtype), x, y, block_.keys, shape_.head_dim, rows()};
    p.trans_a = true, p.alpha = alpha;
    for (std::int64_t member = 0; member < members(); ++member) {
      Product one = p;
      one.a = p.a.shifted(member * p.a.member);
      one.b = p.b.shifted(member * p.b.member);
      one.beta = add || member > 0 ? 1.0f : 0.0f;
      multiply(one, block_.batch, block_.kv, 1, launch);
    }
  }

 private:
  const AttentionShape& shape_;
  const ScoreBlock& block_;
  bool grouped_;
};

/// Rows of `heads` heads: [batch, heads, seq, head_dim] sums, or zeros without any, into a strided array.
struct Rounding {
  const float* sums;
  HeadStrides stride;
  std::int64_t heads, seq, head_dim, count;  // count of elements
};

template <typename T>
__global__ void round_sums(Rounding p, T* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t n = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < p.count; n += step) {
    const std::int64_t column = n % p.head_dim, row = n / p.head_dim;
    const std::int64_t matrix = row / p.seq;
    const std::int64_t offset =
        row % p.seq * p.stride.seq + matrix / p.heads * p.stride.batch + matrix % p.heads * p.stride.head;
    to[offset + column] = from_float<T>(p.sums ? p.sums[n] : 0.0f);
  }
}

/// `target` is where the first matrix of p goes.
void round_to(const Operand& target, const Rounding& p, const Launch& where) {
  visit_float(target.dtype, "attention", [&](auto type) {
    using T = decltype(type);
    const std::int64_t blocks =
        std::min<std::int64_t>(ceil_div(p.count, std::int64_t{256}), std::int64_t{64} * multiprocessors());
    launch(round_sums<T>, dim3(static_cast<unsigned>(blocks)), dim3(256), 0, where, p,
           static_cast<T*>(const_cast<void*>(target.data)));
  });
}

/// Zeros in all heads of an array of `seq` positions.
void clear(const AttentionShape& shape, void* data, const HeadStrides& stride, std::int64_t heads,
           std::int64_t seq, const Launch& launch) {
  round_to({data, shape.dtype},
           {nullptr, stride, heads, seq, shape.head_dim, shape.batch * heads * seq * shape.head_dim}, launch);
}

struct ForwardScratch {
  KeyRange* ranges;
  float* scores;

  ForwardScratch(DeviceArena& arena, const AttentionShape& shape, const AttentionBlocks& blocks)
      : ranges(arena.take<KeyRange>(shape.batch * shape.seq_q)), scores(arena.take(blocks.score_floats())) {}
};

struct BackwardScratch {
  KeyRange* ranges;
  float *scores, *gradients, *dk, *dv;

  BackwardScratch(DeviceArena& arena, const AttentionShape& shape, const AttentionBlocks& blocks)
      : ranges(arena.take<KeyRange>(shape.batch * shape.seq_q)),
        scores(arena.take(blocks.score_floats())),
        gradients(arena.take(blocks.score_floats())),
        dk(arena.take(blocks.sum_floats(shape))),
        dv(arena.take(blocks.sum_floats(shape))) {}
};

/// dK or dV of a box: the output itself, or sums that are rounded into it afterwards.
Operand kv_gradient(const AttentionShape& shape, const AttentionBlocks& blocks, const ScoreBlock& box,
                    const Operand& output, const float* sums) {
  if (!blocks.sums) return output;
  const std::int64_t matrix = shape.seq_k * shape.head_dim;
  return {sums, DType::f32, shape.head_dim, box.kv * matrix, matrix, 0};
}

void backward_box(const AttentionBackward& call, const AttentionBlocks& blocks,
                  const BackwardScratch& scratch, const ScoreBlock& box, const Launch& launch) {
  const AttentionShape& shape = call.shape;
  const float kept = 1.0f / (1.0f - shape.dropout);
  const Operands kv_side(shape, box);
  const Operand dk_out = kv_side.keys(call.dk, shape.k_stride),
                dv_out = kv_side.keys(call.dv, shape.v_stride);
  const Operand dk = kv_gradient(shape, blocks, box, dk_out, scratch.dk);
  const Operand dv = kv_gradient(shape, blocks, box, dv_out, scratch.dv);
  bool add = false;
  blocks.for_each_block(shape, box, [&](ScoreBlock block) {
    if (!add) block.keys = shape.seq_k;  // the first block also writes the zeros of keys nobody sees
    const Operands of(shape, block);
    const Operand q = of.queries(call.q, shape.q_stride), d_o = of.queries(call.d_o, shape.o_stride);
    const Operand k = of.keys(call.k, shape.k_stride), v = of.keys(call.v, shape.v_stride);
    of.scores_of(q, k, shape.scale * kLog2E, scratch.scores, launch);
    of.scores_of(d_o, v, 1.0f, scratch.gradients, launch);
    softmax_backward(
        {shape, block, scratch.ranges, scratch.scores, scratch.gradients, call.lse, call.o, call.d_o},
        launch);
    if (shape.bias) add_bias_gradient({shape, block, scratch.gradients, call.dbias}, launch);
    of.sum_over_queries(scratch.scores, d_o, kept, dv, add, launch);
    of.sum_over_queries(scratch.gradients, q, shape.scale, dk, add, launch);
    of.sum_over_keys(scratch.gradients, k, shape.scale, of.queries(call.dq, shape.q_stride), launch);
    add = true;
  });
  if (!blocks.sums) return;
  const std::int64_t count = box.batch * box.kv * shape.seq_k * shape.head_dim;
  round_to(dk_out, {scratch.dk, shape.k_stride, box.kv, shape.seq_k, shape.head_dim, count}, launch);
  round_to(dv_out, {scratch.dv, shape.v_stride, box.kv, shape.seq_k, shape.head_dim, count}, launch);
}

}  // namespace

std::size_t own_attention_forward_workspace(const AttentionShape& shape, std::size_t block_bytes) {
  DeviceArena arena(nullptr);
  ForwardScratch(arena, shape, AttentionBlocks(shape, 1, block_bytes));
  return arena.bytes();
}

std::size_t own_attention_backward_workspace(const AttentionShape& shape, std::size_t block_bytes) {
  DeviceArena arena(nullptr);
  BackwardScratch(arena, shape, AttentionBlocks(shape, 2, block_bytes));
  return arena.bytes();
}

void own_attention_forward(const AttentionForward& call, const Launch& launch, std::size_t block_bytes) {
  const AttentionShape& shape = call.shape;
  const AttentionBlocks blocks(shape, 1, block_bytes);
  DeviceArena arena(call.workspace);
  const ForwardScratch scratch(arena, shape, blocks);
  key_ranges(shape, scratch.ranges, launch);
  if (shape.seq_k == 0) clear(shape, call.o, shape.o_stride, shape.heads, shape.seq_q, launch);
  blocks.for_each_box(shape, [&](const ScoreBlock& box) {
    blocks.for_each_block(shape, box, [&](const ScoreBlock& block) {
      const Operands of(shape, block);
      if (shape.seq_k > 0) {
        of.scores_of(of.queries(call.q, shape.q_stride), of.keys(call.k, shape.k_stride),
                     shape.scale * kLog2E, scratch.scores, launch);
      }
      softmax_forward({shape, block, scratch.ranges, scratch.scores, call.lse}, launch);
      if (shape.seq_k > 0) {
        of.sum_over_keys(scratch.scores, of.keys(call.v, shape.v_stride), 1.0f / (1.0f - shape.dropout),
                         of.queries(call.o, shape.o_stride), launch);
      }
    });
  });
}

void own_attention_backward(const AttentionBackward& call, const Launch& launch, std::size_t block_bytes) {
  const AttentionShape& shape = call.shape;
  if (shape.bias != nullptr) {
    const auto rows = static_cast<std::size_t>(std::max<std::int64_t>(shape.seq_q + shape.seq_k - 1, 0));
    check(cudaMemsetAsync(call.dbias, 0, rows * static_cast<std::size_t>(shape.heads) * sizeof(float),
                          static_cast<cudaStream_t>(launch.stream)),
          "cudaMemsetAsync");
  }
  if (shape.seq_q == 0 || shape.seq_k == 0) {
    clear(shape, call.dq, shape.q_stride, shape.heads, shape.seq_q, launch);
    clear(shape, call.dk, shape.k_stride, shape.kv_heads, shape.seq_k, launch);
    clear(shape, call.dv, shape.v_stride, shape.kv_heads, shape.seq_k, launch);
    return;
  }
  const AttentionBlocks blocks(shape, 2, block_bytes);
  DeviceArena arena(call.workspace);
  const BackwardScratch scratch(arena, shape, blocks);
  key_ranges(shape, scratch.ranges, launch);
  blocks.for_each_box(shape,
                      [&](const ScoreBlock& box) { backward_box(call, blocks, scratch, box, launch); });
}

TESSERA_KERNEL_FILE(round_sums<bfloat16>);

}  // namespace tessera::kernels::cuda
