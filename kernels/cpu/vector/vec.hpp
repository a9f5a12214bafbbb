#pragma once
/// A register of floats in GCC's vector extensions, and the functions kernels need on it. Included only by
/// files that are compiled once per instruction set (see kernels/cpu/vector/isa.hpp). Intrinsics stand only
/// where GCC does not find the instruction from the portable expression beside them.

#include <cstdint>
#include <cstring>

#include "tessera/base/dtype.hpp"

#if defined(__SSE2__)
#pragma GCC diagnostic push
// GCC 12 warns of the undefined registers in its own header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512F__) && TESSERA_VECTOR_BYTES == 64
#define VEC_AVX512 1
#define VEC_X86(name) _mm512_##name
#elif defined(__AVX2__) && TESSERA_VECTOR_BYTES == 32
#define VEC_AVX2 1
#define VEC_X86(name) _mm256_##name
#elif defined(__SSE2__) && TESSERA_VECTOR_BYTES == 16
#define VEC_X86(name) _mm_##name
#endif

#define VEC_INLINE static inline __attribute__((always_inline))
/// After a lambda's parameters: the lambda is inlined for certain.
#define VEC_LAMBDA __attribute__((always_inline))

namespace tessera::kernels::cpu::TESSERA_ISA {

inline constexpr int kLanes = TESSERA_VECTOR_BYTES / 4;
typedef float F __attribute__((vector_size(TESSERA_VECTOR_BYTES), aligned(4)));
typedef std::int32_t I __attribute__((vector_size(TESSERA_VECTOR_BYTES), aligned(4)));
typedef std::uint32_t U __attribute__((vector_size(TESSERA_VECTOR_BYTES), aligned(4)));
typedef std::uint16_t H __attribute__((vector_size(TESSERA_VECTOR_BYTES / 2), aligned(2)));

VEC_INLINE F splat(float x) { return x - F{}; }
VEC_INLINE F select(I mask, F yes, F no) { return mask ? yes : no; }

/// 0, 1, 2, ...
VEC_INLINE I iota() {
#if TESSERA_VECTOR_BYTES == 64
  return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif TESSERA_VECTOR_BYTES == 32
  return I{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return I{0, 1, 2, 3};
#endif
}

// Through the under-aligned vector type: GCC takes a memcpy of 32 bytes through the stack in pieces of 16.
VEC_INLINE F load(const float* p) { return *reinterpret_cast<const F*>(p); }
VEC_INLINE F widen(H h) {
#if defined(VEC_AVX512)
  const U word = (U)_mm512_cvtepu16_epi32((__m256i)h) << 16;
#elif defined(VEC_AVX2)
  const U word = (U)_mm256_cvtepu16_epi32((__m128i)h) << 16;
#else
  const U word = __builtin_convertvector(h, U) << 16;
#endif
  return (F)word;
}
/// The float16 values with these bits.
VEC_INLINE F widen_half(H h) {
#if defined(VEC_AVX512)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(VEC_AVX2)
  return _mm256_cvtph_ps((__m128i)h);
#else
  const U word = __builtin_convertvector(h, U);
  const U sign = (word & 0x8000u) << 16, magnitude = word & 0x7fffu;
  const F small = __builtin_convertvector((I)magnitude, F) * 0x1p-24f;
  // Normal numbers move their exponent from 5 bits to 8; that of infinities and NaNs is the largest there is.
  const U normal = (magnitude << 13) + (magnitude >= 0x7c00u ? U{} + 0x70000000u : U{} + 0x38000000u);
  return (F)(sign | (magnitude < 0x400u ? (U)small : normal));
#endif
}
VEC_INLINE F load(const bfloat16* p) { return widen(*reinterpret_cast<const H*>(p)); }
VEC_INLINE F load(const float16* p) { return widen_half(*reinterpret_cast<const H*>(p)); }

/// Rounds to bfloat16: to nearest even, NaN kept quiet.
VEC_INLINE H narrow(F v) {
  const U word = (U)v;
  const U rounded = word + 0x7fffu + ((word >> 16) & 1u);
  const U nan = word | 0x400000u;
  const U result = (v != v ? nan : rounded) >> 16;
#if defined(VEC_AVX512)
  return (H)_mm512_cvtepi32_epi16((__m512i)result);
#elif defined(VEC_AVX2)
  const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
  return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(result, H);
#endif
}
/// Rounds to float16: to nearest even, 65520 and above to infinity, NaN kept quiet.
VEC_INLINE H narrow_half(F v) {
#if defined(VEC_AVX512)
  return (H)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(VEC_AVX2)
  return (H)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // As float16's constructor does it, every case computed and the right one chosen.
  const U word = (U)v;
  const U sign = (word >> 16) & 0x8000u;
  const I magnitude = (I)(word & 0x7fffffffu);
  const U nan = 0x7e00u | (((U)magnitude >> 13) & 0x3ffu);
  const U normal = ((U)magnitude - 0x38000000u + 0xfffu + (((U)magnitude >> 13) & 1u)) >> 13;
  const F shifted = (F)magnitude + 0.5f;
  U half = magnitude < 0x38800000 ? (U)shifted - 0x3f000000u : normal;
  half = magnitude >= 0x477ff000 ? U{} + 0x7c00u : half;
  half = magnitude > 0x7f800000 ? nan : half;
  return __builtin_convertvector(sign | half, H);
#endif
}
VEC_INLINE void store(float* p, F v) { *reinterpret_cast<F*>(p) = v; }
VEC_INLINE void store(bfloat16* p, F v) { *reinterpret_cast<H*>(p) = narrow(v); }
VEC_INLINE void store(float16* p, F v) { *reinterpret_cast<H*>(p) = narrow_half(v); }

/// The value that memory of type T would hold after storing v.
template <typename T>
VEC_INLINE F stored_as(F v) {
  if constexpr (dtype_of<T>::value == DType::f32) {
    return v;
  } else if constexpr (dtype_of<T>::value == DType::bf16) {
    return widen(narrow(v));
  } else {
    return widen_half(narrow_half(v));
  }
}

#if defined(VEC_AVX512)
VEC_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
/// The first n lanes from p, the others `fill`. Touches no memory beyond them.
VEC_INLINE F load_n(const float* p, int n, float fill = 0.0f) {
  return _mm512_mask_loadu_ps(splat(fill), first_lanes(n), p);
}
VEC_INLINE F load_n(const bfloat16* p, int n, float fill = 0.0f) {
  const H h = (H)_mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_mask_mov_ps(splat(fill), first_lanes(n), widen(h));
}
VEC_INLINE F load_n(const float16* p, int n, float fill = 0.0f) {
  const H h = (H)_mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_mask_mov_ps(splat(fill), first_lanes(n), widen_half(h));
}
VEC_INLINE void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
VEC_INLINE void store_n(bfloat16* p, F v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)narrow(v));
}
VEC_INLINE void store_n(float16* p, F v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)narrow_half(v));
}
#else
/// The first n lanes from p, the others `fill`. Touches no memory beyond them.
template <typename T>
VEC_INLINE F load_n(const T* p, int n, float fill = 0.0f) {
  T lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return select(iota() < n, load(lanes), splat(fill));
}
template <typename T>
VEC_INLINE void store_n(T* p, F v, int n) {
  T lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
#if defined(VEC_AVX2)
VEC_INLINE F load_n(const float* p, int n, float fill = 0.0f) {
  const I mask = iota() < n;
  return select(mask, _mm256_maskload_ps(p, (__m256i)mask), splat(fill));
}
VEC_INLINE void store_n(float* p, F v, int n) { _mm256_maskstore_ps(p, (__m256i)(iota() < n), v); }
#endif
#endif

/// Asks for the cache line of p, to be read or written soon.
VEC_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
VEC_INLINE void prefetch_to_write(void* p) { __builtin_prefetch(p, 1, 3); }

/// How many lanes of a register count: all of them, or the first n. Kernels write their loop body once and
/// get both.
struct Whole {};
struct Part {
  int n;
};
template <typename T>
VEC_INLINE F load(const T* p, Whole) {
  return load(p);
}
template <typename T>
VEC_INLINE F load(const T* p, Part part) {
  return load_n(p, part.n);
}
template <typename T>
VEC_INLINE void store(T* p, F v, Whole) {
  store(p, v);
}
template <typename T>
VEC_INLINE void store(T* p, F v, Part part) {
  store_n(p, v, part.n);
}
/// v with the lanes that do not count set to 0.
VEC_INLINE F keep(F v, Whole) { return v; }
VEC_INLINE F keep(F v, Part part) { return select(iota() < part.n, v, F{}); }

/// Calls body(i, lanes) for i = begin, begin + kLanes, ... below end; lanes is Whole, or Part at the end.
template <typename Body>
VEC_INLINE void for_lanes(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, Whole{});
  if (i < end) body(i, Part{static_cast<int>(end - i)});
}

