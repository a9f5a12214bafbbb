#include "kernels/cpu/vector/rope.hpp"

#include "kernels/cpu/vector/shuffle.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// The rotations of one row: angle i has cosine cos[i] and sine sign * sin[i].
struct Angles {
  const float* cos;
  const float* sin;
  float sign;
  std::int64_t count;
};

template <typename T>
void rotate_halves(T* x, const Angles& angles) {
  T* y = x + angles.count;
  for_lanes(0, angles.count, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    const F c = load(angles.cos + i, lanes), s = load(angles.sin + i, lanes) * angles.sign;
    const F a = load(x + i, lanes), b = load(y + i, lanes);
    store(x + i, a * c - b * s, lanes);
    store(y + i, b * c + a * s, lanes);
  });
}

template <typename T>
void rotate_neighbours(T* x, const Angles& angles) {
  std::int64_t i = 0;
  for (; i + kLanes <= angles.count; i += kLanes) {
    const F c = load(angles.cos + i), s = load(angles.sin + i) * angles.sign;
    const F low = load(x + 2 * i), high = load(x + 2 * i + kLanes);
    const F a = even_lanes(low, high), b = odd_lanes(low, high);
    const F rotated_a = a * c - b * s, rotated_b = b * c + a * s;
    store(x + 2 * i, interleave_low(rotated_a, rotated_b));
    store(x + 2 * i + kLanes, interleave_high(rotated_a, rotated_b));
  }
  for (; i < angles.count; ++i) {
    const float c = angles.cos[i], s = angles.sin[i] * angles.sign;
    const auto a = static_cast<float>(x[2 * i]), b = static_cast<float>(x[2 * i + 1]);
    x[2 * i] = static_cast<T>(a * c - b * s);
    x[2 * i + 1] = static_cast<T>(b * c + a * s);
  }
}

template <typename T>
void rotate_rows(const Rope& params, std::int64_t begin, std::int64_t end) {
  const std::int64_t pairs = params.rotary_dim / 2;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t offset = params.positions[row] * pairs;
    const Angles angles{params.cos + offset, params.sin + offset, params.inverse ? -1.0f : 1.0f, pairs};
    T* x = static_cast<T*>(params.x) + row * params.row_stride;
    for (std::int64_t head = 0; head < params.heads; ++head, x += params.head_dim) {
      if (params.interleaved) {
        rotate_neighbours(x, angles);
      } else {
        rotate_halves(x, angles);
      }
    }
  }
}

}  // namespace

void rope_rows(const Rope& params, std::int64_t begin, std::int64_t end) {
  visit_dtype(params.dtype, [&](auto type) { rotate_rows<decltype(type)>(params, begin, end); });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
