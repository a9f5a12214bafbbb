#pragma once
/// Megatron's indexed dataset, PREFIX.idx + PREFIX.bin: token sequences grouped into documents.
///
/// .idx (little-endian): "MMIDIDX\0\0", u64 version = 1, u8 dtype code, u64 sequences S, u64 entries D of the
/// document index, i32 length[S] in tokens, i64 pointer[S] in bytes, i64 document[D] (first sequence of each
/// document, then S), and for multimodal data i8 mode[S]. .bin: the tokens back to back.
///
/// Its older form, of "cached" and "lazy" datasets, and fairseq's: "TNTIDX\0\0", then u64 words: version = 1,
/// dtype code, element size, sequences S, sizes S, in Megatron's D, then dimension offset[S + 1], pointer[S +
/// 1] in tokens, size[S] and in Megatron's document[D]. In fairseq's each sequence is a document. Everything
/// is checked when the files are opened. They are read, never mapped: a file that shrinks while a run uses it
/// is an error that says so.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/config_words.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera {

namespace files {
class InputFile;
}

/// Sequence lengths; they need not be aligned.
class LengthsView {
 public:
  LengthsView() = default;
  LengthsView(const void* data, std::int64_t size)
      : data_(static_cast<const std::byte*>(data)), size_(size) {}
  LengthsView(const std::vector<std::int32_t>& lengths)
      : LengthsView(lengths.data(), static_cast<std::int64_t>(lengths.size())) {}

  std::int64_t size() const { return size_; }
  /// Tokens of sequence i; not bounds-checked.
  std::int32_t operator[](std::int64_t i) const {
    std::int32_t length;
    std::memcpy(&length, data_ + i * 4, 4);
    return length;
  }
  std::span<const std::byte> bytes() const { return {data_, static_cast<std::size_t>(size_) * 4}; }

 private:
  const std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
};

/// Which of the two layouts of .idx.
enum class IndexFormat { mmididx, tntidx };

struct IndexedDatasetOptions {
  DataLoading loading = DataLoading::mmap;
  std::int64_t vocab_size = 0;          ///< ids at or above it are refused when read; 0 = any int32 id
  std::function<void()> on_progress{};  ///< called now and then while the index is checked, not afterwards
};

/// Read-only and safe to use from several threads.
class IndexedDataset {
 public:
  /// Opens PREFIX.idx and PREFIX.bin (a name ending in .idx or .bin means its prefix) and checks the whole
  /// index. Errors: DataError naming file, place, reason and remedy for missing, truncated, oversized or
  /// inconsistent files.
  explicit IndexedDataset(const std::string& prefix, IndexedDatasetOptions options = {});
  /// The same for files that are open already. Errors: as above.
  IndexedDataset(const std::string& prefix, std::unique_ptr<files::InputFile> index,
                 std::unique_ptr<files::InputFile> tokens, IndexedDatasetOptions options = {});
  ~IndexedDataset();
  IndexedDataset(const IndexedDataset&) = delete;
  IndexedDataset& operator=(const IndexedDataset&) = delete;

  const std::string& prefix() const { return prefix_; }
  /// Type the tokens are stored in.
  DType dtype() const { return dtype_; }
  IndexFormat format() const { return format_; }
  /// Bytes of the two files that are kept in memory.
  std::int64_t kept_bytes() const;
  std::int64_t vocab_size() const { return options_.vocab_size; }
  std::int64_t sequences() const { return sequences_; }
  std::int64_t documents() const { return document_entries_ - 1; }
  /// Tokens in all sequences.
  std::int64_t tokens() const { return tokens_; }
  std::int64_t index_bytes() const;
  std::int64_t token_bytes() const;
  /// Tokens of all sequences, read from the .idx: 4 bytes each. Errors: DataError if it has shrunk.
  std::vector<std::int32_t> lengths() const;
  /// Tokens of a sequence. Errors: InvalidArgument out of range.
  std::int32_t length(std::int64_t sequence) const;
  /// First sequence of a document; `document` = documents() gives sequences(). Errors: InvalidArgument.
  std::int64_t document_begin(std::int64_t document) const;
  /// The same of documents [first, end), read from the .idx: 8 bytes each; `end` may be documents() + 1.
  /// Errors: InvalidArgument out of range; DataError if it has shrunk.
  std::vector<std::int64_t> document_begins(std::int64_t first, std::int64_t end) const;
  /// Whether the index ends in a mode per sequence.
  bool has_modes() const { return has_modes_; }
  /// Mode of a sequence, 0 when there are none. Errors: InvalidArgument.
  std::int8_t mode(std::int64_t sequence) const;

