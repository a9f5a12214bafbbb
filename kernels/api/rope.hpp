#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// Rotates pairs of the first rotary_dim features of every head in place, by the angle of the row's position.
/// Pairs are (i, i + rotary_dim/2), or (2i, 2i+1) if interleaved. `inverse` rotates back: the backward pass.
struct Rope {
  std::int64_t rows = 0, heads = 0, head_dim = 0, rotary_dim = 0;
  DType dtype = DType::f32;
  void* x = nullptr;  ///< element (row, head, d) at x + row * row_stride + head * head_dim + d
  std::int64_t row_stride = 0;
  const std::int32_t* positions = nullptr;  ///< [rows]
  const float* cos = nullptr;               ///< [max_positions, rotary_dim / 2]
  const float* sin = nullptr;               ///< [max_positions, rotary_dim / 2]
  bool interleaved = false;
  bool inverse = false;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(rope, Rope)
