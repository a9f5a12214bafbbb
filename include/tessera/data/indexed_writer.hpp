#pragma once
/// Writes Megatron's PREFIX.idx + PREFIX.bin, byte for byte.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

namespace files {
class OutputFile;
}

/// Megatron's choice of token type: uint16 below 65500 ids, else int32.
DType token_dtype(std::int64_t vocab_size);

/// How far the files are that a writer keeps.
struct IndexedMark {
  std::int64_t sequences = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

/// Streams tokens to temporary files beside the final ones; finish() makes both appear. Without finish()
/// nothing changes under the final names. Keeps 4 bytes per sequence and 8 per document in memory.
class IndexedDatasetWriter {
 public:
  /// Errors: IoError if the temporary files cannot be created, InvalidArgument for a dtype tokens cannot
  /// have.
  IndexedDatasetWriter(const std::string& prefix, DType dtype);
  /// One that can go on after its process was killed: what was written up to `mark` is in `folder`, in files
  /// NAME.bin, NAME.lengths and NAME.documents, and stays there until finish(). Nothing is there at mark {}.
  /// Errors: as above; DataError if the files do not hold what `mark` says.
  IndexedDatasetWriter(const std::string& prefix, DType dtype, const std::string& folder,
                       const std::string& name, const IndexedMark& mark);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(const IndexedDatasetWriter&) = delete;
  IndexedDatasetWriter& operator=(const IndexedDatasetWriter&) = delete;

  /// Appends one sequence to the open document. Errors: DataError for an id the dtype cannot hold, or more
  /// than 2^31 - 1 tokens; IoError (disk full).
  void add_sequence(std::span<const std::int32_t> tokens);
  /// Closes the open document, which may be empty.
  void end_document();
  /// A document of one sequence.
  void add_document(std::span<const std::int32_t> tokens);
  /// Appends all documents of another dataset of the same dtype, as Megatron merges files: pointers are made
  /// anew. Errors: DataError for another dtype.
  void append(const IndexedDataset& part) { append_documents(part, {0, part.documents()}); }
  /// The same of documents [begin, end).
  void append_documents(const IndexedDataset& part, ElementRange documents);
  /// Syncs both files and gives them their names, the .idx last. Errors: IoError, InvalidArgument when called
  /// twice or with sequences after the last end_document().
  void finish();

  /// Of the second constructor: syncs all that was added, between two documents, and says how far it is.
  /// Errors: IoError, InvalidArgument.
  IndexedMark mark();

  std::int64_t sequences() const { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t documents() const { return static_cast<std::int64_t>(document_index_.size()) - 1; }
  std::int64_t tokens() const { return tokens_; }

 private:
  void copy_tokens(const IndexedDataset& part, std::int64_t begin, std::int64_t count);
  void restore(const std::string& kept, const IndexedMark& mark);

  std::string prefix_;
  DType dtype_;
  IndexedMark marked_{};
  std::unique_ptr<files::OutputFile> kept_lengths_, kept_documents_;  ///< of the second constructor
  std::unique_ptr<files::OutputFile> tokens_file_;
  std::unique_ptr<files::OutputFile> index_file_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int64_t> document_index_{0};
  std::int64_t tokens_ = 0;
  std::vector<std::byte> packed_;
};

/// Joins datasets made in parallel into one at `prefix`, in the order given. Errors: DataError, IoError.
void merge_indexed_datasets(std::span<const std::string> parts, const std::string& prefix);

}  // namespace tessera
