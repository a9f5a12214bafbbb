#pragma once
/// What fuzz targets share. Each tests/fuzz/<name>.cpp is one of them: LLVMFuzzerTestOneInput gives bytes to
/// a reader. tests/fuzz.sh builds them with libFuzzer; replay_test.cpp runs them over tests/fuzz/corpus in
/// every build.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace tessera::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

inline std::vector<std::byte> bytes_of(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  return {bytes, bytes + size};
}

/// An invariant; what breaks it ends the fuzzer as a crash does.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

/// Whether `read` took its input. It may refuse with one of `Refusals` and nothing else.
template <typename... Refusals, typename Read>
bool accepts(const Read& read) {
  const auto refused = [](const std::exception& error) {
    return (... || (dynamic_cast<const Refusals*>(&error) != nullptr));
  };
  try {
    read();
    return true;
  } catch (const std::exception& error) {
    if (!refused(error)) throw;
    return false;
  }
}

/// What `parse` made of its input; nothing if it refused it with one of `Refusals`.
template <typename... Refusals, typename Parse>
auto accepted(const Parse& parse) {
  std::optional<decltype(parse())> value;
  accepts<Refusals...>([&] { value = parse(); });
  return value;
}

}  // namespace tessera::fuzz
