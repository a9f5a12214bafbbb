#include "kernels/cpu/vector/dropout.hpp"

#include "kernels/cpu/vector/philox.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

template <typename T>
static void dropout_rows_of(const Dropout& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(p.x) + r * p.cols;
    T* y = static_cast<T*>(p.y) + r * p.cols;
    const RowDropout dropout(p.spec, r, p.cols);
    for_lanes_kept(dropout, p.cols, [&](std::int64_t i, auto lanes, int, I keep) VEC_LAMBDA {
      store(y + i, dropout.apply(load(x + i, lanes), keep), lanes);
    });
  }
}

void dropout_rows(const Dropout& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA { dropout_rows_of<decltype(t)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
