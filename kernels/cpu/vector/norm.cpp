#include "kernels/cpu/vector/norm.hpp"

#include "kernels/cpu/vector/philox.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

/// residual_out = residual + dropout(branch) for one row; returns the row's sum, or its sum of squares for
/// RMSNorm.
template <NormKind kind, typename R, typename T>
static float add_row(const AddNormForward& p, std::int64_t r) {
  const R* residual = static_cast<const R*>(p.residual) + r * p.cols;
  F total[4] = {};
  auto count = [&](F x, int slot) VEC_LAMBDA { total[slot] += kind == NormKind::rms ? x * x : x; };
  if (p.branch == nullptr) {
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      count(load(residual + i, lanes), slot);
    });
    return sum(total);
  }
  const T* branch = static_cast<const T*>(p.branch) + r * p.cols;
  R* out = static_cast<R*>(p.residual_out) + r * p.cols;
  auto add = [&](std::int64_t i, auto lanes, int slot, F b) VEC_LAMBDA {
    // Statistics are those of the stored row, which is what backward sees.
    const F x = stored_as<R>(load(residual + i, lanes) + b);
    store(out + i, x, lanes);
    count(x, slot);
  };
  if (p.dropout.active()) {
    const RowDropout dropout(p.dropout, r, p.cols);
    for_lanes_kept(dropout, p.cols, [&](std::int64_t i, auto lanes, int slot, I keep) VEC_LAMBDA {
      add(i, lanes, slot, dropout.apply(load(branch + i, lanes), keep));
    });
  } else {
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      add(i, lanes, slot, load(branch + i, lanes));
    });
  }
  return sum(total);
}

/// Adds up row r and writes its mean and rstd.
template <NormKind kind, typename R, typename T>
static void measure_row(const AddNormForward& p, std::int64_t r, const R* x, const R* next_residual) {
  const float over_cols = 1.0f / static_cast<float>(p.cols);
  const float total = add_row<kind, R, T>(p, r) * over_cols;
  float variance = total;
  if constexpr (kind == NormKind::layer) {
    // A second pass over the row, which is in cache: E[x^2] - E[x]^2 would cancel when the mean is large. So
    // the memory is free to bring the next row.
    F squares[4] = {};
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      const F centred = keep(load(x + i, lanes) - total, lanes);
      squares[slot] += centred * centred;
      prefetch(next_residual + i);
    });
    variance = sum(squares) * over_cols;
    p.mean[r] = total;
  }
  p.rstd[r] = 1.0f / __builtin_sqrtf(variance + p.eps);
}

template <NormKind kind, typename R, typename T>
static void forward_rows(const AddNormForward& p, std::int64_t begin, std::int64_t end) {
  const float* weight = p.weight;
  const float* bias = p.bias;
  for (std::int64_t r = begin; r < end; ++r) {
    const R* x = static_cast<const R*>(p.branch != nullptr ? p.residual_out : p.residual) + r * p.cols;
    T* y = static_cast<T*>(p.y) + r * p.cols;
    const std::int64_t next = r + 1 < end ? p.cols : 0;
    const R* next_residual = static_cast<const R*>(p.residual) + r * p.cols + next;
    const T* next_branch =
        p.branch != nullptr ? static_cast<const T*>(p.branch) + r * p.cols + next : nullptr;
    if (!p.known_statistics) measure_row<kind, R, T>(p, r, x, next_residual);
    const float mean = kind == NormKind::layer ? p.mean[r] : 0.0f;
    const float rstd = p.rstd[r];
    auto normalised = [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      if (kind == NormKind::rms) prefetch(next_residual + i);
      prefetch(next_branch + i);
      return (load(x + i, lanes) - mean) * rstd * load(weight + i, lanes);
    };
    if (bias != nullptr) {
      for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
        store(y + i, normalised(i, lanes) + load(bias + i, lanes), lanes);
      });
    } else {
      for_lanes(0, p.cols,
                [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, normalised(i, lanes), lanes); });
    }
  }
}

template <NormKind kind, typename R, typename T>
static void backward_rows(const AddNormBackward& p, std::int64_t begin, std::int64_t end) {
  const float* weight = p.weight;
  const float over_cols = 1.0f / static_cast<float>(p.cols);
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t row = r * p.cols;
    const R* x = static_cast<const R*>(p.residual_out) + row;
    const T* dy = static_cast<const T*>(p.dy) + row;
    const R* above = p.dresidual != nullptr ? static_cast<const R*>(p.dresidual) + row : nullptr;
    R* dx = static_cast<R*>(p.dresidual_in) + row;
    T* dbranch = p.dbranch != nullptr ? static_cast<T*>(p.dbranch) + row : nullptr;
    const float mean = kind == NormKind::layer ? p.mean[r] : 0.0f;
    const float rstd = p.rstd[r];

    const std::int64_t next = r + 1 < end ? p.cols : 0;
    F dots[4] = {}, totals[4] = {};
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      const F scaled = load(weight + i, lanes) * load(dy + i, lanes);
      dots[slot] += scaled * ((load(x + i, lanes) - mean) * rstd);
      if (kind == NormKind::layer) totals[slot] += scaled;
      if (above != nullptr) prefetch(above + i);
    });
    const float dot = sum(dots) * over_cols;
    const float total = kind == NormKind::layer ? sum(totals) * over_cols : 0.0f;

    auto gradient = [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      const F scaled = load(weight + i, lanes) * load(dy + i, lanes);
      const F normalised = (load(x + i, lanes) - mean) * rstd;
      F g = (scaled - total - normalised * dot) * rstd;
      if (above != nullptr) g += load(above + i, lanes);
      prefetch(x + next + i);
      prefetch(dy + next + i);
      store(dx + i, g, lanes);
      return g;
    };
    if (dbranch == nullptr) {
      for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA { gradient(i, lanes); });
    } else if (p.dropout.active()) {
      const RowDropout dropout(p.dropout, r, p.cols);
      for_lanes_kept(dropout, p.cols, [&](std::int64_t i, auto lanes, int, I keep) VEC_LAMBDA {
        store(dbranch + i, dropout.apply(gradient(i, lanes), keep), lanes);
      });
    } else {
      for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
        store(dbranch + i, gradient(i, lanes), lanes);
      });
    }
  }
}

