#include "kernels/cuda/softmax_rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using namespace attention;

/// Sum over a row's features of o * d_o: what its probabilities' gradients have in common.
template <typename T, int Threads>
__device__ float delta_of(const AttentionShape& shape, const Row& row, const T* o, const T* d_o) {
  const HeadStrides& stride = shape.o_stride;
  const std::int64_t offset = row.query * stride.seq + row.batch * stride.batch + row.head * stride.head;
  float sum = 0.0f;
  for (std::int64_t c = Team<Threads>::lane(); c < shape.head_dim; c += Threads)
    sum += to_float(o[offset + c]) * to_float(d_o[offset + c]);
  return Team<Threads>::sum(sum);
}

/// p: scores to probabilities, after dropout; g: their gradients to those of the scores.
__device__ void score_gradients(const Rows& rows, const Row& row, std::int64_t key, float lse, float delta,
                                float (&p)[kUnit], float (&g)[kUnit]) {
  const unsigned keep = kept(rows, row, key);
  const float scale = 1.0f / (1.0f - rows.shape.dropout);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const bool seen = key + i >= row.keys.begin && key + i < row.keys.end, stays = (keep >> i & 1u) != 0;
    const float probability = seen ? exp2f(p[i] - lse) : 0.0f;
    const float capped = row.cap != 0.0f ? p[i] / row.cap : 0.0f;  // whose cap's slope is 1 - its square
    p[i] = stays ? probability : 0.0f;
    g[i] = seen ? probability * ((stays ? g[i] * scale : 0.0f) - delta) * (1.0f - capped * capped) : 0.0f;
  }
}

template <typename T, int Threads>
__global__ void __launch_bounds__(Team<Threads>::kBlock)
    softmax_gradient(Rows rows, float* scores, float* gradients, const float* lse, const T* o, const T* d_o) {
  using Team = Team<Threads>;
  constexpr int kUnits = 2;  // of either matrix in flight
  const std::int64_t number = Team::row();
  if (number >= rows.block.matrices() * rows.block.rows) return;
  const Row row(rows, number);
  scores += number * rows.block.row_stride;
  gradients += number * rows.block.row_stride;
  const float delta = delta_of<T, Threads>(rows.shape, row, o, d_o);
  const float row_lse = lse[row.statistic(rows.shape)] * kLog2E;
  for (std::int64_t key0 = 0; key0 < rows.block.keys; key0 += Threads * kUnits * kUnit) {
    const auto key_of = [key0](int unit) { return key0 + (unit * Threads + Team::lane()) * kUnit; };
    float p[kUnits][kUnit], g[kUnits][kUnit];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_scores(row, scores, key_of(u), p[u]);
      if (row.touches(key_of(u))) load(gradients + key_of(u), g[u]);
    }
    // As in softmax_streamed.
    if constexpr (sizeof(T) < sizeof(float)) Team::synchronize();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (key_of(u) >= rows.block.keys) continue;
      if (row.touches(key_of(u))) {
        score_gradients(rows, row, key_of(u), row_lse, delta, p[u], g[u]);
      } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) p[u][i] = g[u][i] = 0.0f;
      }
      store(reinterpret_cast<T*>(scores) + key_of(u), p[u]);
      store(reinterpret_cast<T*>(gradients) + key_of(u), g[u]);
    }
  }
}

}  // namespace

void softmax_backward(const SoftmaxBackward& params, const Launch& where) {
  visit_float(params.shape.dtype, "attention", [&](auto type) {
    using T = decltype(type);
    const Rows rows(params.shape, params.block, params.ranges);
    const auto start = [&](auto kernel, int threads, int rows_per_block) {
      launch(kernel, dim3(blocks_of(params.block, rows_per_block)), dim3(static_cast<unsigned>(threads)), 0,
             where, rows, params.scores, params.gradients, params.lse, static_cast<const T*>(params.o),
             static_cast<const T*>(params.d_o));
    };
    if (params.block.keys <= kWarpKeys)
      return start(softmax_gradient<T, kWarp>, Team<kWarp>::kBlock, Team<kWarp>::kRows);
    start(softmax_gradient<T, kBlockThreads>, kBlockThreads, 1);
  });
}

TESSERA_KERNEL_FILE(softmax_gradient<float, kWarp>);

}  // namespace tessera::kernels::cuda
