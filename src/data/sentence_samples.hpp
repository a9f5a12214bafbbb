#pragma once
/// What datasets of samples of sentences share.

#include <string>
#include <vector>

#include "tessera/data/dataset.hpp"
#include "tessera/data/masking.hpp"
#include "tessera/data/sentence_map.hpp"

namespace tessera {

/// The sentences of a sample, and how many tokens it is to have.
struct SentenceRow {
  std::vector<std::vector<std::int32_t>> sentences{};
  std::int64_t target_length = 0;
};

/// Errors: InvalidArgument out of range, DataError for data that changed.
SentenceRow read_row(const IndexedDataset& data, const CachedSentenceMap& map, std::int64_t index);

/// By id, whether it goes on with the word before it. Errors: InvalidArgument for an id not below `ids`.
std::vector<bool> continuation_flags(const SpecialTokens& special, std::int64_t ids);

/// Where maps of a kind are kept: `given`, or beside the data.
std::string map_folder(const IndexedDataset& data, const std::string& given, const char* kind);

/// Errors: InvalidArgument for numbers that mask nothing or everything.
void check_masking(const MaskingOptions& masking);

/// Shares are of documents.
class SentenceMaker : public SampleMaker {
 public:
  const char* unit() const final { return "documents"; }
  std::int64_t units(const IndexedDataset& data) const final { return data.documents(); }
  ElementRange sequences(const IndexedDataset& data, ElementRange units) const final {
    return {data.document_begin(units.begin), data.document_begin(units.end)};
  }
};

}  // namespace tessera