/// Adds dy * xhat and dy of `count` rows from r on to the sums of one part.
template <int count, NormKind kind, typename R, typename T>
static void add_weight_grad(const NormWeightGrad& p, std::int64_t r, float* dweight, float* dbias) {
  const R* x = static_cast<const R*>(p.residual_out) + r * p.cols;
  const T* dy = static_cast<const T*>(p.dy) + r * p.cols;
  for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F weight_sum = load(dweight + i, lanes);
    F bias_sum = load(dbias + i, lanes);
    for (int k = 0; k < count; ++k) {
      const float mean = kind == NormKind::layer ? p.mean[r + k] : 0.0f;
      const F g = load(dy + k * p.cols + i, lanes);
      weight_sum += g * ((load(x + k * p.cols + i, lanes) - mean) * p.rstd[r + k]);
      bias_sum += g;
    }
    store(dweight + i, weight_sum, lanes);
    store(dbias + i, bias_sum, lanes);
  });
}

template <NormKind kind, typename R, typename T>
static void weight_grad_part(const NormWeightGrad& p, int part, int parts) {
  float* dweight = p.scratch + std::int64_t{2} * part * p.cols;
  float* dbias = dweight + p.cols;
  __builtin_memset(dweight, 0, static_cast<std::size_t>(2 * p.cols) * sizeof(float));
  const std::int64_t end = p.rows * (part + 1) / parts;
  std::int64_t r = p.rows * part / parts;
  for (; r + 4 <= end; r += 4) add_weight_grad<4, kind, R, T>(p, r, dweight, dbias);
  for (; r < end; ++r) add_weight_grad<1, kind, R, T>(p, r, dweight, dbias);
}

/// The same sums in the same order; what four rows bring to them is read while the rows are in cache.
template <NormKind kind, typename R, typename T>
static void gradients_part(const AddNormGradients& p, int part, int parts) {
  float* dweight = p.weight.scratch + std::int64_t{2} * part * p.weight.cols;
  float* dbias = dweight + p.weight.cols;
  __builtin_memset(dweight, 0, static_cast<std::size_t>(2 * p.weight.cols) * sizeof(float));
  const std::int64_t end = p.weight.rows * (part + 1) / parts;
  std::int64_t r = p.weight.rows * part / parts;
  for (; r + 4 <= end; r += 4) {
    backward_rows<kind, R, T>(p.input, r, r + 4);
    add_weight_grad<4, kind, R, T>(p.weight, r, dweight, dbias);
  }
  for (; r < end; ++r) {
    backward_rows<kind, R, T>(p.input, r, r + 1);
    add_weight_grad<1, kind, R, T>(p.weight, r, dweight, dbias);
  }
}

/// visit(kind, R{}, T{}) for the norm kind and the two dtypes of `params`.
template <typename Params, typename Visit>
VEC_INLINE void visit_norm(const Params& params, Visit visit) {
  visit_dtypes(params.residual_dtype, params.dtype, [&](auto residual, auto compute) VEC_LAMBDA {
    if (params.kind == NormKind::layer) {
      visit.template operator()<NormKind::layer, decltype(residual), decltype(compute)>();
    } else {
      visit.template operator()<NormKind::rms, decltype(residual), decltype(compute)>();
    }
  });
}

void add_norm_forward_rows(const AddNormForward& params, std::int64_t begin, std::int64_t end) {
  visit_norm(params,
             [&]<NormKind kind, typename R, typename T>() { forward_rows<kind, R, T>(params, begin, end); });
}

void add_norm_backward_rows(const AddNormBackward& params, std::int64_t begin, std::int64_t end) {
  visit_norm(params,
             [&]<NormKind kind, typename R, typename T>() { backward_rows<kind, R, T>(params, begin, end); });
}

void norm_weight_grad_part(const NormWeightGrad& params, int part, int parts) {
  visit_norm(params, [&]<NormKind kind, typename R, typename T>() {
    weight_grad_part<kind, R, T>(params, part, parts);
  });
}

void add_norm_gradients_part(const AddNormGradients& params, int part, int parts) {
  visit_norm(params.input, [&]<NormKind kind, typename R, typename T>() {
    gradients_part<kind, R, T>(params, part, parts);
  });
}

void norm_weight_grad_columns(const NormWeightGrad& params, int parts, std::int64_t begin, std::int64_t end) {
  auto add_up = [&](const float* scratch, float* out) VEC_LAMBDA {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F total{};
      for (int part = 0; part < parts; ++part)
        total += load(scratch + std::int64_t{2} * part * params.cols + i, lanes);
      if (params.beta != 0.0f) total += params.beta * load(out + i, lanes);
      store(out + i, total, lanes);
    });
  };
  add_up(params.scratch, params.dweight);
  if (params.dbias != nullptr) add_up(params.scratch + params.cols, params.dbias);
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
