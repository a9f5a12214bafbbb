#include "kernels/cpu/vector/optimizer.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// 16 bits in each lane.
VEC_INLINE U load_bits(const std::uint16_t* p, Whole) {
  return __builtin_convertvector(*reinterpret_cast<const H*>(p), U);
}
VEC_INLINE U load_bits(const std::uint16_t* p, Part part) {
  std::uint16_t lanes[kLanes] = {};
  for (int i = 0; i < part.n; ++i) lanes[i] = p[i];
  return load_bits(lanes, Whole{});
}
/// The low 16 bits of each lane.
VEC_INLINE void store_bits(std::uint16_t* p, U bits, Whole) {
  *reinterpret_cast<H*>(p) = __builtin_convertvector(bits, H);
}
VEC_INLINE void store_bits(std::uint16_t* p, U bits, Part part) {
  std::uint16_t lanes[kLanes];
  store_bits(lanes, bits, Whole{});
  for (int i = 0; i < part.n; ++i) p[i] = lanes[i];
}

/// SplitWeight::join and split.
template <typename Lanes>
VEC_INLINE F load_split(const bfloat16* model, const std::uint16_t* low, Lanes lanes) {
  const U low_bits = load_bits(low, lanes);
  const U upper = (U)load(model, lanes) - ((low_bits & 0x8000u) << 1);
  return (F)(upper | low_bits);
}
template <typename Lanes>
VEC_INLINE void store_split(bfloat16* model, std::uint16_t* low, F main, Lanes lanes) {
  const U word = main != main ? U{} + 0x7fc00000u : (U)main;
  store_bits(low, word, lanes);
  const U upper = (word & 0xffff0000u) + ((word & 0x8000u) << 1);
  store(model, (F)upper, lanes);  // exact: no bits are left to be rounded
}

/// Main weights in fp32, and their compute copy unless it is null.
template <typename Model>
struct WholeWeights {
  float* main;
  Model* model;

  template <typename Lanes>
  VEC_LAMBDA F read(std::int64_t i, Lanes lanes) const {
    return load(main + i, lanes);
  }
  template <typename Lanes>
  VEC_LAMBDA void write(std::int64_t i, F value, Lanes lanes) const {
    store(main + i, value, lanes);
    if (model != nullptr) store(model + i, value, lanes);
  }
};
struct SplitWeights {
  bfloat16* model;
  std::uint16_t* low;

  template <typename Lanes>
  VEC_LAMBDA F read(std::int64_t i, Lanes lanes) const {
    return load_split(model + i, low + i, lanes);
  }
  template <typename Lanes>
  VEC_LAMBDA void write(std::int64_t i, F value, Lanes lanes) const {
    store_split(model + i, low + i, value, lanes);
  }
};

/// Calls `run(weights)` with the main weights of an update.
template <typename Params, typename Run>
void with_weights(const Params& p, Run&& run) {
  if (p.low != nullptr) return run(SplitWeights{static_cast<bfloat16*>(p.model), p.low});
  if (p.model == nullptr) return run(WholeWeights<float>{p.main, nullptr});
  visit_dtype(p.model_dtype, [&](auto tag) {
    using Model = decltype(tag);
    run(WholeWeights<Model>{p.main, static_cast<Model*>(p.model)});
  });
}

}  // namespace

void adam_range(const Adam& p, const AdamFactors& f, std::int64_t begin, std::int64_t end) {
  const auto grad_factor = static_cast<float>(p.state->grad_factor);
  with_weights(p, [&](auto weights) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F main = weights.read(i, lanes);
      F m = load(p.m + i, lanes);
      F v = load(p.v + i, lanes);
      const F g = load(p.grad + i, lanes) * grad_factor + f.l2 * main;
      m = m + f.blend1 * (g - m);
      v = v * f.beta2 + (f.blend2 * g) * g;
      main = main * f.decay - f.step * m / (sqrt(v) * f.root + f.eps);
      store(p.m + i, m, lanes);
      store(p.v + i, v, lanes);
      weights.write(i, main, lanes);
    });
  });
}

void sgd_range(const Sgd& p, const SgdFactors& f, std::int64_t begin, std::int64_t end) {
  const auto grad_factor = static_cast<float>(p.state->grad_factor);
  with_weights(p, [&](auto weights) {
    for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      F main = weights.read(i, lanes);
      F update = load(p.grad + i, lanes) * grad_factor + f.decay * main;
      if (p.buffer != nullptr && f.momentum != 0.0f) {
        const F momentum = f.momentum * load(p.buffer + i, lanes) + update;
        store(p.buffer + i, momentum, lanes);
        update = p.nesterov ? update + f.momentum * momentum : momentum;
      }
      main -= f.lr * update;
      weights.write(i, main, lanes);
    });
  });
}

void split_main_range(const SplitMain& p, std::int64_t begin, std::int64_t end) {
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store_split(p.model + i, p.low + i, load(p.main + i, lanes), lanes);
  });
}

void join_main_range(const JoinMain& p, std::int64_t begin, std::int64_t end) {
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store(p.main + i, load_split(p.model + i, p.low + i, lanes), lanes);
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