/// As for_lanes, with a third argument to body: one of four accumulators, taken in turn so that additions
/// need not wait for each other. The order of additions depends on the range alone.
template <typename Body>
VEC_INLINE void for_lanes_in_fours(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    body(i, Whole{}, 0);
    body(i + kLanes, Whole{}, 1);
    body(i + 2 * kLanes, Whole{}, 2);
    body(i + 3 * kLanes, Whole{}, 3);
  }
  for (; i + kLanes <= end; i += kLanes) body(i, Whole{}, 0);
  if (i < end) body(i, Part{static_cast<int>(end - i)}, 1);
}

/// Calls visit(float{}) for DType::f32, visit(float16{}) for DType::f16, visit(bfloat16{}) otherwise: the
/// caller has checked that it is one of the three.
template <typename Visit>
VEC_INLINE void visit_dtype(DType dtype, Visit visit) {
  if (dtype == DType::f32) {
    visit(float{});
  } else if (dtype == DType::f16) {
    visit(float16{});
  } else {
    visit(bfloat16{});
  }
}

/// Calls visit(float{}) for DType::f32, visit(Short{}) otherwise.
template <typename Short, typename Visit>
VEC_INLINE void visit_either(Short, DType dtype, Visit visit) {
  if (dtype == DType::f32) {
    visit(float{});
  } else {
    visit(Short{});
  }
}
/// visit(Short{}) with the 16-bit type of a computation whose every tensor is of that type or of fp32: the
/// caller has checked that bfloat16 and float16 do not meet in it, for which no code is generated.
template <typename Visit>
VEC_INLINE void visit_short(bool has_f16, Visit visit) {
  if (has_f16) {
    visit(float16{});
  } else {
    visit(bfloat16{});
  }
}
template <typename Visit>
VEC_INLINE void visit_dtypes(DType a, DType b, Visit visit) {
  if (a == DType::f32 && b == DType::f32) return visit(float{}, float{});
  visit_short(a == DType::f16 || b == DType::f16, [&](auto type) VEC_LAMBDA {
    if (a == DType::f32) {
      visit(float{}, type);
    } else {
      visit_either(type, b, [&](auto y) VEC_LAMBDA { visit(type, y); });
    }
  });
}

