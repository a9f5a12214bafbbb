/// Gradients of residual + dropout + norm.
///
/// Input gradient: one pass, the row in registers between its two sums and its result (up to 8192 columns;
/// longer rows are read again from cache). Weight gradient: tiles of 64 columns x parts of the rows, each
/// summed in a fixed order, then the parts in theirs; x and dy are read once, the scratch is at most
/// kNormGradParts rows.

#include "kernels/cuda/norm.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;

template <typename R, typename T, bool kBlock, bool kWhole>
struct NormGradRow {
  using Team = RowTeam<R, T, kBlock>;
  using Values = typename Team::Values;

  const AddNormBackward& p;
  const std::int64_t r;
  const int cols;
  float mean = 0.0f;
  const float rstd;

  __device__ NormGradRow(const AddNormBackward& params, std::int64_t row)
      : p(params), r(row), cols(static_cast<int>(params.cols)), rstd(params.rstd[row]) {
    if (p.kind == NormKind::layer) mean = p.mean[r];
  }

  /// normalised = (x - mean) * rstd, scaled = weight * dy, above = dresidual or 0; all reads first.
  __device__ __forceinline__ void read_row(int base, Values& normalised, Values& scaled,
                                           Values& above) const {
    const R* const from_above = static_cast<const R*>(p.dresidual);
    Team::template read_all<kWhole>(static_cast<const R*>(p.residual_out) + r * cols, base, cols, normalised);
    Team::template read_all<kWhole>(static_cast<const T*>(p.dy) + r * cols, base, cols, scaled);
    if (from_above != nullptr) {
      Team::template read_all<kWhole>(from_above + r * cols, base, cols, above);
    } else {
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
        for (int j = 0; j < Team::kWidth; ++j) above[k][j] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      float weight[Team::kWidth];
      read<kWhole>(p.weight, Team::column(base, k), cols, weight);
#pragma unroll
      for (int j = 0; j < Team::kWidth; ++j) {
        normalised[k][j] = (normalised[k][j] - mean) * rstd;
        scaled[k][j] *= weight[j];
      }
    }
  }

  /// Writes dresidual_in and dbranch; `total` and `dot` are the means of scaled and scaled * normalised.
  __device__ __forceinline__ void write_row(int base, const Values& normalised, const Values& scaled,
                                            const Values& above, float total, float dot) const {
    R* const dx = static_cast<R*>(p.dresidual_in) + r * cols;
    T* const dbranch = p.dbranch != nullptr ? static_cast<T*>(p.dbranch) + r * cols : nullptr;
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      const int i = Team::column(base, k);
      float g[Team::kWidth];
#pragma unroll
      for (int j = 0; j < Team::kWidth; ++j) {
        g[j] = (scaled[k][j] - total - normalised[k][j] * dot) * rstd + above[k][j];
      }
      write<kWhole>(dx, i, cols, g);
      if (dbranch == nullptr) continue;
      if (p.dropout.active()) RowDropout(p.dropout, r, cols).apply(i, g);
      write<kWhole>(dbranch, i, cols, g);
    }
  }

  __device__ __forceinline__ void differentiate(float* shared) const {
    Values normalised, scaled, above;
    float total = 0.0f, dot = 0.0f;
    for (int base = 0; base < cols; base += Team::span()) {
      read_row(base, normalised, scaled, above);
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
        for (int j = 0; j < Team::kWidth; ++j) {
          total += scaled[k][j];
          dot += scaled[k][j] * normalised[k][j];
        }
      }
    }
    const float over_cols = 1.0f / static_cast<float>(cols);
    dot = Team::sum(dot, shared) * over_cols;
    total = p.kind == NormKind::layer ? Team::sum(total, shared) * over_cols : 0.0f;
    for (int base = 0; base < cols; base += Team::span()) {
      if (cols > Team::span()) read_row(base, normalised, scaled, above);
      write_row(base, normalised, scaled, above, total, dot);
    }
  }
};

template <typename R, typename T, bool kBlock, bool kWhole>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : kNormWarps* kWarp)
    norm_backward_kernel(const AddNormBackward p) {
  __shared__ float shared[kWarp];
  using Team = RowTeam<R, T, kBlock>;
  for (std::int64_t r = Team::first_row(); r < p.rows; r += Team::row_step()) {
    NormGradRow<R, T, kBlock, kWhole>(p, r).differentiate(shared);
  }
}

template <typename R, typename T>
bool in_whole_packs(const AddNormBackward& p) {
  constexpr int N = kColumns<R, T>;
  return in_packs<N>(static_cast<const R*>(p.residual_out), p.cols) &&
         in_packs<N>(static_cast<const R*>(p.dresidual), p.cols) &&
         in_packs<N>(static_cast<const R*>(p.dresidual_in), p.cols) &&
         in_packs<N>(static_cast<const T*>(p.dy), p.cols) &&
         in_packs<N>(static_cast<const T*>(p.dbranch), p.cols) && in_packs<N>(p.weight, p.cols);
}

