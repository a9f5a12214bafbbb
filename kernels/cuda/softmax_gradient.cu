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
    p[i] = stays ? probability : 0.0f;
    g[i] = seen ? probability * ((stays ? g[i] * scale : 0.0f) - delta) : 0.0f;
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

constexpr int kDiagonals = 32, kRowsAtOnce = 8;

/// Sums along the diagonals of a head's score matrices. Neighbouring threads take neighbouring diagonals: in
/// a row these are neighbouring keys.
template <typename T>
__global__ void __launch_bounds__(kDiagonals* kRowsAtOnce) bias_gradient(BiasGradient p) {
  __shared__ float sums[kRowsAtOnce][kDiagonals + 1];
  const AttentionShape& shape = p.shape;
  const ScoreBlock& block = p.block;
  const int lane = static_cast<int>(threadIdx.x), turn = static_cast<int>(threadIdx.y);
  const std::int64_t diagonal = std::int64_t{blockIdx.x} * kDiagonals + lane;
  const std::int64_t kv = blockIdx.y / block.members, member = blockIdx.y % block.members;
  const std::int64_t row_stride = block.row_stride * static_cast<std::int64_t>(sizeof(float) / sizeof(T));
  float sum = 0.0f;
  for (std::int64_t n = turn; n < block.batch * block.rows; n += kRowsAtOnce) {
    const std::int64_t batch = n / block.rows, row = n % block.rows;
    const std::int64_t key = block.row0 + row + shape.seq_k - 1 - diagonal;
    if (key < 0 || key >= block.keys) continue;
    const std::int64_t matrix = (batch * block.kv + kv) * block.members + member;
    sum += to_float(reinterpret_cast<const T*>(p.gradients)[(matrix * block.rows + row) * row_stride + key]);
  }
  sums[turn][lane] = sum;
  __syncthreads();
  if (turn > 0 || diagonal >= shape.seq_q + shape.seq_k - 1) return;
  for (int other = 1; other < kRowsAtOnce; ++other) sum += sums[other][lane];
  const std::int64_t head = (block.kv0 + kv) * (shape.heads / shape.kv_heads) + block.member0 + member;
  p.dbias[diagonal * shape.heads + head] += sum;
}

}  // namespace

void add_bias_gradient(const BiasGradient& params, const Launch& where) {
  visit_float(params.shape.dtype, "attention", [&](auto type) {
    using T = decltype(type);
    const std::int64_t diagonals = params.shape.seq_q + params.shape.seq_k - 1;
    const dim3 grid(static_cast<unsigned>(ceil_div(diagonals, std::int64_t{kDiagonals})),
                    static_cast<unsigned>(params.block.kv * params.block.members));
    launch(bias_gradient<T>, grid, dim3(kDiagonals, kRowsAtOnce), 0, where, params);
  });
}

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
