/// Gradients of residual + dropout + norm.
///
/// Input gradient: one pass, the row in registers between its two sums and its result (up to 8192 columns;
/// longer rows are read again from cache). Weight gradient: tiles of 64 columns x parts of the rows, each
/// summed in a fixed order, then the parts in theirs; x and dy are read once, the scratch is at most
/// kNormGradParts rows. Both together: the pass of the input gradient, by as many blocks as run at once; each
/// keeps the sums of its rows in registers, leaves them in its part of the scratch, and has the next row
/// brought to shared memory while it works on one.

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/norm.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;

template <typename R, typename T, typename Team, bool kWhole>
struct NormGradRow {
  using Values = typename Team::Values;

  const AddNormBackward& p;
  const std::int64_t r;
  const int cols;
  const float mean, rstd;

  __device__ NormGradRow(const AddNormBackward& params, std::int64_t row, float row_mean, float row_rstd)
      : p(params), r(row), cols(static_cast<int>(params.cols)), mean(row_mean), rstd(row_rstd) {}

  /// All reads before any is used; `above` is dresidual or 0.
  __device__ __forceinline__ void read_row(int base, Values& x, Values& dy, Values& above) const {
    Team::template read_all<kWhole>(static_cast<const R*>(p.residual_out) + r * cols, base, cols, x);
    Team::template read_all<kWhole>(static_cast<const T*>(p.dy) + r * cols, base, cols, dy);
    if (p.dresidual != nullptr) {
      Team::template read_all<kWhole>(static_cast<const R*>(p.dresidual) + r * cols, base, cols, above);
    } else {
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
        for (int j = 0; j < Team::kWidth; ++j) above[k][j] = 0.0f;
      }
    }
  }

  using Pack = float[Team::kWidth];

  __device__ __forceinline__ void normalise(Pack& x) const {
#pragma unroll
    for (int j = 0; j < Team::kWidth; ++j) x[j] = (x[j] - mean) * rstd;
  }
  /// dy, from column i on, becomes weight * dy.
  __device__ __forceinline__ void scale(int i, Pack& dy) const {
    Pack weight;
    read<kWhole>(p.weight, i, cols, weight);
#pragma unroll
    for (int j = 0; j < Team::kWidth; ++j) dy[j] *= weight[j];
  }

  /// Adds a pack's part of the sums of scaled and scaled * normalised.
  __device__ __forceinline__ void add(const Pack& normalised, const Pack& scaled, Pair& sums) const {
#pragma unroll
    for (int j = 0; j < Team::kWidth; ++j) {
      sums.first += scaled[j];
      sums.second += scaled[j] * normalised[j];
    }
  }

  /// Both over the row, divided by its columns; RMSNorm has no use for the first.
  __device__ __forceinline__ Pair means(Pair own, Pair* shared) const {
    const float over_cols = 1.0f / static_cast<float>(cols);
    const Pair sums = Team::sum(own, shared);
    return {p.kind == NormKind::layer ? sums.first * over_cols : 0.0f, sums.second * over_cols};
  }

  /// Writes dresidual_in and dbranch from column i on.
  __device__ __forceinline__ void write_pack(int i, const Pack& normalised, const Pack& scaled,
                                             const Pack& above, Pair means) const {
    Pack g;
#pragma unroll
    for (int j = 0; j < Team::kWidth; ++j) {
      g[j] = (scaled[j] - means.first - normalised[j] * means.second) * rstd + above[j];
    }
    write<kWhole>(static_cast<R*>(p.dresidual_in) + r * cols, i, cols, g);
    if (p.dbranch == nullptr) return;
    if (p.dropout.active()) RowDropout(p.dropout, r, cols).apply(i, g);
    write<kWhole>(static_cast<T*>(p.dbranch) + r * cols, i, cols, g);
  }

  __device__ __forceinline__ void read_and_weigh(int base, Values& normalised, Values& scaled,
                                                 Values& above) const {
    read_row(base, normalised, scaled, above);
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      normalise(normalised[k]);
      scale(Team::column(base, k), scaled[k]);
    }
  }

  __device__ __forceinline__ void differentiate(Pair* shared) const {
    Values normalised, scaled, above;
    Pair sums{};
    for (int base = 0; base < cols; base += Team::span()) {
      read_and_weigh(base, normalised, scaled, above);
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) add(normalised[k], scaled[k], sums);
    }
    sums = means(sums, shared);
    for (int base = 0; base < cols; base += Team::span()) {
      if (cols > Team::span()) read_and_weigh(base, normalised, scaled, above);
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
        write_pack(Team::column(base, k), normalised[k], scaled[k], above[k], sums);
      }
    }
  }
};

