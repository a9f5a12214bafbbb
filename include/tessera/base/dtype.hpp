#pragma once
/// Element types: the DType tag, the 16-bit storage types, and a visitor from tag to C++ type.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

#include "tessera/base/error.hpp"

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif
/// Inlined for certain, so that no out-of-line copy compiled for one instruction set is linked into code for
/// another.
#define TESSERA_INLINE TESSERA_HOST_DEVICE inline __attribute__((always_inline))

namespace tessera {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, u32, u16, i16, i8, u8 };

/// Storage of a bfloat16: the upper half of a float. Arithmetic is done in float.
struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  /// Rounds to nearest even; NaN stays NaN.
  TESSERA_INLINE explicit bfloat16(float value) {
    std::uint32_t word;
    __builtin_memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((word >> 16) | 0x40u);
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
  }
  TESSERA_INLINE explicit operator float() const {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
  }
};

/// Storage of an IEEE half: 5 bits of exponent, 10 of fraction. Arithmetic is done in float.
struct float16 {
  std::uint16_t bits;

  float16() = default;
  /// Rounds to nearest even; what is too large becomes infinite; NaN stays NaN, made quiet.
  TESSERA_INLINE explicit float16(float value) {
    std::uint32_t word;
    __builtin_memcpy(&word, &value, sizeof word);
    const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more rounds beyond the largest half
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // a normal half: rebase the exponent, round away 13 bits
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else {  // below 2^-14, a multiple of 2^-24: adding 0.5 leaves just that multiple in the fraction
      float small;
      __builtin_memcpy(&small, &magnitude, sizeof small);
      small += 0.5f;
      __builtin_memcpy(&half, &small, sizeof half);
      half -= 0x3f000000u;
    }
    bits = static_cast<std::uint16_t>(sign | half);
  }
  TESSERA_INLINE explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0) {
      const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
      return sign != 0 ? -value : value;
    }
    const std::uint32_t word =
        sign | (fraction << 13) | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23);
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
  }
};

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::u16:
    case DType::i16:
      return 2;
    case DType::i8:
    case DType::u8:
      return 1;
  }
  return 0;
}

/// "float32", "bfloat16", ... as used in messages, YAML and manifests.
std::string_view name_of(DType dtype);
inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }

template <typename T>
struct dtype_of;
// clang-format off
template <> struct dtype_of<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of<double> { static constexpr DType value = DType::f64; };
template <> struct dtype_of<bfloat16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of<float16> { static constexpr DType value = DType::f16; };
template <> struct dtype_of<std::int32_t> { static constexpr DType value = DType::i32; };
template <> struct dtype_of<std::int64_t> { static constexpr DType value = DType::i64; };
template <> struct dtype_of<std::uint32_t> { static constexpr DType value = DType::u32; };
template <> struct dtype_of<std::uint16_t> { static constexpr DType value = DType::u16; };
template <> struct dtype_of<std::int16_t> { static constexpr DType value = DType::i16; };
template <> struct dtype_of<std::int8_t> { static constexpr DType value = DType::i8; };
template <> struct dtype_of<std::uint8_t> { static constexpr DType value = DType::u8; };
// clang-format on

/// Calls `visit(T{})` with T = float, bfloat16 or float16: the types activations and weights are stored in.
/// Errors: InvalidArgument for any other dtype, naming `what`.
template <typename Visit>
decltype(auto) visit_float(DType dtype, const char* what, Visit&& visit) {
  switch (dtype) {
    case DType::f32:
      return visit(float{});
    case DType::bf16:
      return visit(bfloat16{});
    case DType::f16:
      return visit(float16{});
    default:
      detail::fail<InvalidArgument>(
          __FILE__, __LINE__, "",
          detail::concat(what, ": dtype ", dtype, " is not supported; use float32, bfloat16 or float16"));
  }
}

}  // namespace tessera
