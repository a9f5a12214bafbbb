/// Gradients of residual + dropout + norm.
///
/// Input gradient: one pass, the row in registers between its two sums and its result (up to 8192 columns;
/// longer rows are read again from cache). Weight gradient: tiles of 64 columns x parts of the rows, each
/// summed in a fixed order, then the parts in theirs; x and dy are read once, the scratch is at most
/// kNormGradParts rows. Both together: the pass of the input gradient, by as many blocks as run at once; each
/// keeps the sums of its rows in registers and leaves them in its part of the scratch.

#include "kernels/cuda/norm.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;

/// What the rows so far bring to the weight and bias of a thread's columns.
template <typename Values>
struct WeightSums {
  Values dweight = {}, dbias = {};
};

template <typename R, typename T, typename Team, bool kWhole>
struct NormGradRow {
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

  /// normalised = (x - mean) * rstd, scaled = weight * dy, above = dresidual or 0; all reads first. Adds the
  /// row to `sums`, if any.
  __device__ __forceinline__ void read_row(int base, Values& normalised, Values& scaled, Values& above,
                                           WeightSums<Values>* sums) const {
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
        if (sums != nullptr) {
          sums->dweight[k][j] += scaled[k][j] * normalised[k][j];
          sums->dbias[k][j] += scaled[k][j];
        }
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

  /// With `sums` the row fits into registers.
  __device__ __forceinline__ void differentiate(float* shared, WeightSums<Values>* sums = nullptr) const {
    Values normalised, scaled, above;
    float total = 0.0f, dot = 0.0f;
    for (int base = 0; base < cols; base += Team::span()) {
      read_row(base, normalised, scaled, above, sums);
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
      if (sums == nullptr && cols > Team::span()) read_row(base, normalised, scaled, above, nullptr);
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
    NormGradRow<R, T, Team, kWhole>(p, r).differentiate(shared);
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

constexpr int kSumColumns = 32, kSumThreads = 16;  // columns of a block; threads that share a column

/// Adds the parts up: blockIdx.y is 0 for dweight, 1 for dbias.
__global__ void __launch_bounds__(kSumColumns* kSumThreads)
    weight_grad_columns(const NormWeightGrad p, int parts) {
  __shared__ float sums[kSumThreads][kSumColumns];
  const int column = static_cast<int>(threadIdx.x), share = static_cast<int>(threadIdx.y);
  const std::int64_t i = std::int64_t{blockIdx.x} * kSumColumns + column;
  float total = 0.0f;
  if (i < p.cols) {
    const float* const part_sums = p.scratch + blockIdx.y * p.cols + i;
#pragma unroll 4
    for (int part = share; part < parts; part += kSumThreads) total += part_sums[2 * part * p.cols];
  }
  sums[share][column] = total;
  __syncthreads();
  if (share != 0 || i >= p.cols) return;
  for (int other = 1; other < kSumThreads; ++other) total += sums[other][column];
  float* const out = (blockIdx.y == 0 ? p.dweight : p.dbias) + i;
  *out = p.beta != 0.0f ? p.beta * *out + total : total;
}

void add_parts(const NormWeightGrad& params, int parts, const Launch& where) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.cols, std::int64_t{kSumColumns})),
                  params.dbias != nullptr ? 2 : 1);
  launch(weight_grad_columns, grid, dim3(kSumColumns, kSumThreads), 0, where, params, parts);
}

// ---- Both together ----

constexpr int kPassWarpElements = 24;  // of a row in one of its warp's threads, beside their sums
constexpr int kPassWarpBlocks = 2, kPassThreads = 512;  // that a multiprocessor has registers for at once

