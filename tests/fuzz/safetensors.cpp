/// A whole safetensors file. What is accepted is laid out again by our writer and read back the same.

#include <algorithm>
#include <tuple>

#include "checkpoint/safetensors_header.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;
using namespace tessera::checkpoint_detail;

namespace {

using Fact = std::tuple<std::string, DType, Shape, std::uint64_t>;

std::vector<Fact> facts_of(const SafetensorsHeader& header) {
  std::vector<Fact> facts;
  for (const SafetensorsEntry& entry : header.entries) {
    facts.emplace_back(entry.name, entry.dtype, entry.shape, entry.end - entry.begin);
  }
  std::sort(facts.begin(), facts.end(),
            [](const Fact& a, const Fact& b) { return std::get<0>(a) < std::get<0>(b); });
  return facts;
}

SafetensorsHeader read(std::string_view file, std::uint64_t file_bytes) {
  const auto bytes = std::as_bytes(std::span(file));
  const std::uint64_t length = header_length("input", bytes.first<8>(), file_bytes);
  return parse_header("input", file.substr(8, length), 8 + length, file_bytes);
}

void check(const SafetensorsHeader& header, std::uint64_t file_bytes) {
  std::vector<TensorSpec> specs;
  for (const SafetensorsEntry& entry : header.entries) {
    fuzz::require(entry.begin <= entry.end && entry.end <= file_bytes, "an entry lies outside the file");
    specs.push_back({entry.name, entry.dtype, entry.shape});
  }
  const SafetensorsLayout layout = lay_out(specs, header.metadata);
  const SafetensorsHeader again = read(layout.prefix, layout.file_bytes);
  fuzz::require(facts_of(again) == facts_of(header) && again.metadata == header.metadata,
                "what was read is not read back the same");
}

/// The largest number in the header, at most 18 digits long: how long a file may claim to be.
std::uint64_t largest_number(std::string_view text) {
  std::uint64_t largest = 0, number = 0;
  for (const char c : text) {
    number = c < '0' || c > '9' || number > 100'000'000'000'000'000
                 ? 0
                 : 10 * number + static_cast<unsigned>(c - '0');
    largest = std::max(largest, number);
  }
  return largest;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  const std::string_view file = fuzz::text_of(data, size);
  SafetensorsHeader header;
  std::uint64_t file_bytes = size;
  // A fuzzer does not write gigabytes: where the file ends with its header, it is as long as that says.
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | data[i];
  if (length == size - 8) file_bytes += largest_number(file.substr(8));
  if (fuzz::accepts<CheckpointError>([&] { header = read(file, file_bytes); })) check(header, file_bytes);
  return 0;
}
