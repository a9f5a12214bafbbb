#pragma once
/// Moving lanes between registers: interleaving, its inverse, and the transposition built on it.

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

#if TESSERA_VECTOR_BYTES == 64
/// a0 b0 a1 b1 ... of the lower, then of the upper halves.
VEC_INLINE F interleave_low(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
VEC_INLINE F interleave_high(F a, F b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
/// Lanes 0, 2, 4, ... (then 1, 3, 5, ...) of the pair a, b read as one.
VEC_INLINE F even_lanes(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
VEC_INLINE F odd_lanes(F a, F b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif TESSERA_VECTOR_BYTES == 32
VEC_INLINE F interleave_low(F a, F b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
VEC_INLINE F interleave_high(F a, F b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
VEC_INLINE F even_lanes(F a, F b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
VEC_INLINE F odd_lanes(F a, F b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
#else
VEC_INLINE F interleave_low(F a, F b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
VEC_INLINE F interleave_high(F a, F b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
VEC_INLINE F even_lanes(F a, F b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
VEC_INLINE F odd_lanes(F a, F b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
#endif

/// Transposes a square of kLanes registers: log2(kLanes) perfect shuffles of the rows.
VEC_INLINE void transpose(F (&row)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    F next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_low(row[i], row[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(row[i], row[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) row[i] = next[i];
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