// ---- Weight gradient ----

constexpr int kTile =
    64;  // columns: 128 bytes of 16-bit rows; narrow, so that few columns still fill the GPU
constexpr int kTileThreads = 256;

template <typename R, typename T>
constexpr int kTileRows = kTileThreads / (kTile / kColumns<R, T>);  // rows of a tile that are added at once

/// Sums one part of the rows for one tile of columns into scratch[part].
template <typename R, typename T, bool kWhole>
__global__ void __launch_bounds__(kTileThreads) weight_grad_part(const NormWeightGrad p) {
  constexpr int N = kColumns<R, T>, kLanes = kTile / N, kRows = kTileRows<R, T>;
  [[maybe_unused]] constexpr int kInFlight = 16 / N;  // rows
  __shared__ float sums[2][kRows][kTile];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, own_row = thread / kLanes;
  const int tile = static_cast<int>(blockIdx.x) * kTile, i = tile + lane * N, cols = static_cast<int>(p.cols);
  const std::int64_t part = blockIdx.y, parts = gridDim.y, end = p.rows * (part + 1) / parts;
  float dweight[N] = {}, dbias[N] = {};
#pragma unroll kInFlight
  for (std::int64_t r = p.rows * part / parts + own_row; r < end; r += kRows) {
    float x[N], dy[N];
    read<kWhole>(static_cast<const R*>(p.residual_out) + r * p.cols, i, cols, x);
    read<kWhole>(static_cast<const T*>(p.dy) + r * p.cols, i, cols, dy);
    const float mean = p.kind == NormKind::layer ? p.mean[r] : 0.0f, rstd = p.rstd[r];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      dweight[j] += dy[j] * ((x[j] - mean) * rstd);
      dbias[j] += dy[j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    sums[0][own_row][lane * N + j] = dweight[j];
    sums[1][own_row][lane * N + j] = dbias[j];
  }
  __syncthreads();
  const int which = thread / kTile, column = thread % kTile;
  if (which > 1 || tile + column >= cols) return;
  float total = 0.0f;
  for (int row = 0; row < kRows; ++row) total += sums[which][row][column];
  p.scratch[(2 * part + which) * p.cols + tile + column] = total;
}

/// Adds the parts up: blockIdx.y is 0 for dweight, 1 for dbias.
__global__ void weight_grad_columns(const NormWeightGrad p, int parts) {
  const std::int64_t column = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= p.cols) return;
  float* const out = (blockIdx.y == 0 ? p.dweight : p.dbias) + column;
  const float* const sums = p.scratch + blockIdx.y * p.cols + column;
  float total = 0.0f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) total += sums[2 * part * p.cols];
  *out = p.beta != 0.0f ? p.beta * *out + total : total;
}

}  // namespace

void add_norm_backward(const AddNormBackward& params, const Launch& where) {
  visit_floats(params.residual_dtype, params.dtype, "norm", [&](auto r, auto t) {
    using R = decltype(r);
    using T = decltype(t);
    launch_rows(params, in_whole_packs<R, T>(params), kMaxThreads, norm_backward_kernel<R, T, false, true>,
                norm_backward_kernel<R, T, true, true>, norm_backward_kernel<R, T, true, false>, where);
  });
}

void norm_weight_grad(const NormWeightGrad& params, const Launch& where) {
  int parts = 0;
  visit_floats(params.residual_dtype, params.dtype, "norm", [&](auto r, auto t) {
    using R = decltype(r);
    using T = decltype(t);
    constexpr int N = kColumns<R, T>;
    const bool whole = in_packs<N>(static_cast<const R*>(params.residual_out), params.cols) &&
                       in_packs<N>(static_cast<const T*>(params.dy), params.cols);
    parts = static_cast<int>(
        std::min<std::int64_t>(kNormGradParts, ceil_div(params.rows, std::int64_t{kTileRows<R, T>})));
    const dim3 grid(static_cast<unsigned>(ceil_div(params.cols, std::int64_t{kTile})),
                    static_cast<unsigned>(parts));
    launch(whole ? weight_grad_part<R, T, true> : weight_grad_part<R, T, false>, grid, dim3(kTileThreads), 0,
           where, params);
  });
  constexpr int kThreads = 64;
  const dim3 grid(static_cast<unsigned>(ceil_div(params.cols, std::int64_t{kThreads})),
                  params.dbias != nullptr ? 2 : 1);
  launch(weight_grad_columns, grid, dim3(kThreads), 0, where, params, parts);
}

}  // namespace tessera::kernels::cuda
