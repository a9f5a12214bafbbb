#pragma once
/// Text to token ids and back.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Not safe to use from several threads at once: each thread makes its own.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Token ids of each text, without special tokens. Errors: DataError for text the tokenizer cannot take.
  virtual std::vector<std::vector<std::int32_t>> encode_batch(std::span<const std::string> texts) = 0;
  /// Text of ids, without special tokens. Errors: DataError for an id outside the vocabulary.
  virtual std::string decode(std::span<const std::int32_t> ids) = 0;
  /// Ids are in [0, vocab_size).
  virtual std::int64_t vocab_size() const = 0;
  /// Id of the end of a document, or -1 when there is none.
  virtual std::int32_t end_of_document() const = 0;
  /// Whether any bytes are text; otherwise text must be UTF-8.
  virtual bool takes_any_bytes() const { return false; }

  /// Token ids of one text.
  std::vector<std::int32_t> encode(std::string_view text);
};

struct TokenizerOptions {
  std::string type{};        ///< bytes | HuggingFaceTokenizer | GPT2BPETokenizer | BertWordPieceLowerCase |
                             ///< BertWordPieceCase; "" = what the files imply
  std::string model{};       ///< HuggingFaceTokenizer: tokenizer.json, or the folder that holds it
  std::string vocab_file{};  ///< GPT2BPETokenizer: vocab.json; BertWordPiece...: vocab.txt
  std::string merge_file{};  ///< GPT2BPETokenizer: merges.txt
  std::string
      end_of_document{};  ///< its token; "" = found in the files beside the model, or by its usual names
  std::string python = "python3";  ///< interpreter with the `tokenizers` package
  std::string worker_script{};     ///< "" = the installed module tessera.tokenize_worker, else its path
  double timeout_s = 600;          ///< for one answer of the Python process
};

/// The tokenizer that `options` describe; all but bytes run in a Python process of their own. Errors:
/// ConfigError for an unknown type, missing or contradictory options, Python or package, saying what to
/// install; DataError for a missing or damaged model file.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerOptions& options);

/// Ids 0-255 are bytes, 256 is the end of a document.
class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<std::vector<std::int32_t>> encode_batch(std::span<const std::string> texts) override;
  std::string decode(std::span<const std::int32_t> ids) override;
  std::int64_t vocab_size() const override { return 257; }
  std::int32_t end_of_document() const override { return 256; }
  bool takes_any_bytes() const override { return true; }
};

}  // namespace tessera
