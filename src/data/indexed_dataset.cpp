#include "tessera/data/indexed_dataset.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "data/file.hpp"
#include "data/indexed_format.hpp"
#include "tessera/base/hash.hpp"

namespace tessera {
namespace {

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

files::Keep kept_index(DataLoading loading) {
  return loading == DataLoading::mmap   ? files::Keep::small
         : loading == DataLoading::lazy ? files::Keep::nothing
                                        : files::Keep::all;
}
files::Keep kept_tokens(DataLoading loading) {
  return loading == DataLoading::cached ? files::Keep::all : files::Keep::nothing;
}

std::string without_suffix(const std::string& prefix) {
  for (const char* suffix : {".idx", ".bin"}) {
    if (prefix.ends_with(suffix)) return prefix.substr(0, prefix.size() - 4);
  }
  return prefix;
}

constexpr const char* kGivePrefix =
    "A dataset is the pair PREFIX.idx and PREFIX.bin that `tessera preprocess` writes; give its PREFIX";
/// Entries of the index that are looked through at a time.
constexpr std::int64_t kEntriesAtOnce = 1 << 16;
constexpr const char* kRemake = "Make the pair again with `tessera preprocess`, or copy both files again";

constexpr const char* kRecopy = "Copy both files again";

/// Converts `count` stored tokens to ids; returns the first position that is no id in [0, limit), or -1.
template <typename T>
std::int64_t to_ids(const std::byte* from, std::int32_t* to, std::int64_t count, std::int64_t limit) {
  std::int64_t bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const T value = load<T>(from + i * static_cast<std::int64_t>(sizeof(T)));
    bool good;
    if constexpr (std::is_floating_point_v<T>) {
      good = value >= T{0} && static_cast<double>(value) < static_cast<double>(limit) &&
             value == std::floor(value);
    } else if constexpr (std::is_signed_v<T>) {
      good = value >= 0 && static_cast<std::int64_t>(value) < limit;
    } else {
      good = static_cast<std::int64_t>(value) < limit;
    }
    to[i] = good ? static_cast<std::int32_t>(value) : -1;
    bad |= !good;
  }
  return bad == 0 ? -1 : std::find(to, to + count, -1) - to;
}

using Convert = std::int64_t (*)(const std::byte*, std::int32_t*, std::int64_t, std::int64_t);

Convert converter(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return to_ids<std::uint8_t>;
    case DType::i8:
      return to_ids<std::int8_t>;
    case DType::i16:
      return to_ids<std::int16_t>;
    case DType::u16:
      return to_ids<std::uint16_t>;
    case DType::i32:
      return to_ids<std::int32_t>;
    case DType::u32:
      return to_ids<std::uint32_t>;
    case DType::i64:
      return to_ids<std::int64_t>;
    case DType::f32:
      return to_ids<float>;
    default:
      return to_ids<double>;
  }
}

double stored_value(const std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::u8:
      return load<std::uint8_t>(at);
    case DType::i8:
      return load<std::int8_t>(at);
    case DType::i16:
      return load<std::int16_t>(at);
    case DType::u16:
      return load<std::uint16_t>(at);
    case DType::i32:
      return load<std::int32_t>(at);
    case DType::u32:
      return load<std::uint32_t>(at);
    case DType::i64:
      return static_cast<double>(load<std::int64_t>(at));
    case DType::f32:
      return load<float>(at);
    default:
      return load<double>(at);
  }
}

}  // namespace

int token_code(DType dtype) {
  const auto at = std::find(indexed::kTokenTypes.begin(), indexed::kTokenTypes.end(), dtype);
  TESSERA_CHECK(at != indexed::kTokenTypes.end(), "tokens cannot be stored as ", dtype);
  return static_cast<int>(at - indexed::kTokenTypes.begin()) + 1;
}

IndexedDataset::IndexedDataset(const std::string& prefix, IndexedDatasetOptions options)
    // In braces, so that the .idx is opened first.
    : IndexedDataset{without_suffix(prefix),
                     std::make_unique<files::InputFile>(without_suffix(prefix) + ".idx",
                                                        kept_index(options.loading), kGivePrefix),
                     std::make_unique<files::InputFile>(without_suffix(prefix) + ".bin",
                                                        kept_tokens(options.loading), kGivePrefix),
                     options} {}