template <typename R, typename T, bool kBlock, bool kWhole>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : kNormWarps* kWarp)
    norm_backward_kernel(const AddNormBackward p) {
  __shared__ Pair shared[kWarp];
  using Team = RowTeam<R, T, kBlock>;
  for (std::int64_t r = Team::first_row(); r < p.rows; r += Team::row_step()) {
    const float mean = p.kind == NormKind::layer ? p.mean[r] : 0.0f;
    NormGradRow<R, T, Team, kWhole>(p, r, mean, p.rstd[r]).differentiate(shared);
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
constexpr int kStages = 2;                              // rows of a team in shared memory

template <typename R, typename T, bool kBlock>
using PassTeam = RowTeam<R, T, kBlock, kBlock ? kNormBlockElements : kPassWarpElements>;

/// The rows of a team: while it works on one, the next is on its way to shared memory. Each thread copies the
/// packs that it will read itself, so there is nobody to wait for.
template <typename R, typename T, typename Team>
struct RowRing {
  using Pack = float[Team::kWidth];

  const AddNormBackward& p;
  const int cols, size;  // size: elements of a stage in one of the three parts
  R* const x;
  R* const above;
  T* const dy;
  float mean = 0.0f, rstd = 0.0f;  // of the row that was fetched last
  int stage = 0;                   // that is fetched to next

  __device__ RowRing(const AddNormBackward& params, unsigned char* memory)
      : p(params),
        cols(static_cast<int>(params.cols)),
        size(static_cast<int>(blockDim.x) * Team::kElements),
        x(reinterpret_cast<R*>(memory)),
        above(x + kStages * size),
        dy(reinterpret_cast<T*>(above + kStages * size)) {}

  /// Where this thread's columns of the stage lie.
  __device__ int slot(int pack) const {
    const int teams_before = (static_cast<int>(threadIdx.x) - Team::thread()) * Team::kElements;
    return stage * size + teams_before + Team::column(0, pack);
  }

  /// Starts bringing row r; beyond the last one there is nothing to bring.
  __device__ __forceinline__ void fetch(std::int64_t r) {
    constexpr int kBytes = Team::kWidth * static_cast<int>(sizeof(R));
    constexpr int kBytesOfDy = Team::kWidth * static_cast<int>(sizeof(T));
    if (r < p.rows) {
      const R* const row = static_cast<const R*>(p.residual_out) + r * cols;
      const R* const row_above = p.dresidual != nullptr ? static_cast<const R*>(p.dresidual) + r * cols : row;
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
        const bool beyond = Team::column(0, k) >= cols;
        const int i = beyond ? 0 : Team::column(0, k), to = slot(k);
        copy_async<kBytes>(x + to, row + i, beyond);
        copy_async<kBytesOfDy>(dy + to, static_cast<const T*>(p.dy) + r * cols + i, beyond);
        copy_async<kBytes>(above + to, row_above + i, beyond || p.dresidual == nullptr);
      }
      if (p.kind == NormKind::layer) mean = p.mean[r];
      rstd = p.rstd[r];
    }
    commit_copies();
    stage = (stage + 1) % kStages;
  }

  /// Waits for the row before the one that was fetched last, which the next two read.
  __device__ __forceinline__ void await() const { await_copies<1>(); }
  __device__ __forceinline__ void read_pack(int k, Pack& to_x, Pack& to_dy) const {
    load(x + slot(k), to_x);
    load(dy + slot(k), to_dy);
  }
  __device__ __forceinline__ void read_above(int k, Pack& to) const { load(above + slot(k), to); }
};

/// What the rows so far bring to the weight and bias of a thread's columns.
template <typename Team>
struct WeightSums {
  const bool has_bias;
  typename Team::Values dweight = {}, dbias = {};

  __device__ __forceinline__ void add(int k, const float (&normalised)[Team::kWidth],
                                      const float (&dy)[Team::kWidth]) {
#pragma unroll
    for (int j = 0; j < Team::kWidth; ++j) {
      dweight[k][j] += dy[j] * normalised[j];
      if (has_bias) dbias[k][j] += dy[j];
    }
  }
};

/// Sums of the block's rows into scratch[blockIdx.x]. Where each warp has rows of its own, the warps add up
/// in their order.
template <bool kBlock, typename Team>
__device__ __forceinline__ void leave_sums(const WeightSums<Team>& own, const NormWeightGrad& p) {
  const int cols = static_cast<int>(p.cols);
  float* const dweight = p.scratch + std::int64_t{2} * blockIdx.x * p.cols;
  float* const dbias = dweight + cols;
  if constexpr (kBlock) {
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      write<true>(dweight, Team::column(0, k), cols, own.dweight[k]);
      if (p.dbias != nullptr) write<true>(dbias, Team::column(0, k), cols, own.dbias[k]);
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
  TESSERA_DYNAMIC_SHARED(unsigned char, rows);
  __shared__ Pair shared[kWarp];
  using Team = PassTeam<R, T, kBlock>;
  WeightSums<Team> sums{p.weight.dbias != nullptr};
  RowRing<R, T, Team> ring(p.input, rows);
  ring.fetch(Team::first_row());
  for (std::int64_t r = Team::first_row(); r < p.input.rows; r += Team::row_step()) {
    const NormGradRow<R, T, Team, true> row(p.input, r, ring.mean, ring.rstd);
    ring.fetch(r + Team::row_step());
    ring.await();
    float normalised[Team::kWidth], scaled[Team::kWidth], above[Team::kWidth];
    Pair own{};
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      ring.read_pack(k, normalised, scaled);
      row.normalise(normalised);
      sums.add(k, normalised, scaled);
      row.scale(Team::column(0, k), scaled);
      row.add(normalised, scaled, own);
    }
    own = row.means(own, shared);
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {  // read again: registers are scarce
      ring.read_pack(k, normalised, scaled);
      ring.read_above(k, above);
      row.normalise(normalised);
      row.scale(Team::column(0, k), scaled);
      row.write_pack(Team::column(0, k), normalised, scaled, above, own);
    }
  }
  leave_sums<kBlock, Team>(sums, p.weight);
}

/// Blocks and threads of norm_gradients_kernel: no more blocks than the GPU runs at once. No blocks for rows
/// that a block has no registers or shared memory for. A column takes `bytes` in a stage of the ring.
struct GradientsGrid {
  int blocks = 0, threads = 0, shared_bytes = 0;
  bool by_warp = false;
};
GradientsGrid gradients_grid(std::int64_t rows, std::int64_t cols, std::size_t bytes) {
  constexpr int kStatic = 8 << 10, kReserved = 1 << 10;  // of shared memory: the kernel's own, the driver's
  GradientsGrid grid;
  if (cols > std::int64_t{kMaxThreads} * kNormBlockElements) return grid;
  grid.by_warp = cols <= kWarp * kPassWarpElements;
  const int elements = grid.by_warp ? kPassWarpElements : kNormBlockElements;
  grid.threads = grid.by_warp ? kNormWarps * kWarp
                              : static_cast<int>(ceil_div(cols, std::int64_t{elements} * kWarp)) * kWarp;
  grid.shared_bytes = kStages * grid.threads * elements * static_cast<int>(bytes);
  const int own = grid.by_warp ? kStatic : kReserved, taken = grid.shared_bytes + own;
  if (taken > device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()) return grid;
  const int by_registers = grid.by_warp ? kPassWarpBlocks : std::max(1, kPassThreads / grid.threads);
  const int by_memory = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>() / (taken + kReserved);
  const int at_once = multiprocessors() * std::min(by_registers, by_memory);
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
  // The most there can be: rows may be wider, or turn out to be misaligned.
  return std::max(kNormGradParts, gradients_grid(rows, cols, 3 * sizeof(bfloat16)).blocks);
}

void add_norm_gradients(const AddNormGradients& params, const Launch& where) {
  int parts = 0;
  visit_floats(params.input.residual_dtype, params.input.dtype, "norm", [&](auto r, auto t) {
    using R = decltype(r);
    using T = decltype(t);
    const GradientsGrid grid =
        gradients_grid(params.input.rows, params.input.cols, 2 * sizeof(R) + sizeof(T));
    if (grid.blocks == 0 || !in_whole_packs<R, T>(params.input)) return;
    parts = grid.blocks;
    launch(grid.by_warp ? norm_gradients_kernel<R, T, false> : norm_gradients_kernel<R, T, true>,
           dim3(static_cast<unsigned>(grid.blocks)), dim3(static_cast<unsigned>(grid.threads)),
           static_cast<std::size_t>(grid.shared_bytes), where, params);
  });
  if (parts != 0) return add_parts(params.weight, parts, where);
  add_norm_backward(params.input, where);
  norm_weight_grad(params.weight, where);
}

TESSERA_KERNEL_FILE(weight_grad_columns);

}  // namespace tessera::kernels::cuda
