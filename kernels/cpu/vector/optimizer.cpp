#include "kernels/cpu/vector/optimizer.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

void adam_range(const Adam& p, const AdamFactors& f, std::int64_t begin, std::int64_t end) {
  const auto eps = static_cast<float>(p.eps);
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F main = load(p.main + i, lanes);
    F m = load(p.m + i, lanes);
    F v = load(p.v + i, lanes);
    const F g = load(p.grad + i, lanes) * p.grad_scale + f.l2 * main;
    m = m + f.blend1 * (g - m);
    v = v * f.beta2 + (f.blend2 * g) * g;
    main = main * f.decay - f.step * m / (sqrt(v) * f.root + eps);
    store(p.m + i, m, lanes);
    store(p.v + i, v, lanes);
    store(p.main + i, main, lanes);
    if (p.model != nullptr) store(p.model + i, main, lanes);
  });
}

void sgd_range(const Sgd& p, std::int64_t begin, std::int64_t end) {
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F main = load(p.main + i, lanes);
    F update = load(p.grad + i, lanes) * p.grad_scale + p.weight_decay * main;
    if (p.buffer != nullptr) {
      const F momentum = p.momentum * load(p.buffer + i, lanes) + update;
      store(p.buffer + i, momentum, lanes);
      update = p.nesterov ? update + p.momentum * momentum : momentum;
    }
    main -= p.lr * update;
    store(p.main + i, main, lanes);
    if (p.model != nullptr) store(p.model + i, main, lanes);
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
