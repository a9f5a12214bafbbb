/// Embedding lookup and its gradient.
///
/// The gradient of a table row sums its occurrences in rising order without scratch or atomics. Blocks share
/// out the table's rows by index modulo the number of classes: each scans the whole index list (4 bytes a
/// token from cache, at most 1024 classes x column tiles times: 16k tokens x 4096 columns scan 134 MB of L1
/// and L2, as much as dy itself), keeps its own occurrences in shared memory, sorts them by (table row,
/// token) and walks them with kBatch rows of dy in flight. dy is read once; a touched table row is read and
/// written once per kList occurrences of its class. The slowest block is that of the most frequent token,
/// by estimate 0.1 us an occurrence.

#include "kernels/api/embedding.hpp"

#include "kernels/api/elementwise.hpp"
#include "kernels/cuda/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// ---- Forward ----

/// blockDim.y rows at a time, blockDim.x packs of each.
template <typename T, typename Y, bool kWhole>
__global__ void __launch_bounds__(kThreads) embedding_forward_kernel(const EmbeddingForward p) {
  constexpr int N = kColumns<T, Y>;
  const int cols = static_cast<int>(p.cols), step = static_cast<int>(blockDim.x) * N;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  for (std::int64_t r = first; r < p.rows; r += std::int64_t{gridDim.x} * blockDim.y) {
    const std::int64_t token = p.tokens[r] - p.vocab_begin;
    const bool owned = token >= 0 && token < p.vocab_size;
    const T* const word = static_cast<const T*>(p.table) + (owned ? token : 0) * p.cols;
    const T* position = nullptr;
    if (owned && p.position_table != nullptr) {
      position = static_cast<const T*>(p.position_table) + p.positions[r] * p.cols;
    }
    Y* const y = static_cast<Y*>(p.y) + r * p.cols;
    for (int i = static_cast<int>(threadIdx.x) * N; i < cols; i += step) {
      float x[N] = {}, add[N] = {};
      if (owned) read<kWhole>(word, i, cols, x);
      if (position != nullptr) read<kWhole>(position, i, cols, add);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] += add[j];
      if (p.dropout.active()) RowDropout(p.dropout, r, p.cols).apply(i, x);
      write<kWhole>(y, i, cols, x);
    }
  }
}

template <typename T, typename Y>
void forward(const EmbeddingForward& p, const Launch& where) {
  constexpr int N = kColumns<T, Y>;
  const bool whole = in_packs<N>(static_cast<const T*>(p.table), p.cols) &&
                     in_packs<N>(static_cast<const T*>(p.position_table), p.cols) &&
                     in_packs<N>(static_cast<const Y*>(p.y), p.cols);
  const auto warps = ceil_div(p.cols, std::int64_t{N} * kWarp);
  const auto width = static_cast<unsigned>(std::clamp<std::int64_t>(warps * kWarp, kWarp, kThreads));
  const dim3 block(width, kThreads / width);
  const auto blocks = std::min<std::int64_t>(ceil_div(p.rows, std::int64_t{block.y}), 0x7fffffff);
  launch(whole ? embedding_forward_kernel<T, Y, true> : embedding_forward_kernel<T, Y, false>,
         dim3(static_cast<unsigned>(blocks)), block, 0, where, p);
}

// ---- Backward ----

constexpr int kWidth = 4;       // columns of a thread: one Philox block
constexpr int kBatch = 8;       // occurrences whose rows are in flight together
constexpr int kChunk = 1024;    // tokens scanned at once
constexpr int kList = 2048;     // occurrences in shared memory: a power of two
constexpr int kClasses = 1024;  // at most; a power of two
constexpr std::uint64_t kNone = ~std::uint64_t{0};

/// The occurrences of the block's class, (index / classes) << 32 | token.
struct Occurrences {
  std::uint64_t keys[kList];
  int counts[kThreads / kWarp];
};

/// Appends the occurrences among tokens [begin, begin + kChunk) to the list of `size`; returns its new size.
__device__ __forceinline__ int scan(const EmbeddingBackward& p, std::int64_t begin, int class_bits, int size,
                                    Occurrences& list) {
  const int warps = static_cast<int>(blockDim.x) / kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t own_class = blockIdx.x;
  for (int done = 0; done < kChunk; done += static_cast<int>(blockDim.x)) {
    const std::int64_t r = begin + done + threadIdx.x;
    const std::int64_t index =
        done + static_cast<int>(threadIdx.x) < kChunk && r < p.rows ? p.index[r] : p.skip;
    const std::int64_t row = index - p.begin;
    const bool mine = index != p.skip && row >= 0 && row < p.count &&
                      (row & ((std::int64_t{1} << class_bits) - 1)) == own_class;
    const unsigned ballot = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) list.counts[warp] = __popc(ballot);
    __syncthreads();
    int at = size + __popc(ballot & ((1u << lane) - 1u));
    for (int w = 0; w < warps; ++w) {
      if (w < warp) at += list.counts[w];
      size += list.counts[w];
    }
    if (mine) {
      list.keys[at] = static_cast<std::uint64_t>(row >> class_bits) << 32 | static_cast<std::uint32_t>(r);
    }
    __syncthreads();
  }
  return size;
}

