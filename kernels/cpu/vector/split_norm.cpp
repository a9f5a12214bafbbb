#include "kernels/cpu/vector/split_norm.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

template <typename T>
static void products(const RowProducts& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* a = static_cast<const T*>(p.a) + r * p.cols;
    const T* b = static_cast<const T*>(p.b) + r * p.cols;
    F total[4] = {};
    for_lanes_in_fours(0, p.cols, [&](std::int64_t i, auto lanes, int slot) VEC_LAMBDA {
      total[slot] += load(a + i, lanes) * load(b + i, lanes);
    });
    p.out[r] = sum(total);
  }
}

template <typename T>
static void project(const NormProjection& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(p.x) + r * p.cols;
    T* y = static_cast<T*>(p.y) + r * p.cols;
    const float factor = p.rstd[r] * p.rstd[r] * p.sums[r] / p.width;
    for_lanes(0, p.cols, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(y + i, load(y + i, lanes) - factor * load(x + i, lanes), lanes);
    });
  }
}

void row_products_rows(const RowProducts& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { products<decltype(t)>(params, begin, end); });
}

void norm_projection_rows(const NormProjection& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { project<decltype(t)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