  /// Copies tokens [offset, offset + out.size()) of a sequence. Errors: InvalidArgument out of range;
  /// DataError for an id that is negative, not whole, beyond int32 or beyond the vocabulary, naming file,
  /// document and position.
  void read(std::int64_t sequence, std::int64_t offset, std::span<std::int32_t> out) const;
  /// All tokens of a sequence.
  std::vector<std::int32_t> sequence(std::int64_t sequence) const;
  /// All tokens of a document, its sequences joined.
  std::vector<std::int32_t> document(std::int64_t document) const;
  /// Reads every token. Errors: DataError for the first id not in [0, vocab_size).
  void check_vocabulary(std::int64_t vocab_size) const;
  /// Errors: DataError if a file that is still read changed its size since it was opened. (A .idx of at most
  /// 64 MiB is read once.)
  void check_unchanged() const;
  /// The same on one call in 16, for who reads many short pieces: a look costs as much as reading one. (What
  /// is cut off is met when it is read; only that a file was written anew does not show there.)
  void check_unchanged_at_times() const;
  /// Raw little-endian bytes [offset, offset + out.size()) of the .bin. Errors: DataError beyond its end.
  void read_bytes(std::int64_t offset, std::span<std::byte> out) const;
  /// Hash of the sequence lengths: equal for data that gives equal sample indices.
  std::uint64_t lengths_hash() const;

 private:
  void parse_header();
  void parse_new_header();
  void parse_old_header();
  void place_old_arrays(std::uint64_t document_entries);
  std::vector<std::int64_t> lengths_of(std::int64_t first, std::int64_t count) const;
  void check_lengths();
  void check_dimensions() const;
  void check_documents() const;
  template <typename T>
  std::vector<T> entries(std::int64_t at, std::int64_t first, std::int64_t count) const;
  /// Where a sequence lies in the .bin, in bytes.
  struct Extent {
    std::int64_t begin, end;
  };
  Extent extent(std::int64_t sequence) const;
  void convert(std::int64_t sequence, std::int64_t begin, std::int64_t offset, std::span<std::int32_t> out,
               std::int64_t limit) const;
  [[noreturn]] void refuse_token(std::int64_t sequence, std::int64_t position, double value,
                                 std::int64_t limit) const;

  std::string prefix_;
  IndexedDatasetOptions options_;
  std::unique_ptr<files::InputFile> index_;
  std::unique_ptr<files::InputFile> tokens_file_;
  IndexFormat format_ = IndexFormat::mmididx;
  DType dtype_ = DType::u16;
  std::int64_t sequences_ = 0;
  std::int64_t document_entries_ = 1;
  std::int64_t tokens_ = 0;
  std::int64_t lengths_at_ = 0;
  std::int64_t pointers_at_ = 0;
  std::int64_t pointer_bytes_ = 1;  ///< what pointers count
  std::int64_t documents_at_ = 0;
  bool has_documents_ = true;  ///< else each sequence is one
  bool has_modes_ = false;
  mutable std::atomic<std::uint32_t> looks_ = 0;
};

/// Megatron's code for a token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16. Errors:
/// InvalidArgument.
int token_code(DType dtype);

}  // namespace tessera
