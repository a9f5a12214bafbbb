#pragma once
/// The storage type of CUDA's bfloat16 and its conversions; kernels use Tessera's own.

#include <bit>
#include <cstdint>

#include "tessera/base/dtype.hpp"

// NOLINTBEGIN: CUDA's names
struct __nv_bfloat16 {
  unsigned short __x;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {tessera::bfloat16(x).bits}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline float __bfloat162float(__nv_bfloat16 x) {
  return static_cast<float>(std::bit_cast<tessera::bfloat16>(x.__x));
}
// NOLINTEND
