#include "kernels/cpu/vector/reduce.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

typedef float HalfF __attribute__((vector_size(TESSERA_VECTOR_BYTES / 2), aligned(4)));
typedef double D __attribute__((vector_size(TESSERA_VECTOR_BYTES), aligned(4)));

/// Registers of column sums kept at once: a strip of them reads 8 cache lines of every row in AVX-512.
static constexpr int kStrip = 8;

template <typename T>
static void rows_of(const ColumnSum& p, std::int64_t row_begin, std::int64_t row_end, float* out) {
  const T* x = static_cast<const T*>(p.x);
  std::int64_t c = 0;
  for (; c + kStrip * kLanes <= p.cols; c += kStrip * kLanes) {
    F total[kStrip] = {};
    for (std::int64_t r = row_begin; r < row_end; ++r) {
      const T* row = x + r * p.ld + c;
      for (int j = 0; j < kStrip; ++j) total[j] += load(row + j * kLanes);
    }
    for (int j = 0; j < kStrip; ++j) store(out + c + j * kLanes, total[j]);
  }
  for_lanes(c, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F total = {};
    for (std::int64_t r = row_begin; r < row_end; ++r) total += load(x + r * p.ld + i, lanes);
    store(out + i, total, lanes);
  });
}

void column_sum_rows(const ColumnSum& params, std::int64_t row_begin, std::int64_t row_end, float* out) {
  visit_dtype(params.dtype,
              [&](auto t) VEC_LAMBDA { rows_of<decltype(t)>(params, row_begin, row_end, out); });
}

void column_sum_columns(const ColumnSum& p, std::int64_t parts, std::int64_t begin, std::int64_t end) {
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F total = {};
    for (std::int64_t part = 0; part < parts; ++part) total += load(p.scratch + part * p.cols + i, lanes);
    if (p.beta != 0.0f) total += p.beta * load(p.out + i, lanes);
    store(p.out + i, total, lanes);
  });
}

/// The sum of f(element) in double, in four accumulators; f sees a register of doubles.
template <typename Map>
VEC_INLINE double sum_mapped(const float* x, std::int64_t n, Map f) {
  constexpr int kDoubles = kLanes / 2;
  D total[4] = {};
  std::int64_t i = 0;
  for (; i + 4 * kDoubles <= n; i += 4 * kDoubles) {
    for (int j = 0; j < 4; ++j) {
      total[j] += f(__builtin_convertvector(*reinterpret_cast<const HalfF*>(x + i + j * kDoubles), D));
    }
  }
  if (i < n) {
    float rest[4 * kDoubles] = {};
    for (std::int64_t j = 0; i + j < n; ++j) rest[j] = x[i + j];
    for (int j = 0; j < 4; ++j) {
      total[j] += f(__builtin_convertvector(*reinterpret_cast<const HalfF*>(rest + j * kDoubles), D));
    }
  }
  const D all = (total[0] + total[1]) + (total[2] + total[3]);
  double result = 0.0;
  for (int j = 0; j < kDoubles; ++j) result += all[j];
  return result;
}

double sum_range(const float* x, std::int64_t n) {
  return sum_mapped(x, n, [](D v) VEC_LAMBDA { return v; });
}

double sum_squares_range(const float* x, std::int64_t n) {
  return sum_mapped(x, n, [](D v) VEC_LAMBDA { return v * v; });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
