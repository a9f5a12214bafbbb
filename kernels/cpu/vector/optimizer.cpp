#include "kernels/cpu/vector/optimizer.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// Calls `run(model)` with the compute copy as a pointer to its type, or with a null float*: there is none.
template <typename Run>
void with_model(void* model, DType dtype, Run&& run) {
  if (model == nullptr) return run(static_cast<float*>(nullptr));
  visit_dtype(dtype, [&](auto tag) { run(static_cast<decltype(tag)*>(model)); });
}

}  // namespace

void adam_range(const Adam& p, const AdamFactors& f, std::int64_t begin, std::int64_t end) {
  const auto grad_factor = static_cast<float>(p.state->grad_factor);
  with_model(p.model, p.model_dtype, [&](auto* model) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F main = load(p.main + i, lanes);
      F m = load(p.m + i, lanes);
      F v = load(p.v + i, lanes);
      const F g = load(p.grad + i, lanes) * grad_factor + f.l2 * main;
      m = m + f.blend1 * (g - m);
      v = v * f.beta2 + (f.blend2 * g) * g;
      main = main * f.decay - f.step * m / (sqrt(v) * f.root + f.eps);
      store(p.m + i, m, lanes);
      store(p.v + i, v, lanes);
      store(p.main + i, main, lanes);
      if (model != nullptr) store(model + i, main, lanes);
    });
  });
}

void sgd_range(const Sgd& p, const SgdFactors& f, std::int64_t begin, std::int64_t end) {
  const auto grad_factor = static_cast<float>(p.state->grad_factor);
  with_model(p.model, p.model_dtype, [&](auto* model) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F main = load(p.main + i, lanes);
      F update = load(p.grad + i, lanes) * grad_factor + f.decay * main;
      if (p.buffer != nullptr && f.momentum != 0.0f) {
        const F momentum = f.momentum * load(p.buffer + i, lanes) + update;
        store(p.buffer + i, momentum, lanes);
        update = p.nesterov ? update + f.momentum * momentum : momentum;
      }
      main -= f.lr * update;
      store(p.main + i, main, lanes);
      if (model != nullptr) store(model + i, main, lanes);
    });
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