/// Sums of the block's rows into scratch[blockIdx.x]. Where each warp has rows of its own, the warps add up
/// in their order.
template <bool kBlock, typename Team>
__device__ __forceinline__ void leave_sums(const WeightSums<typename Team::Values>& own,
                                           const NormWeightGrad& p) {
  const int cols = static_cast<int>(p.cols);
  float* const dweight = p.scratch + std::int64_t{2} * blockIdx.x * p.cols;
  float* const dbias = dweight + cols;
  if constexpr (kBlock) {
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      write<true>(dweight, Team::column(0, k), cols, own.dweight[k]);
      write<true>(dbias, Team::column(0, k), cols, own.dbias[k]);
    }
  } else {
    __shared__ float sums[2][kWarp * kPassWarpElements];
    for (int warp = 0; warp < kNormWarps; ++warp) {
      if (static_cast<int>(threadIdx.x) / kWarp == warp) {
#pragma unroll
        for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
          for (int j = 0; j < Team::kWidth; ++j) {
            const int i = Team::column(0, k) + j;
            sums[0][i] = (warp == 0 ? 0.0f : sums[0][i]) + own.dweight[k][j];
            sums[1][i] = (warp == 0 ? 0.0f : sums[1][i]) + own.dbias[k][j];
          }
        }
      }
      __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < cols; i += kNormWarps * kWarp) {
      dweight[i] = sums[0][i];
      dbias[i] = sums[1][i];
    }
  }
}

template <typename R, typename T, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : kNormWarps* kWarp,
                                  kBlock ? kPassThreads / kMaxThreads : kPassWarpBlocks)
    norm_gradients_kernel(const AddNormGradients p) {
  __shared__ float shared[kWarp];
  using Team = RowTeam<R, T, kBlock, kBlock ? kNormBlockElements : kPassWarpElements>;
  WeightSums<typename Team::Values> sums;
  for (std::int64_t r = Team::first_row(); r < p.input.rows; r += Team::row_step()) {
    NormGradRow<R, T, Team, true>(p.input, r).differentiate(shared, &sums);
  }
  leave_sums<kBlock, Team>(sums, p.weight);
}

/// Blocks and threads of norm_gradients_kernel: no more blocks than the GPU runs at once. No threads for rows
/// that no block's registers hold.
struct GradientsGrid {
  int blocks = 0, threads = 0;
  bool by_warp = false;
};
GradientsGrid gradients_grid(std::int64_t rows, std::int64_t cols) {
  GradientsGrid grid;
  if (cols > std::int64_t{kMaxThreads} * kNormBlockElements) return grid;
  grid.by_warp = cols <= kWarp * kPassWarpElements;
  grid.threads = grid.by_warp
                     ? kNormWarps * kWarp
                     : static_cast<int>(ceil_div(cols, std::int64_t{kNormBlockElements} * kWarp)) * kWarp;
  const int at_once =
      multiprocessors() * (grid.by_warp ? kPassWarpBlocks : std::max(1, kPassThreads / grid.threads));
  grid.blocks = static_cast<int>(
      std::min<std::int64_t>(at_once, ceil_div(rows, std::int64_t{grid.by_warp ? kNormWarps : 1})));
  return grid;
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
  add_parts(params, parts, where);
}

int norm_gradient_parts(std::int64_t rows, std::int64_t cols) {
  return std::max(kNormGradParts, gradients_grid(rows, cols).blocks);  // rows may turn out to be misaligned
}

void add_norm_gradients(const AddNormGradients& params, const Launch& where) {
  const GradientsGrid grid = gradients_grid(params.input.rows, params.input.cols);
  bool one_pass = false;
  visit_floats(params.input.residual_dtype, params.input.dtype, "norm", [&](auto r, auto t) {
    using R = decltype(r);
    using T = decltype(t);
    one_pass = grid.threads != 0 && in_whole_packs<R, T>(params.input);
    if (!one_pass) return;
    launch(grid.by_warp ? norm_gradients_kernel<R, T, false> : norm_gradients_kernel<R, T, true>,
           dim3(static_cast<unsigned>(grid.blocks)), dim3(static_cast<unsigned>(grid.threads)), 0, where,
           params);
  });
  if (one_pass) return add_parts(params.weight, grid.blocks, where);
  add_norm_backward(params.input, where);
  norm_weight_grad(params.weight, where);
}

TESSERA_KERNEL_FILE(weight_grad_columns);

}  // namespace tessera::kernels::cuda
