#include "kernels/cpu/vector/attention_tile.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

enum class Mode { product, add, add_transposed };

template <Mode mode, int Rows, int Vectors>
void micro(const TileProduct& t) {
  F sum[Rows][Vectors];
  float* const c = t.c;
  const std::int64_t c_stride = t.c_stride;
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      sum[r][v] = mode == Mode::product ? F{} : load(c + r * c_stride + v * kLanes);
    }
  }
  const float* a = t.a;
  const float* b = t.b;
  const std::int64_t a_row = mode == Mode::add_transposed ? 1 : t.a_stride;
  const std::int64_t a_step = mode == Mode::add_transposed ? t.a_stride : 1;
  for (std::int64_t k = 0; k < t.depth; ++k) {
    F column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const F x = splat(a[r * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] += x * column[v];
    }
    a += a_step;
    b += t.b_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(c + r * c_stride + v * kLanes, sum[r][v]);
  }
}

template <Mode mode, int Vectors, int Rows = tile_rows(Vectors)>
void with_rows(int rows, const TileProduct& t) {
  if (rows == Rows) return micro<mode, Rows, Vectors>(t);
  if constexpr (Rows > 1) with_rows<mode, Vectors, Rows - 1>(rows, t);
}

template <Mode mode, int Vectors = kTileVectors>
void with_vectors(int rows, int vectors, const TileProduct& t) {
  if (vectors == Vectors) return with_rows<mode, Vectors>(rows, t);
  if constexpr (Vectors > 1) with_vectors<mode, Vectors - 1>(rows, vectors, t);
}

}  // namespace

void tile_product(int rows, int vectors, const TileProduct& t) {
  with_vectors<Mode::product>(rows, vectors, t);
}
void tile_add(int rows, int vectors, const TileProduct& t) { with_vectors<Mode::add>(rows, vectors, t); }
void tile_add_transposed(int rows, int vectors, const TileProduct& t) {
  with_vectors<Mode::add_transposed>(rows, vectors, t);
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
