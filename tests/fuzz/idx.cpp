/// A .idx of either layout beside a .bin of zeros that is as long as the .idx says. What is accepted is
/// written again, byte for byte.

#include <cstring>

#include "data/file.hpp"
#include "data/indexed_format.hpp"
#include "fuzz.hpp"
#include "tessera/data/indexed_dataset.hpp"

using namespace tessera;

namespace {

template <typename T>
T at(const std::uint8_t* data, std::size_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

template <typename T>
void put(std::vector<std::byte>& out, T value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

bool is_old(const std::uint8_t* data, std::size_t size) {
  return size >= 64 && std::memcmp(data, indexed::kOldMagic, 8) == 0;
}

/// The same of the older layout: behind the header lie dimensions, pointers and sizes.
std::size_t old_token_bytes(const std::uint8_t* data, std::size_t size) {
  const auto width = at<std::uint64_t>(data, 24), sequences = at<std::uint64_t>(data, 32);
  if (width > 8 || sequences > size / 24) return 0;
  const std::size_t sizes_at = 48 + (at<std::uint64_t>(data, 48) != 0 ? 8 : 0) + 16 * (sequences + 1);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < sequences && sizes_at + 8 * (i + 1) <= size; ++i) {
    const auto length = at<std::int64_t>(data, sizes_at + 8 * i);
    if (length > 4096) return 4096;
    if (length > 0) bytes += static_cast<std::size_t>(length) * width;
    if (bytes > 4096) return 4096;
  }
  return bytes;
}

/// By the fuzzer's own reading; at most 4 KiB.
std::size_t token_bytes(const std::uint8_t* data, std::size_t size) {
  if (is_old(data, size)) return old_token_bytes(data, size);
  if (size < 34 || data[17] < 1 || data[17] > 8) return 0;
  const std::size_t width = size_of(indexed::kTokenTypes[data[17] - 1u]);
  const auto sequences = at<std::uint64_t>(data, 18);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < sequences && 34 + 4 * (i + 1) <= size; ++i) {
    const auto length = at<std::int32_t>(data, 34 + 4 * i);
    if (length > 0) bytes += static_cast<std::size_t>(length) * width;
    if (bytes > 4096) return 4096;
  }
  return bytes;
}

std::vector<std::byte> write(const IndexedDataset& dataset) {
  std::vector<std::byte> out;
  for (const char c : indexed::kMagic) put(out, c);
  put(out, indexed::kVersion);
  put(out, static_cast<std::uint8_t>(token_code(dataset.dtype())));
  put(out, static_cast<std::uint64_t>(dataset.sequences()));
  put(out, static_cast<std::uint64_t>(dataset.documents() + 1));
  std::int64_t pointer = 0;
  for (std::int64_t i = 0; i < dataset.sequences(); ++i) put(out, dataset.length(i));
  for (std::int64_t i = 0; i < dataset.sequences(); ++i) {
    put(out, pointer);
    pointer += dataset.length(i) * static_cast<std::int64_t>(size_of(dataset.dtype()));
  }
  for (std::int64_t d = 0; d <= dataset.documents(); ++d) put(out, dataset.document_begin(d));
  for (std::int64_t i = 0; dataset.has_modes() && i < dataset.sequences(); ++i) put(out, dataset.mode(i));
  return out;
}

std::vector<std::byte> write_old(const IndexedDataset& dataset, bool documents) {
  std::vector<std::byte> out;
  for (const char c : indexed::kOldMagic) put(out, c);
  put(out, indexed::kVersion);
  put(out, static_cast<std::uint64_t>(dataset.dtype() == DType::u32 ? 9 : token_code(dataset.dtype())));
  put(out, static_cast<std::uint64_t>(size_of(dataset.dtype())));
  for (int i = 0; i < 2; ++i) put(out, static_cast<std::uint64_t>(dataset.sequences()));
  if (documents) put(out, static_cast<std::uint64_t>(dataset.documents() + 1));
  for (std::int64_t i = 0; i <= dataset.sequences(); ++i) put(out, i);
  std::int64_t pointer = 0;
  put(out, pointer);
  for (std::int64_t i = 0; i < dataset.sequences(); ++i) put(out, pointer += dataset.length(i));
  for (std::int64_t i = 0; i < dataset.sequences(); ++i)
    put(out, static_cast<std::int64_t>(dataset.length(i)));
  for (std::int64_t d = 0; documents && d <= dataset.documents(); ++d) put(out, dataset.document_begin(d));
  return out;
}

void check(const IndexedDataset& dataset, const std::vector<std::byte>& index) {
  std::int64_t tokens = 0;
  for (std::int64_t d = 0; d < dataset.documents(); ++d)
    tokens += static_cast<std::int64_t>(dataset.document(d).size());
  fuzz::require(tokens == dataset.tokens(), "documents do not hold all tokens");
  const bool old = dataset.format() == IndexFormat::tntidx;
  const bool documents = old && std::to_integer<int>(index[48]) + std::to_integer<int>(index[49]) != 0;
  fuzz::require((old ? write_old(dataset, documents) : write(dataset)) == index,
                "what was read is not written the same");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::vector<std::byte> index = fuzz::bytes_of(data, size);
  std::unique_ptr<IndexedDataset> dataset;
  const auto open = [&] {
    dataset = std::make_unique<IndexedDataset>(
        "input", std::make_unique<files::InputFile>("input.idx", index),
        std::make_unique<files::InputFile>("input.bin", std::vector<std::byte>(token_bytes(data, size))));
  };
  if (fuzz::accepts<DataError>(open)) check(*dataset, index);
  return 0;
}