IndexedDataset::IndexedDataset(const std::string& prefix, std::unique_ptr<files::InputFile> index,
                               std::unique_ptr<files::InputFile> tokens, IndexedDatasetOptions options)
    : prefix_(prefix), options_(options), index_(std::move(index)), tokens_file_(std::move(tokens)) {
  TESSERA_CHECK(options.vocab_size >= 0, "vocab_size = ", options.vocab_size);
  parse_header();
  check_lengths();
  check_documents();
  options_.on_progress = nullptr;
}

IndexedDataset::~IndexedDataset() = default;

void IndexedDataset::parse_header() {
  const std::string& path = index_->path();
  const std::int64_t size = index_->size();
  TESSERA_ENSURE(DataError, size >= indexed::kHeaderBytes, path, ": has ", size, " bytes, less than the ",
                 indexed::kHeaderBytes, " of the header: it is cut off. ", kRemake);
  std::array<std::byte, 9> magic;
  index_->read(0, magic);
  if (std::memcmp(magic.data(), indexed::kOldMagic, sizeof indexed::kOldMagic) == 0)
    return parse_old_header();
  TESSERA_ENSURE(DataError, std::memcmp(magic.data(), indexed::kMagic, sizeof indexed::kMagic) == 0, path,
                 ": byte 0: does not begin with MMIDIDX or TNTIDX: it is not an indexed dataset. ", kRemake);
  parse_new_header();
}

void IndexedDataset::parse_new_header() {
  const std::string& path = index_->path();
  const std::int64_t size = index_->size();
  std::array<std::byte, indexed::kHeaderBytes> header;
  index_->read(0, header);
  const std::byte* at = header.data();
  const auto version = load<std::uint64_t>(at + 9);
  TESSERA_ENSURE(DataError, version == indexed::kVersion, path, ": byte 9: version ", version,
                 ", only version 1 is known. ", kRemake);
  const int code = load<std::uint8_t>(at + 17);
  TESSERA_ENSURE(DataError, code >= 1 && code <= 8, path, ": byte 17: token type code ", code,
                 " is not one of 1 to 8. ", kRemake);
  dtype_ = indexed::kTokenTypes[static_cast<std::size_t>(code) - 1];
  const auto sequences = load<std::uint64_t>(at + 18);
  const auto entries = load<std::uint64_t>(at + 26);
  // Each count is first bounded by the file's own size, so that none of the products below can overflow.
  const auto bytes = static_cast<std::uint64_t>(size);
  TESSERA_ENSURE(DataError, sequences <= bytes / 12, path, ": byte 18: ", sequences,
                 " sequences cannot be described in a file of ", size, " bytes: it is cut off or damaged. ",
                 kRemake);
  TESSERA_ENSURE(DataError, entries <= bytes / 8, path, ": byte 26: a document index of ", entries,
                 " entries does not fit a file of ", size, " bytes: it is cut off or damaged. ", kRemake);
  sequences_ = static_cast<std::int64_t>(sequences);
  document_entries_ = static_cast<std::int64_t>(entries);
  lengths_at_ = indexed::kHeaderBytes;
  pointers_at_ = lengths_at_ + 4 * sequences_;
  documents_at_ = pointers_at_ + 8 * sequences_;
  const std::int64_t expected = documents_at_ + 8 * document_entries_;
  has_modes_ = sequences_ > 0 && size == expected + sequences_;
  TESSERA_ENSURE(DataError, size == expected || has_modes_, path, ": has ", size, " bytes, but ", sequences_,
                 " sequences and ", document_entries_, " document entries take ", expected, " (or ",
                 expected + sequences_, " with modes): it is ", size < expected ? "cut off" : "too long",
                 ". ", kRemake);
}

