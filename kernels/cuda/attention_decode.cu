/// One query of each sample against many keys, which lie in pages or a stride apart (Dao et al.,
/// "Flash-Decoding"). A block takes a stretch of kStretch keys of one KV head for the query heads that read
/// it: scores, their softmax, and the sum of the values, all in fp32. A second kernel joins the stretches in
/// their order. Stretches begin at multiples of kStretch, so that a sample's result depends on its own keys
/// alone.

#include "kernels/cuda/attention_decode.hpp"

#include <algorithm>

#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kStretch = 128;  ///< keys of a block, and its threads
constexpr int kWarps = kStretch / kWarp;
constexpr int kPage = static_cast<int>(kCachePage);
constexpr int kPages = kStretch / kPage;
static_assert(kStretch == kPages * kPage);
constexpr int kWidest = 256;     ///< head_dim
constexpr int kMostMembers = 8;  ///< query heads of a block
constexpr int kLeastBlocks = 3;  ///< a multiprocessor has room for: 168 registers a thread

/// What a stretch gives for a query head: its largest score in units of log 2, and the sum of weights
/// relative to that. Without any visible key the sum is 0.
struct Statistic {
  float top, sum;
};

struct Decoding {
  AttentionForward call;
  std::int64_t stretches;
  float* sums;            ///< [batch, heads, stretches, head_dim]
  Statistic* statistics;  ///< [batch, heads, stretches]
};

/// The keys [begin, end) of a stretch that the query of sample `batch` sees, counted from its first one.
struct Seen {
  int begin, end;

  __device__ Seen(const AttentionShape& s, std::int64_t batch, std::int64_t first) {
    const std::int64_t position = s.query_offset;
    std::int64_t low = s.key_begin ? s.key_begin[batch] : 0, high = s.key_end ? s.key_end[batch] : s.seq_k;
    high = high < s.seq_k ? high : s.seq_k;
    if (s.causal && position + 1 < high) high = position + 1;
    if (s.window > 0 && position + 1 - s.window > low) low = position + 1 - s.window;
    low = low > first ? low - first : 0;
    high = high - first < kStretch ? high - first : kStretch;
    begin = static_cast<int>(low < kStretch ? low : kStretch);
    end = static_cast<int>(high);
  }
};

/// Where the rows of a stretch lie, page by page.
template <typename T>
struct StretchRows {
  const T* page[kPages];
  std::int64_t stride;

  __device__ StretchRows(const AttentionShape& s, const void* base, const HeadStrides& strides,
                         std::int64_t each, std::int64_t batch, std::int64_t kv, std::int64_t first,
                         const Seen& seen)
      : stride(strides.seq) {
    const T* const head = static_cast<const T*>(base) + kv * strides.head;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      page[i] = nullptr;
      if (seen.begin >= (i + 1) * kPage || seen.end <= i * kPage) continue;  // nobody reads it
      const std::int64_t number = first / kPage + i;
      page[i] = s.pages ? head + s.pages[batch * s.page_entries + number] * each
                        : head + batch * strides.batch + number * kPage * strides.seq;
    }
  }
  __device__ const T* row(int key) const {
    const T* from = page[0];
#pragma unroll
    for (int i = 1; i < kPages; ++i) from = key >= i * kPage ? page[i] : from;
    return from + key % kPage * stride;
  }
};

/// The scores of one key with `Members` queries: x[m] += q[m] . k.
template <typename T, int Pack, int Members>
__device__ __forceinline__ void add_products(const float (&q)[Members][kWidest], const T* k, int head_dim,
                                             float (&x)[Members]) {
#pragma unroll 4
  for (int c = 0; c < head_dim; c += Pack) {
    float values[Pack];
    load(k + c, values);
#pragma unroll
    for (int m = 0; m < Members; ++m) {
#pragma unroll
      for (int i = 0; i < Pack; ++i) x[m] += q[m][c + i] * values[i];
    }
  }
}

/// Scores of a row become weights; what the whole row has of them is returned, the same in every lane of the
/// warp.
__device__ Statistic softmax_of_stretch(float (&scores)[kStretch]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kStretch; i += kWarp) top = fmaxf(top, scores[i + lane]);
  top = warp_max(top);
  const float reference = top == -INFINITY ? 0.0f : top;
