#include "kernels/cuda/softmax_rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using namespace attention;

/// Any finite number serves a row that sees nothing.
__device__ float reference_of(float top) { return top == -INFINITY ? 0.0f : top; }

__device__ void store_lse(const Rows& rows, const Row& row, float* lse, float reference, float sum) {
  if (lse) lse[row.statistic(rows.shape)] = sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
}

/// Zeroes what is masked or dropped.
template <typename T>
__device__ void store_probabilities(const Rows& rows, const Row& row, std::int64_t key, float (&p)[kUnit],
                                    T* to) {
  if (row.touches(key)) {
    const unsigned keep = kept(rows, row, key);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) p[i] = (keep >> i & 1u) != 0 ? p[i] : 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) p[i] = 0.0f;
  }
  store(to + key, p);
}

/// Rows of up to Threads * Units * kUnit keys, read once into registers.
template <typename T, int Threads, int Units>
__global__ void __launch_bounds__(Team<Threads>::kBlock)
    softmax_in_registers(Rows rows, float* scores, float* lse) {
  using Team = Team<Threads>;
  const std::int64_t number = Team::row();
  if (number >= rows.block.matrices() * rows.block.rows) return;
  const Row row(rows, number);
  scores += number * rows.block.row_stride;
  const auto key_of = [](int unit) { return std::int64_t{(unit * Threads + Team::lane()) * kUnit}; };
  float x[Units][kUnit];
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    load_scores(row, scores, key_of(u), x[u]);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) top = fmaxf(top, x[u][i]);
  }
  // From here on every thread has read what the row's owner may overwrite.
  const float reference = reference_of(Team::max(top));
#pragma unroll
  for (int u = 0; u < Units; ++u) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      x[u][i] = exp2f(x[u][i] - reference);
      sum += x[u][i];
    }
  }
  sum = Team::sum(sum);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    if (key_of(u) >= rows.block.keys) break;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[u][i] *= factor;
    store_probabilities(rows, row, key_of(u), x[u], reinterpret_cast<T*>(scores));
  }
  if (Team::lane() == 0) store_lse(rows, row, lse, reference, sum);
}

/// Rows of any length: one reading for the largest score and the sum, one to write.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) softmax_streamed(Rows rows, float* scores, float* lse) {
  using Team = Team<kBlockThreads>;
  const std::int64_t number = Team::row();
  const Row row(rows, number);
  scores += number * rows.block.row_stride;
  const std::int64_t first = std::int64_t{Team::lane()} * kUnit, step = kBlockThreads * kUnit;
  float x[kUnit];
  float top = -INFINITY, sum = 0.0f;
  for (std::int64_t key = first; key < row.keys.end; key += step) {
    load_scores(row, scores, key, x);
    const float before = top;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) top = fmaxf(top, x[i]);
    const float reference = reference_of(top);
    sum *= exp2f(before - reference);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum += exp2f(x[i] - reference);
  }
  const float reference = reference_of(Team::max(top));
  sum = Team::sum(sum * exp2f(top - reference));
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (std::int64_t key0 = 0; key0 < rows.block.keys; key0 += step) {
    load_scores(row, scores, key0 + first, x);
    // Narrower elements land where other threads of this round have just read, never where later ones will.
    if constexpr (sizeof(T) < sizeof(float)) Team::synchronize();
    if (key0 + first >= rows.block.keys) continue;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = exp2f(x[i] - reference) * factor;
    store_probabilities(rows, row, key0 + first, x, reinterpret_cast<T*>(scores));
  }
  if (Team::lane() == 0) store_lse(rows, row, lse, reference, sum);
}

/// First key of a sample, among `count`, whose document is at least `document`.
__device__ std::int32_t first_key_of(const std::int32_t* documents, std::int64_t count,
                                     std::int64_t document) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (documents[middle] < document) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<std::int32_t>(low);
}

__global__ void write_key_ranges(AttentionShape shape, KeyRange* ranges) {
  const std::int64_t count = shape.batch * shape.seq_q, step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t n = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < count; n += step) {
    const std::int64_t batch = n / shape.seq_q, position = n % shape.seq_q + shape.query_offset;
    std::int64_t begin = shape.key_begin ? shape.key_begin[batch] : 0;
    std::int64_t end = shape.key_end ? shape.key_end[batch] : shape.seq_k;
    begin = begin > 0 ? begin : 0;
    end = end < shape.seq_k ? end : shape.seq_k;
    if (shape.causal && position + 1 < end) end = position + 1;
    if (shape.window > 0 && position + 1 - shape.window > begin) begin = position + 1 - shape.window;
    if (shape.document) {
      const std::int32_t* documents = shape.document + batch * shape.seq_k;
      const std::int64_t own = documents[position];
      const std::int64_t low = first_key_of(documents, shape.seq_k, own);
      const std::int64_t high = first_key_of(documents, shape.seq_k, own + 1);
      begin = begin > low ? begin : low;
      end = end < high ? end : high;
    }
    ranges[n] = begin < end ? KeyRange{static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)}
                            : KeyRange{0, 0};
  }
}

}  // namespace

void key_ranges(const AttentionShape& shape, KeyRange* ranges, const Launch& where) {
  const std::int64_t blocks = ceil_div(shape.batch * shape.seq_q, std::int64_t{128});
  launch(write_key_ranges, dim3(static_cast<unsigned>(blocks < INT_MAX ? blocks : INT_MAX)), dim3(128), 0,
         where, shape, ranges);
}

void softmax_forward(const SoftmaxForward& params, const Launch& where) {
  visit_float(params.shape.dtype, "attention", [&](auto type) {
    using T = decltype(type);
    const Rows rows(params.shape, params.block, params.ranges);
    const auto start = [&](auto kernel, int threads, int rows_per_block) {
      launch(kernel, dim3(blocks_of(params.block, rows_per_block)), dim3(static_cast<unsigned>(threads)), 0,
             where, rows, params.scores, params.lse);
    };
    const auto warp = [&](auto kernel) { start(kernel, Team<kWarp>::kBlock, Team<kWarp>::kRows); };
    const auto block = [&](auto kernel) { start(kernel, kBlockThreads, 1); };
    const std::int64_t keys = params.block.keys;
    if (keys <= kWarpKeys / 8) return warp(softmax_in_registers<T, kWarp, 1>);
    if (keys <= kWarpKeys / 4) return warp(softmax_in_registers<T, kWarp, 2>);
    if (keys <= kWarpKeys / 2) return warp(softmax_in_registers<T, kWarp, 4>);
    if (keys <= kWarpKeys) return warp(softmax_in_registers<T, kWarp, 8>);
    if (keys <= kBlockKeys / 4) return block(softmax_in_registers<T, kBlockThreads, 2>);
    if (keys <= kBlockKeys / 2) return block(softmax_in_registers<T, kBlockThreads, 4>);
    if (keys <= kBlockKeys) return block(softmax_in_registers<T, kBlockThreads, 8>);
    block(softmax_streamed<T>);
  });
}

TESSERA_KERNEL_FILE(write_key_ranges);

}  // namespace tessera::kernels::cuda
