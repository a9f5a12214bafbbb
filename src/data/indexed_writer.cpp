#include "tessera/data/indexed_writer.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>

#include "data/file.hpp"
#include "data/indexed_format.hpp"

namespace tessera {
namespace {

/// Stores ids as T at the end of `out`; returns the first position whose id T cannot hold, or -1.
template <typename T>
std::int64_t pack(std::span<const std::int32_t> ids, std::vector<std::byte>& out) {
  out.resize(ids.size() * sizeof(T));
  std::int64_t bad = -1;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const T value = static_cast<T>(ids[i]);
    if (bad < 0 && (ids[i] < 0 || static_cast<double>(value) != static_cast<double>(ids[i]))) {
      bad = static_cast<std::int64_t>(i);
    }
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bad;
}

std::int64_t pack_as(DType dtype, std::span<const std::int32_t> ids, std::vector<std::byte>& out) {
  switch (dtype) {
    case DType::u8:
      return pack<std::uint8_t>(ids, out);
    case DType::i8:
      return pack<std::int8_t>(ids, out);
    case DType::i16:
      return pack<std::int16_t>(ids, out);
    case DType::u16:
      return pack<std::uint16_t>(ids, out);
    case DType::i32:
      return pack<std::int32_t>(ids, out);
    case DType::i64:
      return pack<std::int64_t>(ids, out);
    case DType::f32:
      return pack<float>(ids, out);
    default:
      return pack<double>(ids, out);
  }
}

}  // namespace

DType token_dtype(std::int64_t vocab_size) {
  TESSERA_CHECK(vocab_size > 0, "vocab_size = ", vocab_size);
  return vocab_size < 65500 ? DType::u16 : DType::i32;
}

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, DType dtype)
    : prefix_(prefix), dtype_(dtype) {
  token_code(dtype);
  tokens_file_ = std::make_unique<files::OutputFile>(prefix + ".bin");
  index_file_ = std::make_unique<files::OutputFile>(prefix + ".idx");
}

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, DType dtype, const std::string& folder,
                                           const std::string& name, const IndexedMark& mark)
    : prefix_(prefix), dtype_(dtype), marked_(mark), tokens_(mark.tokens) {
  token_code(dtype);
  const std::string kept = folder + "/" + name;
  const auto width = static_cast<std::int64_t>(size_of(dtype));
  tokens_file_ = std::make_unique<files::OutputFile>(prefix + ".bin", kept + ".bin", mark.tokens * width);
  kept_lengths_ = std::make_unique<files::OutputFile>(kept + ".lengths", kept + ".lengths",
                                                      mark.sequences * sizeof(std::int32_t));
  kept_documents_ = std::make_unique<files::OutputFile>(kept + ".documents", kept + ".documents",
                                                        mark.documents * sizeof(std::int64_t));
  if (mark.documents > 0) restore(kept, mark);
}

/// The part of the index that is kept in memory, from its files.
void IndexedDatasetWriter::restore(const std::string& kept, const IndexedMark& mark) {
  lengths_.resize(static_cast<std::size_t>(mark.sequences));
  document_index_.resize(static_cast<std::size_t>(mark.documents) + 1);
  const auto read = [&](const char* suffix, std::span<std::byte> out) {
    files::InputFile(kept + suffix, files::Keep::nothing).read(0, out);
  };
  read(".lengths", std::as_writable_bytes(std::span(lengths_)));
  read(".documents", std::as_writable_bytes(std::span(document_index_).subspan(1)));
  const std::int64_t tokens = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
  TESSERA_ENSURE(DataError,
                 tokens == mark.tokens && document_index_.back() == mark.sequences &&
                     std::ranges::is_sorted(document_index_) &&
                     std::ranges::all_of(lengths_, [](std::int32_t length) { return length >= 0; }),
                 kept, ": does not hold the ", mark.tokens, " tokens that were written");
}

IndexedMark IndexedDatasetWriter::mark() {
  TESSERA_CHECK(tokens_file_ != nullptr && kept_lengths_ != nullptr, prefix_, ": keeps nothing");
  TESSERA_CHECK(document_index_.back() == sequences(), prefix_, ": the last document was not ended");
  const auto lengths = std::span(lengths_).subspan(static_cast<std::size_t>(marked_.sequences));
  const auto ends = std::span(document_index_).subspan(static_cast<std::size_t>(marked_.documents) + 1);
  kept_lengths_->write(std::as_bytes(lengths));
  kept_documents_->write(std::as_bytes(ends));
  for (auto* file : {tokens_file_.get(), kept_lengths_.get(), kept_documents_.get()}) file->sync();
  return marked_ = {sequences(), documents(), tokens_};
}

IndexedDatasetWriter::~IndexedDatasetWriter() = default;

