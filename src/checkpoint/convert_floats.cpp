#include <bit>
#include <cstring>

#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

struct Half {
  std::uint16_t bits;
};

float to_float(float value) { return value; }
float to_float(bfloat16 value) { return static_cast<float>(value); }
float to_float(Half half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
  const std::uint32_t exponent = half.bits >> 10 & 31u;
  const std::uint32_t fraction = half.bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal or zero: exact in float
  return sign ? -magnitude : magnitude;
}

void from_float(float value, float& out) { out = value; }
void from_float(float value, bfloat16& out) { out = bfloat16(value); }
void from_float(float value, Half& out) {
  const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = word >> 16 & 0x8000u;
  const std::uint32_t magnitude = word & 0x7fffffffu;
  std::uint32_t bits;
  if (magnitude > 0x7f800000u) {
    bits = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {
    bits = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below the smallest normal half: adding 0.5 makes the float unit round at 2^-24 for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    bits = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  } else {
    bits = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<std::uint16_t>(sign | bits);
}

template <typename From, typename To>
void convert(std::span<const std::byte> in, std::span<std::byte> out) {
  const std::size_t count = in.size() / sizeof(From);
  for (std::size_t i = 0; i < count; ++i) {
    From source;
    To target;
    std::memcpy(&source, in.data() + i * sizeof(From), sizeof source);
    from_float(to_float(source), target);
    std::memcpy(out.data() + i * sizeof(To), &target, sizeof target);
  }
}

template <typename Visit>
void visit_storage(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32:
      return visit(float{});
    case DType::bf16:
      return visit(bfloat16{});
    case DType::f16:
      return visit(Half{});
    default:
      TESSERA_CHECK(false, "weights are float32, bfloat16 or float16, not ", dtype);
  }
}

}  // namespace

void convert_floats(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out) {
  TESSERA_CHECK(in.size() % size_of(from) == 0 && in.size() / size_of(from) * size_of(to) == out.size(),
                in.size(), " bytes of ", from, " into ", out.size(), " bytes of ", to);
  visit_storage(from, [&](auto source) {
    visit_storage(to, [&](auto target) { convert<decltype(source), decltype(target)>(in, out); });
  });
}

}  // namespace tessera
