#include <bit>
#include <cstring>
#include <type_traits>

#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

/// float16(value) without branches: what a compiler can do for several values at once.
TESSERA_INLINE std::uint16_t half_bits(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
  const std::uint32_t small =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t half = magnitude >= 0x38800000u ? normal : small;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : half;
  return static_cast<std::uint16_t>(sign | half);
}

template <typename To>
TESSERA_INLINE To rounded(float value) {
  if constexpr (std::is_same_v<To, float16>) return std::bit_cast<float16>(half_bits(value));
  return To(value);
}

template <typename From, typename To>
void convert(std::span<const std::byte> in, std::span<std::byte> out) {
  const std::size_t count = in.size() / sizeof(From);
  for (std::size_t i = 0; i < count; ++i) {
    From source;
    std::memcpy(&source, in.data() + i * sizeof(From), sizeof source);
    const To target = rounded<To>(static_cast<float>(source));
    std::memcpy(out.data() + i * sizeof(To), &target, sizeof target);
  }
}

}  // namespace

void convert_floats(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out) {
  TESSERA_CHECK(in.size() % size_of(from) == 0 && in.size() / size_of(from) * size_of(to) == out.size(),
                in.size(), " bytes of ", from, " into ", out.size(), " bytes of ", to);
  visit_float(from, "weights", [&](auto source) {
    visit_float(to, "weights", [&](auto target) { convert<decltype(source), decltype(target)>(in, out); });
  });
}

}  // namespace tessera
