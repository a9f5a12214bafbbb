#pragma once
/// The register-tiled products attention is made of, and the exponential of its softmax.

#include "kernels/cpu/vector/isa.hpp"
#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu {

/// C [rows, columns] and A B, all fp32. Element (row, k) of A is a[row * a_stride + k], or a[k * a_stride +
/// row] where the function says transposed; B is [depth, columns]. Columns are whole registers.
struct TileProduct {
  const float* a = nullptr;
  std::int64_t a_stride = 0;
  const float* b = nullptr;
  std::int64_t b_stride = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;
  std::int64_t depth = 0;
};

}  // namespace tessera::kernels::cpu

TESSERA_EACH_ISA(
    /** C = A B for `rows` rows and `vectors` registers of columns, both within the limits below. */
    void tile_product(int rows, int vectors, const TileProduct& tile);
    /** C += A B. */
    void tile_add(int rows, int vectors, const TileProduct& tile);
    /** C += A B with A transposed. */
    void tile_add_transposed(int rows, int vectors, const TileProduct& tile);)

namespace tessera::kernels::cpu::TESSERA_ISA {

/// Registers of columns a tile may have, and rows beside so many: the sums, a row of B and a broadcast fill
/// the register file (32 registers with AVX-512, 16 without).
inline constexpr int kTileVectors = TESSERA_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int tile_rows(int vectors) {
  if (TESSERA_VECTOR_BYTES == 64) return vectors == 4 ? 6 : vectors == 3 ? 8 : 10;
  return vectors == 2 ? 5 : 8;
}

/// Cuts n into the fewest pieces of at most `limit`, as even as they can be, and calls visit(begin, length).
template <typename Visit>
VEC_INLINE void even_pieces(int n, int limit, Visit&& visit) {
  const int pieces = (n + limit - 1) / limit;
  for (int i = 0, begin = 0; i < pieces; ++i) {
    const int length = n / pieces + (i < n % pieces);
    visit(begin, length);
    begin += length;
  }
}

/// 2^x for x <= 127, to 2 ulp; 2^-126 below that, NaN for NaN. exp2_of(0) is exactly 1. Degree-6 minimax
/// polynomial.
VEC_INLINE F exp2_of(F x) {
  const F bounded = max(splat(-126.0f), x);
  const F shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the nearest integer ends up in the low bits
  const F f = bounded - (shifted - 12582912.0f);
  F p = splat(1.5345812068e-4f);
  p = p * f + 1.3399931269e-3f;
  p = p * f + 9.6184889573e-3f;
  p = p * f + 5.5503287768e-2f;
  p = p * f + 2.4022646891e-1f;
  p = p * f + 6.9314720574e-1f;
  p = p * f + 1.0f;
  const U bits = reinterpret_cast<const U&>(p) + (reinterpret_cast<const U&>(shifted) << 23);
  return reinterpret_cast<const F&>(bits);
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
