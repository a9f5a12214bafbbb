#pragma once
/// PREFIX.tessera.json: what a dataset says about itself beside Megatron's PREFIX.idx and PREFIX.bin.

#include <optional>
#include <span>
#include <string>

#include "tessera/data/tokenizer_record.hpp"

namespace tessera {

struct DatasetRecord {
  TokenizerRecord tokenizer{};
  bool append_eod = false;       ///< every document that is not empty ends in tokenizer.end_of_document
  bool split_sentences = false;  ///< sequences are sentences, documents have several
  /// What samples of sentences are put together with; none in records of versions that did not know it.
  std::optional<SpecialTokens> special{};
};

/// PREFIX.tessera.json; `prefix` may end in .idx or .bin.
std::string dataset_record_path(const std::string& prefix);

/// Writes the record of the .idx and .bin that are there. Errors: IoError.
void write_dataset_record(const std::string& prefix, const DatasetRecord& record);

/// None where there is no record, as beside files of Megatron's own tool. Errors: DataError for a damaged
/// one, or one that belongs to other .idx and .bin files than those beside it.
std::optional<DatasetRecord> read_dataset_record(const std::string& prefix);

/// The record that datasets read together share; none if none of them has one. append_eod holds if it does
/// for all that have one. Errors: ConfigError when two were made with different tokenizers.
std::optional<DatasetRecord> shared_record(std::span<const std::string> prefixes);

/// What samples of sentences can be put together with: as the data's record says, else as the files of
/// `tokenizer` do where they are there. None where nothing says. Errors: as special_tokens.
std::optional<SpecialTokens> known_special_tokens(const std::optional<DatasetRecord>& data,
                                                  const std::optional<TokenizerRecord>& tokenizer);

}  // namespace tessera
