#include "comm/reduce.hpp"

#include <algorithm>
#include <array>
#include <bit>

namespace tessera {
namespace {

/// Storage type, type of the sum, and the way between them.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored x) { return x; }
  static Stored store(Sum x) { return x; }
};

struct BFloat16 {
  using Stored = bfloat16;
  using Sum = float;
  static Sum load(Stored x) { return static_cast<float>(x); }
  static Stored store(Sum x) { return bfloat16(x); }
};

struct Half {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored x) { return half_to_float(x); }
  static Stored store(Sum x) { return float_to_half(x); }
};

/// Integers wrap round, as they do on every machine, without being undefined.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Bits = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Bits>(a) + static_cast<Bits>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T larger(T a, T b) {
  return a > b || a != a ? a : b;  // a != a: NaN stays
}

template <typename Type>
void reduce(ReduceOp op, std::span<const void* const> sources, std::span<void* const> targets,
            std::int64_t count) {
  using Stored = typename Type::Stored;
  constexpr std::int64_t kChunk = 2048;  // its sums stay in the first-level cache
  std::array<typename Type::Sum, kChunk> sums;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, count - begin);
    for (std::size_t r = 0; r < sources.size(); ++r) {
      const auto* source = static_cast<const Stored*>(sources[r]) + begin;
      if (r == 0) {
        for (std::int64_t i = 0; i < n; ++i) sums[i] = Type::load(source[i]);
      } else if (op == ReduceOp::sum) {
        for (std::int64_t i = 0; i < n; ++i) sums[i] = add(sums[i], Type::load(source[i]));
      } else {
        for (std::int64_t i = 0; i < n; ++i) sums[i] = larger(sums[i], Type::load(source[i]));
      }
    }
    for (void* target : targets) {
      auto* out = static_cast<Stored*>(target) + begin;
      for (std::int64_t i = 0; i < n; ++i) out[i] = Type::store(sums[i]);
    }
  }
}

}  // namespace

float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
  }
  const std::uint32_t wide = exponent == 0x1fu ? 0xffu : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

std::uint16_t float_to_half(float value) {
  const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN keeps its upper bits
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the subnormal, rounded, in the lowest bits of the sum.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(sum) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

bool is_reducible(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::f64:
    case DType::bf16:
    case DType::f16:
    case DType::i32:
    case DType::i64:
      return true;
    default:
      return false;
  }
}

void reduce_in_order(DType dtype, ReduceOp op, std::span<const void* const> sources,
                     std::span<void* const> targets, std::int64_t count) {
  switch (dtype) {
    case DType::f32:
      return reduce<Plain<float>>(op, sources, targets, count);
    case DType::f64:
      return reduce<Plain<double>>(op, sources, targets, count);
    case DType::bf16:
      return reduce<BFloat16>(op, sources, targets, count);
    case DType::f16:
      return reduce<Half>(op, sources, targets, count);
    case DType::i32:
      return reduce<Plain<std::int32_t>>(op, sources, targets, count);
    case DType::i64:
      return reduce<Plain<std::int64_t>>(op, sources, targets, count);
    default:
      detail::fail<InternalError>(__FILE__, __LINE__, "", detail::concat("reduction of ", dtype));
  }
}

}  // namespace tessera
