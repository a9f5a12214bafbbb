#include <cstring>

#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

template <typename From, typename To>
void convert(std::span<const std::byte> in, std::span<std::byte> out) {
  const std::size_t count = in.size() / sizeof(From);
  for (std::size_t i = 0; i < count; ++i) {
    From source;
    std::memcpy(&source, in.data() + i * sizeof(From), sizeof source);
    const To target(static_cast<float>(source));
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
