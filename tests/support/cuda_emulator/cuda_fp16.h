#pragma once
/// The storage type of CUDA's half and its conversions; kernels use Tessera's own.

#include <bit>
#include <cstdint>

#include "tessera/base/dtype.hpp"

// NOLINTBEGIN: CUDA's names
struct __half {
  unsigned short __x;
};
using half = __half;
inline __half __float2half_rn(float x) { return {tessera::float16(x).bits}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<tessera::float16>(x.__x)); }
// NOLINTEND