/// Sorts the first `size` keys (bitonic; the keys differ, so there is one order).
__device__ __forceinline__ void sort(int size, Occurrences& list) {
  int padded = 2;
  while (padded < size) padded *= 2;
  for (int i = size + static_cast<int>(threadIdx.x); i < padded; i += static_cast<int>(blockDim.x)) {
    list.keys[i] = kNone;
  }
  __syncthreads();
  for (int run = 2; run <= padded; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int k = static_cast<int>(threadIdx.x); k < padded / 2; k += static_cast<int>(blockDim.x)) {
        const int low = 2 * k - (k & (step - 1)), high = low + step;
        const std::uint64_t a = list.keys[low], b = list.keys[high];
        if ((a > b) == ((low & run) == 0)) {
          list.keys[low] = b;
          list.keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

/// Adds the listed occurrences to the thread's columns of the table, each table row's in rising order.
template <typename T, bool kWhole>
__device__ __forceinline__ void add(const EmbeddingBackward& p, int i, int class_bits, int size,
                                    const Occurrences& list) {
  const int cols = static_cast<int>(p.cols);
  const auto row_of = [&](int k) { return static_cast<std::int64_t>(list.keys[k] >> 32); };
  const auto out_of = [&](int k) { return p.dtable + ((row_of(k) << class_bits) + blockIdx.x) * p.cols; };
  float sum[kWidth] = {};
  for (int begin = 0; begin < size; begin += kBatch) {
    float dy[kBatch][kWidth], before[kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // No branch stands between these reads. What is read behind the end or of a sum under way is not used,
      // and the table rows of a list differ: none of them waits for a sum that is not written yet.
      const int k = min(begin + b, size - 1);
      const std::int64_t r = static_cast<std::uint32_t>(list.keys[k]);
      read<kWhole>(static_cast<const T*>(p.dy) + r * p.cols, i, cols, dy[b]);
      read<kWhole>(out_of(k), i, cols, before[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int k = begin + b;
      if (k >= size) continue;
      const std::int64_t r = static_cast<std::uint32_t>(list.keys[k]);
      if (p.dropout.active()) RowDropout(p.dropout, r, p.cols).apply(i, dy[b]);
      const bool first = k == 0 || row_of(k) != row_of(k - 1);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] = (first ? before[b][j] : sum[j]) + dy[b][j];
      if (k + 1 == size || row_of(k + 1) != row_of(k)) write<kWhole>(out_of(k), i, cols, sum);
    }
  }
}

/// blockIdx.x is the class, blockIdx.y the tile of blockDim.x * kWidth columns.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(const EmbeddingBackward p, int class_bits) {
  __shared__ Occurrences list;
  const int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  int size = 0;
  for (std::int64_t begin = 0; begin < p.rows; begin += kChunk) {
    size = scan(p, begin, class_bits, size, list);
    if (size + kChunk <= kList && begin + kChunk < p.rows) continue;
    sort(size, list);
    if (i < p.cols) add<T, kWhole>(p, i, class_bits, size, list);
    __syncthreads();
    size = 0;
  }
}

/// Enough classes to fill the GPU, but with some 32 tokens each and not more than the table has rows.
int class_bits_for(const EmbeddingBackward& p) {
  int bits = 0;
  while ((2 << bits) <= kClasses && (std::int64_t{64} << bits) <= p.rows && (1 << bits) < p.count) ++bits;
  return bits;
}

}  // namespace

void embedding_forward(const EmbeddingForward& params, const Launch& where) {
  visit_floats(params.table_dtype, params.y_dtype, "embedding",
               [&](auto t, auto y) { forward<decltype(t), decltype(y)>(params, where); });
}

void embedding_backward(const EmbeddingBackward& params, const Launch& where) {
  if (params.beta == 0.0f) {
    fill_zero(
        {.bytes = params.count * params.cols * static_cast<std::int64_t>(sizeof(float)), .x = params.dtable},
        where);
  }
  if (params.rows == 0) return;
  const int class_bits = class_bits_for(params);
  const auto packs = ceil_div(params.cols, std::int64_t{kWidth});
  const auto tiles = ceil_div(packs, std::int64_t{kThreads});
  const auto threads = tiles == 0 ? 0 : ceil_div(ceil_div(packs, tiles), std::int64_t{kWarp}) * kWarp;
  const dim3 grid(1u << class_bits, static_cast<unsigned>(tiles));
  visit_float(params.dy_dtype, "gradient of an embedding", [&](auto t) {
    using T = decltype(t);
    const bool whole = in_packs<kWidth>(static_cast<const T*>(params.dy), params.cols) &&
                       in_packs<kWidth>(params.dtable, params.cols);
    launch(whole ? embedding_backward_kernel<T, true> : embedding_backward_kernel<T, false>, grid,
           dim3(static_cast<unsigned>(threads)), 0, where, params, class_bits);
  });
}

TESSERA_KERNEL_FILE(embedding_forward_kernel<float, float, true>);

}  // namespace tessera::kernels::cuda
