#pragma once
/// Text files to indexed datasets: the library behind `tessera preprocess`.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/data/tokenizer_record.hpp"

namespace tessera {

struct PreprocessProgress {
  std::int64_t bytes = 0;  ///< of input, done so far
  std::int64_t total_bytes = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

struct PreprocessOptions {
  std::vector<std::string> input{};  ///< files, patterns, or folders read recursively in the order of names
  std::string output_prefix{};       ///< writes PREFIX_KEY_document.{idx,bin} for each key
  std::vector<std::string> json_keys = {"text"};
  bool append_eod = false;  ///< an end-of-document token after each document
  /// Sequences are sentences, for samples of BERT and T5: PREFIX_KEY_sentence.{idx,bin}.
  bool split_sentences = false;
  std::string sentence_splitter = "lines";  ///< one on each line | punkt: of the Python package nltk
  std::string language = "english";         ///< punkt's
  int workers = 1;                          ///< tokenizers at work at once; the result does not depend on it
  bool overwrite = false;                   ///< replace datasets that are there
  /// What is done is kept so often in PREFIX_KEY_document.unfinished, where the same call goes on after a
  /// kill.
  double keep_every_s = 5;
  TokenizerOptions tokenizer;
  std::function<void(const PreprocessProgress&)> progress{};  ///< called on the caller's thread, every few MB
};

struct PreprocessResult {
  std::vector<std::string> prefixes{};  ///< the datasets written, one per key
  std::vector<std::string> notes{};     ///< about the input: what was passed over or is unlikely to be meant
  std::int64_t documents = 0;
  std::int64_t documents_kept = 0;  ///< of these, done by an earlier call that was killed
  std::int64_t sentences = 0;       ///< over all keys; split_sentences only
  std::int64_t long_documents = 0;  ///< of several sentences
  std::int64_t tokens = 0;          ///< over all keys
  std::int64_t bytes = 0;           ///< of input
  TokenizerRecord tokenizer{};
  DType dtype = DType::u16;
};

/// Files ending in .jsonl, .json or .ndjson hold one JSON object a line, Parquet's rows are read as such, by
/// the Python package pyarrow; any other file is one document of plain text. gzip and zstd are unpacked;
/// files in folders that are no text are passed over. Beside each dataset lies its record
/// (dataset_record.hpp). Nothing appears under the final names unless all input was good. A call that was
/// killed, or that the system failed (a full disk), is gone on with by the same call: the files are those
/// that it would have written. Errors: ConfigError for impossible options and datasets that are there,
/// DataError naming file:line for input that cannot be used or holds no text, IoError for output that cannot
/// be written.
PreprocessResult preprocess(const PreprocessOptions& options);

}  // namespace tessera
