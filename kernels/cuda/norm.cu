/// Residual + dropout + norm in one pass over memory: a row stays in registers between its sums and its
/// result. A row of up to 1024 columns is one warp's, a longer one a block's; beyond 12288 columns the row is
/// read again from cache. Bytes: residual and branch read, residual_out and y written, once each.

#include "kernels/cuda/norm.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 768;  // so that a thread may have 80 registers: nothing spills

template <typename R, typename T, bool kBlock, bool kWhole>
struct NormRow {
  using Team = RowTeam<R, T, kBlock>;
  using Values = typename Team::Values;

  const AddNormForward& p;
  const std::int64_t r;
  const int cols;
  const R* const residual;
  R* const out;  // null without branch
  float* const shared;

  __device__ NormRow(const AddNormForward& params, std::int64_t row, float* shared_sums)
      : p(params),
        r(row),
        cols(static_cast<int>(params.cols)),
        residual(static_cast<const R*>(p.residual) + r * cols),
        out(p.branch != nullptr ? static_cast<R*>(p.residual_out) + r * cols : nullptr),
        shared(shared_sums) {}

  /// x = residual + dropout(branch), which is stored. All reads come before the first write: the compiler may
  /// not move them over it, and they are to be in flight together.
  __device__ __forceinline__ void add(int base, Values& x) const {
    Team::template read_all<kWhole>(residual, base, cols, x);
    if (out == nullptr) return;
    Values branch;
    Team::template read_all<kWhole>(static_cast<const T*>(p.branch) + r * cols, base, cols, branch);
    if (p.dropout.active()) {
      const RowDropout dropout(p.dropout, r, cols);
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) dropout.apply(Team::column(base, k), branch[k]);
    }
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
      // Statistics are those of the stored row, which is what backward sees.
#pragma unroll
      for (int j = 0; j < Team::kWidth; ++j) x[k][j] = to_float(from_float<R>(x[k][j] + branch[k][j]));
      write<kWhole>(out, Team::column(base, k), cols, x[k]);
    }
  }

  /// Sum of (x - mean)^2 over the row's part in x.
  __device__ __forceinline__ float squares(int base, const Values& x, float mean) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
      for (int j = 0; j < Team::kWidth; ++j) {
        const float centred = Team::column(base, k) + j < cols ? x[k][j] - mean : 0.0f;
        sum += centred * centred;
      }
    }
    return sum;
  }

  /// Adds up the row and writes its statistics. x is left holding the row if it fits.
  __device__ __forceinline__ void measure(Values& x, float& mean, float& rstd) const {
    const bool layer = p.kind == NormKind::layer;
    const float over_cols = 1.0f / static_cast<float>(cols);
    float sum = 0.0f;
    for (int base = 0; base < cols; base += Team::span()) {
      add(base, x);
      if (!layer) {
        sum += squares(base, x, 0.0f);
        continue;
      }
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
#pragma unroll
        for (int j = 0; j < Team::kWidth; ++j) sum += x[k][j];
      }
    }
    float variance = Team::sum(sum, shared) * over_cols;
    mean = 0.0f;
    if (layer) {  // E[x^2] - E[x]^2 would cancel when the mean is large
      mean = variance;
      sum = 0.0f;
      for (int base = 0; base < cols; base += Team::span()) {
        read_again(base, x);
        sum += squares(base, x, mean);
      }
      variance = Team::sum(sum, shared) * over_cols;
    }
    rstd = 1.0f / sqrtf(variance + p.eps);
    if (Team::thread() == 0) {
      if (layer) p.mean[r] = mean;
      p.rstd[r] = rstd;
    }
  }

  /// x of a row that registers do not hold; every thread reads what it wrote itself.
  __device__ __forceinline__ void read_again(int base, Values& x) const {
    if (cols > Team::span()) {
      Team::template read_all<kWhole>(out != nullptr ? out : residual, base, cols, x);
    }
  }

  __device__ __forceinline__ void normalise() const {
    Values x;
    float mean = 0.0f, rstd;
    if (p.known_statistics) {
      if (p.kind == NormKind::layer) mean = p.mean[r];
      rstd = p.rstd[r];
      if (cols <= Team::span()) Team::template read_all<kWhole>(residual, 0, cols, x);
    } else {
      measure(x, mean, rstd);
    }
    T* const y = static_cast<T*>(p.y) + r * cols;
    for (int base = 0; base < cols; base += Team::span()) {
      read_again(base, x);
#pragma unroll
      for (int k = 0; k < Team::kPacks; ++k) {
        const int i = Team::column(base, k);
        float weight[Team::kWidth], bias[Team::kWidth] = {};
        read<kWhole>(p.weight, i, cols, weight);
        if (p.bias != nullptr) read<kWhole>(p.bias, i, cols, bias);
#pragma unroll
        for (int j = 0; j < Team::kWidth; ++j) x[k][j] = (x[k][j] - mean) * rstd * weight[j] + bias[j];
        write<kWhole>(y, i, cols, x[k]);
      }
    }
  }
};

template <typename R, typename T, bool kBlock, bool kWhole>
__global__ void __launch_bounds__(kBlock ? kMaxThreads : kNormWarps* kWarp, kBlock ? 1 : 3)
    norm_forward_kernel(const AddNormForward p) {
  __shared__ float shared[kWarp];
  using Team = RowTeam<R, T, kBlock>;
  for (std::int64_t r = Team::first_row(); r < p.rows; r += Team::row_step()) {
    NormRow<R, T, kBlock, kWhole>(p, r, shared).normalise();
  }
}

template <typename R, typename T>
bool in_whole_packs(const AddNormForward& p) {
  constexpr int N = kColumns<R, T>;
  return in_packs<N>(static_cast<const R*>(p.residual), p.cols) &&
         in_packs<N>(static_cast<const R*>(p.residual_out), p.cols) &&
         in_packs<N>(static_cast<const T*>(p.branch), p.cols) && in_packs<N>(static_cast<T*>(p.y), p.cols) &&
         in_packs<N>(p.weight, p.cols) && in_packs<N>(p.bias, p.cols);
}

}  // namespace

void add_norm_forward(const AddNormForward& params, const Launch& where) {
  visit_floats(params.residual_dtype, params.dtype, "norm", [&](auto r, auto t) {
    using R = decltype(r);
    using T = decltype(t);
    launch_rows(params, in_whole_packs<R, T>(params), kMaxThreads, norm_forward_kernel<R, T, false, true>,
                norm_forward_kernel<R, T, true, true>, norm_forward_kernel<R, T, true, false>, where);
  });
}

TESSERA_KERNEL_FILE(norm_forward_kernel<float, float, false, true>);

}  // namespace tessera::kernels::cuda