void IndexedDataset::parse_old_header() {
  const std::string& path = index_->path();
  TESSERA_ENSURE(DataError, index_->size() >= indexed::kOldHeaderBytes + 16, path, ": has ", index_->size(),
                 " bytes, less than the shortest index of TNTIDX: it is cut off. ", kRecopy);
  std::array<std::uint64_t, 7> words;  // the last: documents in Megatron's files, in fairseq's an offset, 0
  index_->read(8, std::as_writable_bytes(std::span(words)));
  const auto [version, code, width, sequences, sizes, documents, unused] = words;
  TESSERA_ENSURE(DataError, version == indexed::kVersion, path, ": byte 8: version ", version,
                 ", only version 1 is known. ", kRecopy);
  TESSERA_ENSURE(DataError, code != 6 && code != 7, path, ": byte 16: token type code ", code,
                 " is of floats, which are no tokens. Make the dataset again with `tessera preprocess`");
  TESSERA_ENSURE(DataError, (code >= 1 && code <= 5) || (code >= 8 && code <= 9), path,
                 ": byte 16: token type code ", code, " is not one of 1 to 5, 8 and 9. ", kRecopy);
  dtype_ = code == 9 ? DType::u32 : indexed::kTokenTypes[static_cast<std::size_t>(code) - 1];
  TESSERA_ENSURE(DataError, width == size_of(dtype_), path, ": byte 24: tokens of ", width, " bytes, but ",
                 dtype_, " has ", size_of(dtype_), ". ", kRecopy);
  const auto most = static_cast<std::uint64_t>(index_->size()) / 8;
  TESSERA_ENSURE(DataError, sequences <= most / 3, path, ": byte 32: ", sequences,
                 " sequences cannot be described in a file of ", index_->size(),
                 " bytes: it is cut off or damaged. ", kRecopy);
  TESSERA_ENSURE(DataError, sizes == sequences, path, ": byte 40: ", sizes, " sizes of ", sequences,
                 " sequences: tokens have one dimension, and what this holds has others. ", kRecopy);
  format_ = IndexFormat::tntidx;
  sequences_ = static_cast<std::int64_t>(sequences);
  pointer_bytes_ = static_cast<std::int64_t>(width);
  place_old_arrays(documents);
}

/// The word after the sizes' count is 0 in fairseq's files, the first offset; in Megatron's it is not.
void IndexedDataset::place_old_arrays(std::uint64_t document_entries) {
  const std::string& path = index_->path();
  has_documents_ = document_entries != 0;
  TESSERA_ENSURE(DataError, document_entries <= static_cast<std::uint64_t>(index_->size()) / 8, path,
                 ": byte 48: a document index of ", document_entries, " entries does not fit a file of ",
                 index_->size(), " bytes: it is cut off or damaged. ", kRecopy);
  document_entries_ = has_documents_ ? static_cast<std::int64_t>(document_entries) : sequences_ + 1;
  const std::int64_t dimensions_at = indexed::kOldHeaderBytes + (has_documents_ ? 8 : 0);
  pointers_at_ = dimensions_at + 8 * (sequences_ + 1);
  lengths_at_ = pointers_at_ + 8 * (sequences_ + 1);
  documents_at_ = lengths_at_ + 8 * sequences_;
  const std::int64_t expected = documents_at_ + (has_documents_ ? 8 * document_entries_ : 0);
  TESSERA_ENSURE(DataError, index_->size() == expected, path, ": has ", index_->size(), " bytes, but ",
                 sequences_, " sequences and ", has_documents_ ? document_entries_ : 0,
                 " document entries take ", expected, ": it is ",
                 index_->size() < expected ? "cut off" : "too long", ". ", kRecopy);
}

/// Entries [first, first + count) of the array at byte `at` of the index.
template <typename T>
std::vector<T> IndexedDataset::entries(std::int64_t at, std::int64_t first, std::int64_t count) const {
  std::vector<T> out(static_cast<std::size_t>(count));
  index_->read(at + first * static_cast<std::int64_t>(sizeof(T)), std::as_writable_bytes(std::span(out)));
  return out;
}

