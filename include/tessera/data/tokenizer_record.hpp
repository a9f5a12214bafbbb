#pragma once
/// Which tokenizer made ids: what datasets and runs keep of it, so that others can be held against it.

#include <cstdint>
#include <string>

#include "tessera/data/masking.hpp"
#include "tessera/data/tokenizer.hpp"

namespace tessera {

struct TokenizerRecord {
  std::string type = "bytes";  ///< as TokenizerOptions::type
  std::string file{};          ///< tokenizer.json, vocab.json or vocab.txt, an absolute path; "" for bytes
  std::string merge_file{};    ///< merges.txt of GPT2BPETokenizer, an absolute path
  std::string hash{};          ///< of all that decides ids, however the files spell it; "" for bytes
  std::int64_t vocab_size = 257;
  std::int32_t end_of_document = 256;  ///< its id; -1 = none

  friend bool operator==(const TokenizerRecord&, const TokenizerRecord&) = default;
};

/// Reads the tokenizer's files, without Python. Errors: ConfigError as make_tokenizer; DataError for a file
/// that is missing or is no tokenizer.
TokenizerRecord describe_tokenizer(const TokenizerOptions& options);

/// The tokenizer's special tokens, by what the files beside it call them or else by their usual names
/// ("[CLS]"), and its "##" pieces. Nothing of bytes. Errors: as describe_tokenizer.
SpecialTokens special_tokens(const TokenizerOptions& options);

/// What make_tokenizer needs for the tokenizer of `record`.
TokenizerOptions options_of(const TokenizerRecord& record);

/// Whether both give the same ids, wherever their files lie; the end of a document may be another token.
bool same_ids(const TokenizerRecord& a, const TokenizerRecord& b);

/// For messages: "HuggingFaceTokenizer /data/tokenizer.json (50257 tokens, content 0123456789abcdef)".
std::string to_text(const TokenizerRecord& record);

/// One JSON object, and back. Errors: DataError beginning with `place`.
std::string to_json(const TokenizerRecord& record);
TokenizerRecord tokenizer_record_from_json(const std::string& json, const std::string& place);

}  // namespace tessera