/// NaN in b comes through; NaN in a does not (as the x86 instructions do it).
#if defined(VEC_X86)
VEC_INLINE F max(F a, F b) { return VEC_X86(max_ps)(a, b); }
VEC_INLINE F min(F a, F b) { return VEC_X86(min_ps)(a, b); }
#else
VEC_INLINE F max(F a, F b) { return a > b ? a : b; }
VEC_INLINE F min(F a, F b) { return a < b ? a : b; }
#endif
VEC_INLINE F abs(F a) {
  const U u = (U)a & 0x7fffffffu;
  return (F)u;
}
VEC_INLINE F sqrt(F a) {
#if defined(VEC_X86)
  return VEC_X86(sqrt_ps)(a);
#else
  F root;
  for (int i = 0; i < kLanes; ++i) root[i] = __builtin_sqrtf(a[i]);
  return root;
#endif
}

/// Folds the lanes pairwise, halves first.
template <typename Op>
VEC_INLINE float fold(F v, Op op) {
#if defined(VEC_X86)
#if defined(VEC_AVX512)
  const __m256 eight = op(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(VEC_AVX2)
  const __m128 four = op(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  const __m128 four = v;
#endif
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return op(two, _mm_shuffle_ps(two, two, 1))[0];
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] = op(lanes[i], lanes[i + step]);
  }
  return lanes[0];
#endif
}
VEC_INLINE float sum(F v) {
  return fold(v, [](auto a, auto b) VEC_LAMBDA { return a + b; });
}
VEC_INLINE float sum(const F (&parts)[4]) { return sum((parts[0] + parts[1]) + (parts[2] + parts[3])); }
VEC_INLINE float max_lane(F v) {
  return fold(v, [](auto a, auto b) VEC_LAMBDA { return a > b ? a : b; });
}

/// e^x to 2 ulp: Cody-Waite reduction, degree-6 polynomial (Cephes expf coefficients). 0 below -87.3, inf
/// above 88.72, NaN for NaN.
VEC_INLINE F exp(F x) {
  const F bounded = max(splat(-87.33f), min(splat(89.0f), x));
  const F scaled = bounded * 1.44269504088896341f;
  const F shifted = scaled + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer in the low bits
  const F n = shifted - 12582912.0f;
  const F r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  // In pairs instead of Horner's way: the chain of dependent operations is shorter.
  const F r2 = r * r;
  const F p0 = 1.9875691500e-4f * r + 1.3981999507e-3f;
  const F p1 = 8.3334519073e-3f * r + 4.1665795894e-2f;
  const F p2 = 1.6666665459e-1f * r + 5.0000001201e-1f;
  const F p = (p0 * (r2 * r2) + (p1 * r2 + p2)) * r2 + (r + 1.0f);
#if defined(VEC_AVX512)
  const F result = _mm512_scalef_ps(p, n);
#else
  // 2^n in two factors, so that n = 128 does not overflow on the way to a finite result (and overflows after
  // it). The integer n stands in the low bits of `shifted`.
  const I k = (I)shifted - 0x4b400000;
  const I half = k >> 1;
  const I bits0 = (half + 127) << 23;
  const I bits1 = (k - half + 127) << 23;
  const F result = p * (F)bits0 * (F)bits1;
#endif
  return select(x < splat(-87.33f), F{}, result);
}

/// To about 2 ulp: near zero the quotient would cancel, there the series has the precision of a float.
VEC_INLINE F tanh_of(F x) {
  const F z = max(splat(-10.0f), min(splat(10.0f), x)), square = z * z;
  const F series =
      z * (1.0f +
           square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
  return select(abs(x) < 0.3f, series, 1.0f - 2.0f / (1.0f + exp(2.0f * z)));
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
