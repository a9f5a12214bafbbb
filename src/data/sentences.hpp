#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Texts to their sentences. Not safe to use from several threads at once: each thread makes its own.
class SentenceSplitter {
 public:
  virtual ~SentenceSplitter() = default;
  /// The sentences of each text, none of them blank. Errors: DataError.
  virtual std::vector<std::vector<std::string>> split_batch(std::span<const std::string> texts) = 0;
};

struct SentenceOptions {
  std::string kind = "lines";        ///< lines: one on each line | punkt: of the Python package nltk
  std::string language = "english";  ///< punkt's
  std::string python = "python3";
  std::string worker_script{};  ///< as TokenizerOptions::worker_script
  double timeout_s = 600;       ///< for one answer of the Python process
};

/// Errors: ConfigError for another kind, or for punkt without its package or data, saying what to install.
std::unique_ptr<SentenceSplitter> make_sentence_splitter(const SentenceOptions& options);

/// The sentences of each of `count` texts, from the worker's answer. Errors: DataError for an answer that is
/// cut off or too long, or of other texts.
std::vector<std::vector<std::string>> parse_sentences(std::span<const std::byte> answer, std::size_t count);

}  // namespace tessera