/// Of both layouts.
std::vector<std::int64_t> IndexedDataset::lengths_of(std::int64_t first, std::int64_t count) const {
  if (format_ == IndexFormat::tntidx) return entries<std::int64_t>(lengths_at_, first, count);
  const auto lengths = entries<std::int32_t>(lengths_at_, first, count);
  return {lengths.begin(), lengths.end()};
}

void IndexedDataset::check_lengths() {
  const std::string& path = index_->path();
  const auto width = static_cast<std::int64_t>(size_of(dtype_));
  constexpr std::int64_t kLongest = std::numeric_limits<std::int32_t>::max();
  std::int64_t expected = 0;  // cannot overflow: checked against the size of the .bin in every turn
  for (std::int64_t first = 0; first < sequences_; first += kEntriesAtOnce) {
    if (options_.on_progress) options_.on_progress();
    const std::int64_t count = std::min(kEntriesAtOnce, sequences_ - first);
    const auto lengths = lengths_of(first, count);
    const auto pointers = entries<std::int64_t>(pointers_at_, first, count);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t i = first + k, length = lengths[static_cast<std::size_t>(k)],
                         pointer = pointers[static_cast<std::size_t>(k)];
      TESSERA_ENSURE(DataError, length >= 0 && length <= kLongest, path, ": byte ",
                     lengths_at_ + (format_ == IndexFormat::tntidx ? 8 : 4) * i, ": sequence ", i,
                     length < 0 ? " has the negative length " : " has the length ", length, ". ", kRemake);
      TESSERA_ENSURE(DataError, pointer == expected / pointer_bytes_, path, ": byte ", pointers_at_ + 8 * i,
                     ": sequence ", i, " points to ", format_ == IndexFormat::tntidx ? "token " : "byte ",
                     pointer, " of the .bin instead of ", expected / pointer_bytes_,
                     ", where the one before it ends. ", kRemake);
      expected += length * width;
      TESSERA_ENSURE(DataError, expected <= tokens_file_->size(), tokens_file_->path(), ": has ",
                     tokens_file_->size(), " bytes, but sequence ", i, " of the .idx ends at byte ", expected,
                     ": it is cut off or belongs to another .idx. ", kRemake);
    }
  }
  TESSERA_ENSURE(DataError, expected == tokens_file_->size(), tokens_file_->path(), ": has ",
                 tokens_file_->size(), " bytes, but the .idx describes ", expected,
                 ": it is too long or belongs to another .idx. ", kRemake);
  tokens_ = expected / width;
  if (format_ == IndexFormat::tntidx) check_dimensions();
}

/// That sequences have one dimension each, and that the last pointer is the end, in the older layout.
void IndexedDataset::check_dimensions() const {
  const std::string& path = index_->path();
  const std::int64_t at = pointers_at_ - 8 * (sequences_ + 1);
  for (std::int64_t first = 0; first <= sequences_; first += kEntriesAtOnce) {
    const auto offsets = entries<std::int64_t>(at, first, std::min(kEntriesAtOnce, sequences_ + 1 - first));
    for (std::size_t k = 0; k < offsets.size(); ++k) {
      const std::int64_t i = first + static_cast<std::int64_t>(k);
      TESSERA_ENSURE(DataError, offsets[k] == i, path, ": byte ", at + 8 * i, ": dimension offset ", i,
                     " is ", offsets[k], "; sequences of tokens have one dimension each. ", kRecopy);
    }
  }
  const auto end = index_->value<std::int64_t>(pointers_at_ + 8 * sequences_);
  TESSERA_ENSURE(DataError, end == tokens_, path, ": byte ", pointers_at_ + 8 * sequences_,
                 ": the last sequence ends at token ", end, " of ", tokens_, ". ", kRecopy);
}

