#pragma once
/// What datasets of samples of sentences share.

#include <memory>
#include <span>
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

/// Makes datasets that differ in their split alone. `Dataset` takes data, a range and `Options`.
template <typename Dataset, typename Options>
class MakerOfSentences final : public SentenceMaker {
 public:
  explicit MakerOfSentences(const Options& options) : options_(options) {}
  Made make(std::shared_ptr<const IndexedDataset> data, ElementRange units, Split split,
            std::optional<std::int64_t> num_samples) const override {
    Options options = options_;
    options.split = split;
    options.num_samples = num_samples;
    auto made = std::make_shared<const Dataset>(std::move(data), units, std::move(options));
    return {made, made->map().note};
  }

 private:
  const Options& options_;
};

/// `values`, and `padding` behind them.
void fill_padded(std::span<std::int32_t> out, std::span<const std::int32_t> values, std::int32_t padding);

}  // namespace tessera
