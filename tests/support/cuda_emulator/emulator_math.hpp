#pragma once
/// Device functions of CUDA that the host's mathematics lacks or names otherwise. The fast ones are exact
/// here.

#include <math.h>  // NOLINT: the global names, as CUDA has them

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tessera_emulator {
// The C library declares some of these names itself, so they are macros.
inline float fast_exp(float x) { return std::exp(x); }
inline float fast_exp10(float x) { return std::pow(10.0f, x); }
inline float fast_log(float x) { return std::log(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_log10(float x) { return std::log10(x); }
inline float fast_sin(float x) { return std::sin(x); }
inline float fast_cos(float x) { return std::cos(x); }
inline float fast_tan(float x) { return std::tan(x); }
inline float fast_tanh(float x) { return std::tanh(x); }
inline float fast_pow(float x, float y) { return std::pow(x, y); }
inline void fast_sincos(float x, float* s, float* c) {
  *s = std::sin(x);
  *c = std::cos(x);
}
}  // namespace tessera_emulator
#define __expf(x) ::tessera_emulator::fast_exp(x)
#define __exp10f(x) ::tessera_emulator::fast_exp10(x)
#define __logf(x) ::tessera_emulator::fast_log(x)
#define __log2f(x) ::tessera_emulator::fast_log2(x)
#define __log10f(x) ::tessera_emulator::fast_log10(x)
#define __sinf(x) ::tessera_emulator::fast_sin(x)
#define __cosf(x) ::tessera_emulator::fast_cos(x)
#define __tanf(x) ::tessera_emulator::fast_tan(x)
#define __tanhf(x) ::tessera_emulator::fast_tanh(x)
#define __powf(x, y) ::tessera_emulator::fast_pow(x, y)
#define __sincosf(x, s, c) ::tessera_emulator::fast_sincos(x, s, c)

inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float sinpif(float x) { return static_cast<float>(std::sin(M_PI * std::fmod(x, 2.0))); }
inline float cospif(float x) { return static_cast<float>(std::cos(M_PI * std::fmod(x, 2.0))); }
inline void sincospif(float x, float* s, float* c) {
  *s = sinpif(x);
  *c = cospif(x);
}

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(x) * y >> 32);
}
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<std::int64_t>(x) * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1u) << (31 - bit);
  return result;
}
/// The upper word of high:low shifted left.
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
/// The lower word of high:low shifted right.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}

// CUDA's min and max, which mix types by the usual rules; NaN gives the other for floating point.
template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