void IndexedDataset::check_documents() const {
  const std::string& path = index_->path();
  TESSERA_ENSURE(DataError, document_entries_ >= 1, path,
                 ": byte 26: the document index is empty; it begins with 0. ", kRemake);
  if (!has_documents_) return;
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < document_entries_;) {
    if (options_.on_progress) options_.on_progress();
    for (const std::int64_t entry :
         entries<std::int64_t>(documents_at_, i, std::min(kEntriesAtOnce, document_entries_ - i))) {
      const bool good = i == 0 ? entry == 0 : entry >= previous && entry <= sequences_;
      TESSERA_ENSURE(DataError, good, path, ": byte ", documents_at_ + 8 * i, ": document entry ", i, " is ",
                     entry, "; entries rise from 0 to the ", sequences_, " sequences. ", kRemake);
      previous = entry;
      ++i;
    }
  }
  TESSERA_ENSURE(DataError, previous == sequences_, path, ": byte ",
                 documents_at_ + 8 * (document_entries_ - 1), ": the last document ends at sequence ",
                 previous, " of ", sequences_, ". ", kRemake);
}

std::int64_t IndexedDataset::index_bytes() const { return index_->size(); }
std::int64_t IndexedDataset::token_bytes() const { return tokens_file_->size(); }
std::int64_t IndexedDataset::kept_bytes() const {
  std::int64_t bytes = 0;
  for (const auto* file : {index_.get(), tokens_file_.get()}) bytes += file->data() ? file->size() : 0;
  return bytes;
}

/// Two pointers lie beside each other, a pointer and a length do not: one access to memory, or to the file.
IndexedDataset::Extent IndexedDataset::extent(std::int64_t sequence) const {
  TESSERA_CHECK(sequence >= 0 && sequence < sequences_, prefix_, ": sequence ", sequence, " of ", sequences_);
  const std::int64_t at = pointers_at_ + 8 * sequence;
  if (sequence + 1 == sequences_)
    return {index_->value<std::int64_t>(at) * pointer_bytes_, tokens_file_->size()};
  const Extent place = index_->value<Extent>(at);
  return {place.begin * pointer_bytes_, place.end * pointer_bytes_};
}

std::int32_t IndexedDataset::length(std::int64_t sequence) const {
  const Extent place = extent(sequence);
  return static_cast<std::int32_t>((place.end - place.begin) >> std::countr_zero(size_of(dtype_)));
}

std::vector<std::int32_t> IndexedDataset::lengths() const {
  if (format_ == IndexFormat::mmididx) return entries<std::int32_t>(lengths_at_, 0, sequences_);
  std::vector<std::int32_t> out;
  out.reserve(static_cast<std::size_t>(sequences_));
  for (std::int64_t first = 0; first < sequences_; first += kEntriesAtOnce) {
    for (const std::int64_t length : lengths_of(first, std::min(kEntriesAtOnce, sequences_ - first)))
      out.push_back(static_cast<std::int32_t>(length));
  }
  return out;
}

std::int64_t IndexedDataset::document_begin(std::int64_t document) const {
  TESSERA_CHECK(document >= 0 && document < document_entries_, prefix_, ": document ", document, " of ",
                documents());
  return has_documents_ ? index_->value<std::int64_t>(documents_at_ + 8 * document) : document;
}

