#pragma once
/// Tokenizers of the Python package `tokenizers`, run by python/tessera/tokenize_worker.py.

#include "data/worker_process.hpp"
#include "tessera/data/tokenizer.hpp"

namespace tessera {

/// The ids of each of `count` texts, from the worker's answer to a request to encode them. Errors: DataError
/// for an answer that is cut off or too long, of other texts, or with an id outside [0, vocab_size).
std::vector<std::vector<std::int32_t>> parse_ids(std::span<const std::byte> answer, std::size_t count,
                                                 std::int64_t vocab_size);

class PythonTokenizer final : public Tokenizer {
 public:
  explicit PythonTokenizer(const TokenizerOptions& options);
  std::vector<std::vector<std::int32_t>> encode_batch(std::span<const std::string> texts) override;
  std::string decode(std::span<const std::int32_t> ids) override;
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::int32_t end_of_document() const override { return end_of_document_; }

 private:
  /// The payload of the answer. Errors: DataError or ConfigError with the worker's message.
  std::vector<std::byte> answer(std::uint32_t expected);

  WorkerProcess worker_;
  std::int64_t vocab_size_ = 0;
  std::int32_t end_of_document_ = -1;
};

}  // namespace tessera
