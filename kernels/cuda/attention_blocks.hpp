#pragma once
/// How attention_own.cu cuts a call into blocks and lays out its scratch: plain host arithmetic.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/softmax.hpp"

namespace tessera::kernels::cuda {

/// Cuts a buffer into arrays; from a null buffer it only counts their bytes.
class DeviceArena {
 public:
  explicit DeviceArena(void* buffer) : base_(static_cast<char*>(buffer)) {
    if (base_) base_ += (kLine - reinterpret_cast<std::uintptr_t>(base_) % kLine) % kLine;
  }
  template <typename T = float>
  T* take(std::int64_t count) {
    char* array = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    return reinterpret_cast<T*>(array);
  }
  /// Bytes to ask for, whatever the alignment of the buffer.
  std::size_t bytes() const { return used_ + kLine; }

 private:
  static constexpr std::size_t kLine = 256;
  char* base_;
  std::size_t used_ = 0;
};

/// Sizes of the blocks of a call: a function of its shape and the bytes a block may take.
struct AttentionBlocks {
  /// Queries of a block under a causal mask: a block's products end at the last key its queries see, so that
  /// shorter blocks waste less above the diagonal, and longer ones fill the device better.
  static constexpr std::int64_t kCausalRows = 512;
  static constexpr std::int64_t kLeastRows = 16;

  std::int64_t group;                     ///< query heads of a KV head
  std::int64_t row_stride;                ///< floats between rows of scores
  std::int64_t rows, members, kv, batch;  ///< largest block
  bool sums;                              ///< whether dK and dV are summed over blocks in arrays of their own

  /// `matrices` of scores are kept at once: 1 forward, 2 backward.
  AttentionBlocks(const AttentionShape& shape, int matrices, std::size_t block_bytes)
      : group(shape.heads / std::max<std::int64_t>(shape.kv_heads, 1)),
        row_stride((shape.seq_k + 7) / 8 * 8) {
    const auto limit = static_cast<std::int64_t>(block_bytes);
    const std::int64_t row_bytes =
        std::max<std::int64_t>(row_stride, 8) * static_cast<std::int64_t>(sizeof(float)) * matrices;
    // 16-bit gradients of keys and values are rounded once; fp32 ones serve as sums themselves.
    const bool narrow = matrices == 2 && shape.dtype != DType::f32;
    const std::int64_t pair_bytes =
        narrow ? 2 * shape.seq_k * shape.head_dim * static_cast<std::int64_t>(sizeof(float)) : 0;
    const std::int64_t room = std::max<std::int64_t>(limit - pair_bytes, 0);
    const std::int64_t most = shape.causal ? std::min(shape.seq_q, kCausalRows) : shape.seq_q;
    rows = std::min(most, std::max(room / row_bytes / kLeastRows * kLeastRows, kLeastRows));
    const std::int64_t head_bytes = std::max<std::int64_t>(rows, 1) * row_bytes;
    sums = narrow && (group > 1 || rows < shape.seq_q);
    members = fitting(room / head_bytes, group);
    const std::int64_t group_bytes = members * head_bytes + (sums ? pair_bytes : 0);
    kv = members < group ? 1 : fitting(limit / group_bytes, shape.kv_heads);
    batch = kv < shape.kv_heads ? 1 : fitting(limit / (kv * group_bytes), shape.batch);
  }

  std::int64_t score_floats() const { return batch * kv * members * rows * row_stride; }
  /// Of dK's sums, and of dV's.
  std::int64_t sum_floats(const AttentionShape& shape) const {
    return sums ? batch * kv * shape.seq_k * shape.head_dim : 0;
  }

  /// Keys that the queries before `row` can see.
  static std::int64_t keys_before(const AttentionShape& shape, std::int64_t row) {
    const std::int64_t seen =
        shape.causal ? std::max<std::int64_t>(row + shape.query_offset, 1) : shape.seq_k;
    return std::min(seen, shape.seq_k);
  }

  /// Calls body(block) for boxes of samples and KV heads; members and rows are still to be set.
  template <typename Body>
  void for_each_box(const AttentionShape& shape, Body body) const {
    ScoreBlock block;
    block.row_stride = row_stride;
    for (block.batch0 = 0; block.batch0 < shape.batch; block.batch0 += batch) {
      block.batch = std::min(batch, shape.batch - block.batch0);
      for (block.kv0 = 0; block.kv0 < shape.kv_heads; block.kv0 += kv) {
        block.kv = std::min(kv, shape.kv_heads - block.kv0);
        body(block);
      }
    }
  }

  /// Calls body(block) for the blocks of a box. The last queries, which see the most keys, come first.
  template <typename Body>
  void for_each_block(const AttentionShape& shape, ScoreBlock block, Body body) const {
    for (block.member0 = 0; block.member0 < group; block.member0 += members) {
      block.members = std::min(members, group - block.member0);
      for (std::int64_t end = shape.seq_q; end > 0; end -= block.rows) {
        block.rows = std::min(rows, end);
        block.row0 = end - block.rows;
        block.keys = keys_before(shape, end);
        body(block);
      }
    }
  }

 private:
  /// As many as fit of those there are, and one at least.
  static std::int64_t fitting(std::int64_t fit, std::int64_t all) {
    return std::max<std::int64_t>(std::min(fit, all), 1);
  }
};

}  // namespace tessera::kernels::cuda