std::vector<std::int64_t> IndexedDataset::document_begins(std::int64_t first, std::int64_t end) const {
  TESSERA_CHECK(first >= 0 && first <= end && end <= document_entries_, prefix_, ": documents [", first, ", ",
                end, ") of ", documents());
  if (has_documents_) return entries<std::int64_t>(documents_at_, first, end - first);
  std::vector<std::int64_t> out(static_cast<std::size_t>(end - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}

std::int8_t IndexedDataset::mode(std::int64_t sequence) const {
  TESSERA_CHECK(sequence >= 0 && sequence < sequences_, prefix_, ": sequence ", sequence, " of ", sequences_);
  return has_modes_ ? index_->value<std::int8_t>(documents_at_ + 8 * document_entries_ + sequence) : 0;
}

void IndexedDataset::convert(std::int64_t sequence, std::int64_t begin, std::int64_t offset,
                             std::span<std::int32_t> out, std::int64_t limit) const {
  const auto width = static_cast<std::int64_t>(size_of(dtype_));
  // Small enough to stay in the first-level cache until it is converted.
  std::array<std::byte, std::size_t{1} << 14> piece;
  const std::int64_t most = static_cast<std::int64_t>(piece.size()) / width;
  while (!out.empty()) {
    const std::int64_t count = std::min(most, static_cast<std::int64_t>(out.size()));
    tokens_file_->read(begin + offset * width,
                       std::span(piece).first(static_cast<std::size_t>(count * width)));
    const std::int64_t bad = converter(dtype_)(piece.data(), out.data(), count, limit);
    if (bad >= 0)
      refuse_token(sequence, offset + bad, stored_value(piece.data() + bad * width, dtype_), limit);
    offset += count;
    out = out.subspan(static_cast<std::size_t>(count));
  }
}

void IndexedDataset::refuse_token(std::int64_t sequence, std::int64_t position, double value,
                                  std::int64_t limit) const {
  std::int64_t low = 0;
  for (std::int64_t high = documents(); high - low > 1;) {
    const std::int64_t middle = low + (high - low) / 2;
    (document_begin(middle) <= sequence ? low : high) = middle;
  }
  for (std::int64_t before = document_begin(low); before < sequence; ++before) position += length(before);
  detail::fail<DataError>(
      __FILE__, __LINE__, "",
      detail::concat(
          tokens_file_->path(), ": document ", low, ", position ", position, ": token id ", value,
          " is not in [0, ", limit,
          "). The data was made with another tokenizer: make it again with this model's tokenizer, or set "
          "the model's vocab_size to that of the data"));
}

void IndexedDataset::read(std::int64_t sequence, std::int64_t offset, std::span<std::int32_t> out) const {
  const Extent place = extent(sequence);
  const std::int64_t have = (place.end - place.begin) >> std::countr_zero(size_of(dtype_));
  const auto count = static_cast<std::int64_t>(out.size());
  TESSERA_CHECK(offset >= 0 && count <= have && offset <= have - count, prefix_, ": tokens ", offset, " to ",
                offset + count, " of sequence ", sequence, ", which has ", have);
  constexpr std::int64_t kAny = std::int64_t{std::numeric_limits<std::int32_t>::max()} + 1;
  convert(sequence, place.begin, offset, out,
          options_.vocab_size > 0 ? std::min(options_.vocab_size, kAny) : kAny);
}

std::vector<std::int32_t> IndexedDataset::sequence(std::int64_t sequence) const {
  std::vector<std::int32_t> out(static_cast<std::size_t>(length(sequence)));
  read(sequence, 0, out);
  return out;
}

std::vector<std::int32_t> IndexedDataset::document(std::int64_t document) const {
  std::vector<std::int32_t> out;
  const std::int64_t end = document_begin(document + 1);
  for (std::int64_t i = document_begin(document); i < end; ++i) {
    const std::size_t at = out.size();
    out.resize(at + static_cast<std::size_t>(length(i)));
    read(i, 0, std::span(out).subspan(at));
  }
  return out;
}

void IndexedDataset::check_vocabulary(std::int64_t vocab_size) const {
  TESSERA_CHECK(vocab_size > 0, "vocab_size = ", vocab_size);
  constexpr std::int64_t kPiece = 1 << 16;
  std::vector<std::int32_t> ids(kPiece);
  for (std::int64_t i = 0; i < sequences_; ++i) {
    const std::int64_t begin = extent(i).begin, have = length(i);
    for (std::int64_t done = 0; done < have; done += kPiece) {
      const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kPiece, have - done));
      convert(i, begin, done, std::span(ids).first(count), vocab_size);
    }
  }
}

void IndexedDataset::check_unchanged() const {
  index_->check_unchanged();
  tokens_file_->check_unchanged();
}

void IndexedDataset::check_unchanged_at_times() const {
  constexpr std::uint32_t kLookEvery = 16;
  if (looks_.fetch_add(1, std::memory_order_relaxed) % kLookEvery == 0) check_unchanged();
}

void IndexedDataset::read_bytes(std::int64_t offset, std::span<std::byte> out) const {
  tokens_file_->read(offset, out);
}

std::uint64_t IndexedDataset::lengths_hash() const {
  return content_hash(std::as_bytes(std::span<const std::int32_t>(lengths())));
}

}  // namespace tessera
