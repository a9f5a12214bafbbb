#include "comm/reduce.hpp"

#include <algorithm>
#include <array>

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

/// 16 bits, summed in fp32.
template <typename T>
struct Short {
  using Stored = T;
  using Sum = float;
  static Sum load(Stored x) { return static_cast<float>(x); }
  static Stored store(Sum x) { return Stored(x); }
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
  return a > b || a != a ? a : b;  // NOLINT(misc-redundant-expression): a != a means that NaN stays
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
      return reduce<Short<bfloat16>>(op, sources, targets, count);
    case DType::f16:
      return reduce<Short<float16>>(op, sources, targets, count);
    case DType::i32:
      return reduce<Plain<std::int32_t>>(op, sources, targets, count);
    case DType::i64:
      return reduce<Plain<std::int64_t>>(op, sources, targets, count);
    default:
      detail::fail<InternalError>(__FILE__, __LINE__, "", detail::concat("reduction of ", dtype));
  }
}

}  // namespace tessera