#pragma unroll
  for (int i = 0; i < kStretch; i += kWarp) {
    const float weight = exp2f(scores[i + lane] - reference);
    scores[i + lane] = weight;
    sum += weight;
  }
  return {top, warp_sum(sum)};
}

/// A block for a stretch of a sample (x), a KV head and `Members` of the query heads that read it (y).
/// head_dim is a multiple of Pack, and so is where rows begin.
template <typename T, int Pack, int Members>
__global__ void __launch_bounds__(kStretch, kLeastBlocks) decode_stretch(const Decoding p) {
  __shared__ __align__(16) float q[Members][kWidest];
  __shared__ float weights[Members][kStretch];
  __shared__ float parts[kStretch * Pack];
  const AttentionShape& s = p.call.shape;
  const int thread = static_cast<int>(threadIdx.x), head_dim = static_cast<int>(s.head_dim);
  const std::int64_t stretch = blockIdx.x % p.stretches, batch = blockIdx.x / p.stretches;
  const std::int64_t kv = blockIdx.y % s.kv_heads, group = s.heads / s.kv_heads;
  const std::int64_t member0 = blockIdx.y / s.kv_heads * Members, head0 = kv * group + member0;
  const int members = static_cast<int>(group - member0 < Members ? group - member0 : Members);
  const auto row_of = [&](int m) { return (batch * s.heads + head0 + m) * p.stretches + stretch; };
  const std::int64_t first = stretch * kStretch;
  const Seen seen(s, batch, first);
  if (seen.begin >= seen.end) {
    if (thread < members) p.statistics[row_of(thread)] = {-INFINITY, 0.0f};
    return;
  }
  for (int n = thread; n < Members * head_dim; n += kStretch) {
    const int m = n / head_dim, c = n % head_dim;
    const T* const from =
        static_cast<const T*>(p.call.q) + batch * s.q_stride.batch + (head0 + m) * s.q_stride.head;
    q[m][c] = m < members ? to_float(from[c]) * (s.scale * kLog2E) : 0.0f;
  }
  __syncthreads();

  // A thread for a key.
  float x[Members];
#pragma unroll
  for (int m = 0; m < Members; ++m) x[m] = 0.0f;
  const bool sees = thread >= seen.begin && thread < seen.end;
  if (sees) {
    const StretchRows<T> keys(s, p.call.k, s.k_stride, s.k_page, batch, kv, first, seen);
    add_products<T, Pack>(q, keys.row(thread), head_dim, x);
  }
  const float cap = s.softcap * kLog2E, distance = static_cast<float>(first + thread - s.query_offset);
#pragma unroll
  for (int m = 0; m < Members; ++m) {
    if (cap != 0.0f) x[m] = cap * tanhf(x[m] / cap);
    if (s.alibi_slopes && m < members) x[m] += s.alibi_slopes[head0 + m] * kLog2E * distance;
    weights[m][thread] = sees ? x[m] : -INFINITY;
  }
  __syncthreads();
  for (int m = thread / kWarp; m < members; m += kWarps) {
    const Statistic statistic = softmax_of_stretch(weights[m]);
    if (thread % kWarp == 0) p.statistics[row_of(m)] = statistic;
  }
  __syncthreads();

  // A thread for a pack of columns and every so many keys.
  const StretchRows<T> values(s, p.call.v, s.v_stride, s.v_page, batch, kv, first, seen);
  int lanes = 1;
  while (lanes < kStretch && lanes * Pack < head_dim) lanes *= 2;
  const int teams = kStretch / lanes, team = thread / lanes;
  for (int column0 = 0; column0 < head_dim; column0 += lanes * Pack) {
    const int column = column0 + thread % lanes * Pack;
    float sum[Members][Pack];
#pragma unroll
    for (int m = 0; m < Members; ++m) {
#pragma unroll
      for (int i = 0; i < Pack; ++i) sum[m][i] = 0.0f;
    }
    if (column < head_dim) {
#pragma unroll 4
      for (int key = seen.begin + team; key < seen.end; key += teams) {
        float value[Pack];
        load(values.row(key) + column, value);
#pragma unroll
        for (int m = 0; m < Members; ++m) {
#pragma unroll
          for (int i = 0; i < Pack; ++i) sum[m][i] += weights[m][key] * value[i];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Members; ++m) {
      if (m >= members) break;
#pragma unroll
      for (int i = 0; i < Pack; ++i) parts[thread * Pack + i] = sum[m][i];
      __syncthreads();
      for (int c = thread; c < lanes * Pack && column0 + c < head_dim; c += kStretch) {
        float total = 0.0f;
        for (int t = 0; t < teams; ++t) total += parts[t * lanes * Pack + c];
        p.sums[row_of(m) * head_dim + column0 + c] = total;
      }
      __syncthreads();
    }
  }
}

/// A block for a query head of a sample, a thread for a column.
template <typename T>
__global__ void __launch_bounds__(kWidest) join_stretches(const Decoding p) {
  __shared__ float shared[kWarp];
  const AttentionShape& s = p.call.shape;
  const std::int64_t row = blockIdx.x, batch = row / s.heads, head = row % s.heads;
  const int column = static_cast<int>(threadIdx.x);
  const Statistic* const statistics = p.statistics + row * p.stretches;
  float top = -INFINITY;
  for (std::int64_t i = column; i < p.stretches; i += blockDim.x) top = fmaxf(top, statistics[i].top);
  top = block_max(top, shared);
  const float reference = top == -INFINITY ? 0.0f : top;
  const bool own = column < s.head_dim;
  float sum = 0.0f, x = 0.0f;
#pragma unroll 4
  for (std::int64_t i = 0; i < p.stretches; ++i) {
    const Statistic each = statistics[i];
    if (each.sum == 0.0f) continue;  // nothing was written of it
    const float factor = exp2f(each.top - reference);
    sum += each.sum * factor;
    if (own) x += p.sums[(row * p.stretches + i) * s.head_dim + column] * factor;
  }
  if (p.call.lse && column == 0) p.call.lse[row] = sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
  if (!own) return;
  T* const o = static_cast<T*>(p.call.o) + batch * s.o_stride.batch + head * s.o_stride.head;
  o[column] = from_float<T>(sum == 0.0f ? 0.0f : x / sum);
}

/// Whether every row of keys and values is whole packs of 16 bytes.
bool has_packs(const AttentionForward& call) {
  const AttentionShape& s = call.shape;
  const std::int64_t pack = 16 / static_cast<std::int64_t>(size_of(s.dtype));
  bool fits = s.head_dim % pack == 0 && is_aligned(call.k, 16) && is_aligned(call.v, 16);
  for (const HeadStrides* x : {&s.k_stride, &s.v_stride})
    fits = fits && x->seq % pack == 0 && x->head % pack == 0 && x->batch % pack == 0;
  return fits && s.k_page % pack == 0 && s.v_page % pack == 0;
}

Decoding decoding_of(const AttentionForward& call, DeviceArena& arena) {
  const AttentionShape& s = call.shape;
  Decoding p{call, ceil_div(s.seq_k, std::int64_t{kStretch}), nullptr, nullptr};
  const std::int64_t rows = s.batch * s.heads * p.stretches;
  p.sums = arena.take(rows * s.head_dim);
  p.statistics = arena.take<Statistic>(rows);
  return p;
}

template <typename T, int Pack>
void start_stretches(const Decoding& p, const Launch& where) {
  const AttentionShape& s = p.call.shape;
  const std::int64_t group = s.heads / s.kv_heads;
  const auto start = [&](auto kernel, int members) {
    const dim3 grid(static_cast<unsigned>(p.stretches * s.batch),
                    static_cast<unsigned>(s.kv_heads * ceil_div(group, std::int64_t{members})));
    launch(kernel, grid, dim3(kStretch), 0, where, p);
  };
  if (group == 1) return start(decode_stretch<T, Pack, 1>, 1);
  if (group == 2) return start(decode_stretch<T, Pack, 2>, 2);
  if (group <= 4) return start(decode_stretch<T, Pack, 4>, 4);
  start(decode_stretch<T, Pack, kMostMembers>, kMostMembers);
}

/// Keys and values [batch, kv_heads, seq_k, head_dim] out of their pages.
struct Gathering {
  AttentionShape shape;
  const void *k, *v;
  void *to_k, *to_v;
};

/// A block for a key of a sample and a KV head.
template <typename T>
__global__ void __launch_bounds__(kStretch) gather_pages_kernel(const Gathering p) {
  const AttentionShape& s = p.shape;
  const std::int64_t key = blockIdx.x % s.seq_k, row = blockIdx.x / s.seq_k;
  const std::int64_t batch = row / s.kv_heads, kv = row % s.kv_heads;
  const bool there = s.key_end == nullptr || key < s.key_end[batch];
  const std::int64_t page = there ? s.pages[batch * s.page_entries + key / kPage] : 0, at = key % kPage;
  const T* const k =
      static_cast<const T*>(p.k) + page * s.k_page + kv * s.k_stride.head + at * s.k_stride.seq;
  const T* const v =
      static_cast<const T*>(p.v) + page * s.v_page + kv * s.v_stride.head + at * s.v_stride.seq;
  const std::int64_t to = (row * s.seq_k + key) * s.head_dim;
  for (std::int64_t c = threadIdx.x; c < s.head_dim; c += blockDim.x) {
    static_cast<T*>(p.to_k)[to + c] = there ? k[c] : T{};
    static_cast<T*>(p.to_v)[to + c] = there ? v[c] : T{};
  }
}

/// Bytes of keys, or of values, in whole lines.
std::size_t gathered_side(const AttentionShape& s) {
  const std::int64_t elements = s.batch * s.kv_heads * s.seq_k * s.head_dim;
  return ceil_div(static_cast<std::size_t>(elements) * size_of(s.dtype), std::size_t{256}) * 256;
}

}  // namespace

bool decodes(const AttentionShape& s) {
  return s.seq_q == 1 && s.head_dim <= kWidest && s.dropout == 0.0f && s.bias == nullptr &&
         s.document == nullptr && s.kv_heads > 0;
}

std::size_t decode_attention_workspace(const AttentionShape& shape) {
  AttentionForward call;
  call.shape = shape;
  DeviceArena arena(nullptr);
  decoding_of(call, arena);
  return arena.bytes();
}

void decode_attention(const AttentionForward& call, const Launch& where) {
  DeviceArena arena(call.workspace);
  const Decoding p = decoding_of(call, arena);
  const AttentionShape& s = call.shape;
  visit_float(s.dtype, "attention", [&](auto type) {
    using T = decltype(type);
    if (has_packs(call)) {
      start_stretches<T, kPack<T>>(p, where);
    } else {
      start_stretches<T, 1>(p, where);
    }
    const auto threads =
        static_cast<unsigned>(ceil_div(std::max<std::int64_t>(s.head_dim, 1), std::int64_t{kWarp}) * kWarp);
    launch(join_stretches<T>, dim3(static_cast<unsigned>(s.batch * s.heads)), dim3(threads), 0, where, p);
  });
}

AttentionShape gathered_shape(const AttentionShape& shape) {
  AttentionShape s = shape;
  s.pages = nullptr;
  s.k_stride = s.v_stride = {s.head_dim, s.kv_heads * s.seq_k * s.head_dim, s.seq_k * s.head_dim};
  return s;
}

std::size_t gathered_bytes(const AttentionShape& shape) { return 2 * gathered_side(shape); }

AttentionForward gather_pages(const AttentionForward& call, const Launch& where) {
  const AttentionShape& s = call.shape;
  char* const space = static_cast<char*>(call.workspace);
  const Gathering p{s, call.k, call.v, space, space + gathered_side(s)};
  const dim3 grid(static_cast<unsigned>(s.batch * s.kv_heads * s.seq_k));
  const auto threads = static_cast<unsigned>(
      std::clamp<std::int64_t>(ceil_div(s.head_dim, std::int64_t{kWarp}) * kWarp, kWarp, kStretch));
  if (size_of(s.dtype) == 4) {
    launch(gather_pages_kernel<std::uint32_t>, grid, dim3(threads), 0, where, p);
  } else {
    launch(gather_pages_kernel<std::uint16_t>, grid, dim3(threads), 0, where, p);
  }
  AttentionForward apart = call;
  apart.shape = gathered_shape(s);
  apart.k = p.to_k, apart.v = p.to_v;
  apart.workspace = space + gathered_bytes(s);
  return apart;
}

TESSERA_KERNEL_FILE(join_stretches<bfloat16>);

}  // namespace tessera::kernels::cuda
