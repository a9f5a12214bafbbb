#include "kernels/cpu/vector/elementwise.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

template <typename X, typename Y>
static void axpby_of(const Axpby& p, std::int64_t begin, std::int64_t end) {
  const X* x = static_cast<const X*>(p.x);
  Y* y = static_cast<Y*>(p.y);
  const F alpha = splat(p.alpha), beta = splat(p.beta);
  if (p.alpha == 0.0f) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(y + i, p.beta == 0.0f ? F{} : beta * load(y + i, lanes), lanes);
    });
  } else if (p.beta == 0.0f) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(y + i, alpha * load(x + i, lanes), lanes);
    });
  } else {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(y + i, alpha * load(x + i, lanes) + beta * load(y + i, lanes), lanes);
    });
  }
}

template <typename A, typename B, typename Out>
static void add_of(const Add& p, std::int64_t begin, std::int64_t end) {
  const A* a = static_cast<const A*>(p.a);
  const B* b = static_cast<const B*>(p.b);
  Out* out = static_cast<Out*>(p.out);
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store(out + i, load(a + i, lanes) + load(b + i, lanes), lanes);
  });
}

void axpby_range(const Axpby& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.x_dtype, [&](auto x) VEC_LAMBDA {
    visit_dtype(params.y_dtype,
                [&](auto y) VEC_LAMBDA { axpby_of<decltype(x), decltype(y)>(params, begin, end); });
  });
}

void add_range(const Add& params, std::int64_t begin, std::int64_t end) {
  const bool has_f16 =
      params.a_dtype == DType::f16 || params.b_dtype == DType::f16 || params.out_dtype == DType::f16;
  visit_short(has_f16, [&](auto type) VEC_LAMBDA {
    visit_either(type, params.a_dtype, [&](auto a) VEC_LAMBDA {
      visit_either(type, params.b_dtype, [&](auto b) VEC_LAMBDA {
        visit_either(type, params.out_dtype, [&](auto out) VEC_LAMBDA {
          add_of<decltype(a), decltype(b), decltype(out)>(params, begin, end);
        });
      });
    });
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