void IndexedDatasetWriter::add_sequence(std::span<const std::int32_t> tokens) {
  TESSERA_CHECK(tokens_file_ != nullptr, prefix_, ": is finished");
  TESSERA_ENSURE(DataError, tokens.size() <= std::numeric_limits<std::int32_t>::max(), prefix_,
                 ": a sequence of ", tokens.size(),
                 " tokens; the format allows 2^31 - 1. Split the document");
  const std::int64_t bad = pack_as(dtype_, tokens, packed_);
  TESSERA_ENSURE(DataError, bad < 0, prefix_, ": document ", documents(), ": token id ",
                 tokens[static_cast<std::size_t>(std::max<std::int64_t>(bad, 0))], " does not fit ", dtype_);
  tokens_file_->write(packed_);
  lengths_.push_back(static_cast<std::int32_t>(tokens.size()));
  tokens_ += static_cast<std::int64_t>(tokens.size());
}

void IndexedDatasetWriter::end_document() { document_index_.push_back(sequences()); }

void IndexedDatasetWriter::add_document(std::span<const std::int32_t> tokens) {
  add_sequence(tokens);
  end_document();
}

/// `count` tokens from token `begin` of another .bin on, as they are.
void IndexedDatasetWriter::copy_tokens(const IndexedDataset& part, std::int64_t begin, std::int64_t count) {
  const auto width = static_cast<std::int64_t>(size_of(dtype_));
  std::vector<std::byte> piece(std::size_t{1} << 20);
  for (std::int64_t done = begin * width, end = (begin + count) * width; done < end;) {
    const auto bytes = std::span(piece).first(static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(piece.size()), end - done)));
    part.read_bytes(done, bytes);
    tokens_file_->write(bytes);
    done += static_cast<std::int64_t>(bytes.size());
  }
}

void IndexedDatasetWriter::append_documents(const IndexedDataset& part, ElementRange documents) {
  TESSERA_CHECK(tokens_file_ != nullptr, prefix_, ": is finished");
  // fairseq's u32 is an i32 here, as long as ids fit, which reading sees to.
  const bool convert = part.dtype() == DType::u32 && dtype_ == DType::i32;
  TESSERA_ENSURE(DataError, part.dtype() == dtype_ || convert, part.prefix(), ".idx: holds tokens as ",
                 part.dtype(), ", not ", dtype_,
                 " like the files it is merged with. Make all parts with one tokenizer");
  const std::vector<std::int64_t> begins = part.document_begins(documents.begin, documents.end + 1);
  if (convert) {
    for (std::size_t d = 0; d + 1 < begins.size(); ++d) {
      for (std::int64_t i = begins[d]; i < begins[d + 1]; ++i) add_sequence(part.sequence(i));
      end_document();
    }
    return;
  }
  const std::vector<std::int32_t> lengths = part.lengths();
  const auto first = lengths.begin() + begins.front(), last = lengths.begin() + begins.back();
  const std::int64_t tokens = std::accumulate(first, last, std::int64_t{0});
  copy_tokens(part, std::accumulate(lengths.begin(), first, std::int64_t{0}), tokens);
  const std::int64_t base = sequences() - begins.front();
  lengths_.insert(lengths_.end(), first, last);
  for (std::size_t d = 1; d < begins.size(); ++d) document_index_.push_back(base + begins[d]);
  tokens_ += tokens;
}

void IndexedDatasetWriter::finish() {
  TESSERA_CHECK(tokens_file_ != nullptr, prefix_, ": is finished already");
  TESSERA_CHECK(document_index_.back() == sequences(), prefix_, ": the last document was not ended");
  if (index_file_ == nullptr) index_file_ = std::make_unique<files::OutputFile>(prefix_ + ".idx");
  auto& out = *index_file_;
  out.write(std::as_bytes(std::span(indexed::kMagic)));
  out.write_value(indexed::kVersion);
  out.write_value(static_cast<std::uint8_t>(token_code(dtype_)));
  out.write_value(static_cast<std::uint64_t>(lengths_.size()));
  out.write_value(static_cast<std::uint64_t>(document_index_.size()));
  out.write(std::as_bytes(std::span(lengths_)));
  std::int64_t pointer = 0;
  for (const std::int32_t length : lengths_) {
    out.write_value(pointer);
    pointer += length * static_cast<std::int64_t>(size_of(dtype_));
  }
  out.write(std::as_bytes(std::span(document_index_)));
  out.sync();
  tokens_file_->publish();
  index_file_->publish();
  tokens_file_.reset();
  index_file_.reset();
}

void merge_indexed_datasets(std::span<const std::string> parts, const std::string& prefix) {
  TESSERA_CHECK(!parts.empty(), "no datasets to merge into ", prefix);
  const DType dtype = IndexedDataset(parts.front()).dtype();
  IndexedDatasetWriter writer(prefix, dtype);
  for (const std::string& part : parts) writer.append(IndexedDataset(part));
  writer.finish();
}

}  // namespace tessera
