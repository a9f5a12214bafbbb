#pragma once
/// BERT's training samples: two runs of sentences of one document, possibly swapped, with masked tokens.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/data/dataset.hpp"
#include "tessera/data/masking.hpp"
#include "tessera/data/sentence_map.hpp"

namespace tessera {

struct BertDatasetOptions {
  std::int64_t seq_length = 0;                ///< special tokens and padding included
  std::optional<std::int64_t> num_samples{};  ///< at least so many, over several epochs if need be
  std::uint32_t seed = 1234;
  Split split = Split::train;
  /// Samples are of two segments; sample_label says whether they were swapped (1). Else of one.
  bool binary_head = true;
  double short_seq_prob = 0.1;
  MaskingOptions masking{};
  SpecialTokens special{};
  std::int64_t vocab_size = 0;  ///< of the tokenizer: what is replaced at random becomes an id below it
  bool use_cache = true;
  std::string cache_folder{};           ///< "" = PREFIX/cache/BERTMaskedWordPieceDataset_indices
  std::function<void()> on_progress{};  ///< called now and then while the map is made or read
};

/// A sample before it is padded.
struct BertSample {
  std::vector<std::int32_t> tokens{};  ///< [CLS] A [SEP] B [SEP], with what masking wrote
  std::vector<std::int32_t> labels{};  ///< what masked tokens were; -100 elsewhere
  std::int32_t second = 0;             ///< first position of B; without B the sample's length
  bool swapped = false;                ///< B came before A in its document
};

/// Megatron's sample number `index` of `sentences`, cut to `target_length` tokens: drawn from
/// RandomState(seed + index) as Megatron draws. `continues`: as that of find_words. Errors: DataError for one
/// sentence where there are to be two segments.
BertSample make_bert_sample(std::vector<std::vector<std::int32_t>> sentences, std::int64_t target_length,
                            std::int64_t index, const BertDatasetOptions& options,
                            const std::vector<bool>& continues);

/// Megatron's BERTMaskedWordPieceDataset over documents [range.begin, range.end) of an indexed dataset whose
/// sequences are sentences. Padding is special.pad, of type 0, behind key_end and without labels.
class BertDataset final : public Dataset {
 public:
  /// Builds or loads the sample map. Errors: ConfigError naming a special token that the vocabulary has not;
  /// InvalidArgument for impossible numbers; DataError if the documents give no sample but some are asked
  /// for.
  BertDataset(std::shared_ptr<const IndexedDataset> data, ElementRange range, BertDatasetOptions options);

  std::int64_t size() const override { return map_.samples(); }
  std::int64_t seq_length() const override { return options_.seq_length; }
  SampleFields fields() const override {
    return {.token_types = options_.binary_head, .key_end = true, .sample_label = options_.binary_head};
  }
  void fetch(std::int64_t index, const SampleView& out) const override;

  const CachedSentenceMap& map() const { return map_; }

 private:
  std::shared_ptr<const IndexedDataset> data_;
  BertDatasetOptions options_;
  std::vector<bool> continues_;  ///< by id
  CachedSentenceMap map_;
};

struct BertDataOptions : SplitsOptions {
  BertDatasetOptions dataset{};  ///< its num_samples and split are set for each split
};

/// Opens the files and makes the samples of all splits; shares are of documents, as Megatron's. Errors:
/// ConfigError, DataError.
DatasetSplits build_bert_data(const BertDataOptions& options);

/// Errors: ConfigError naming the token (data.cls_id and the like) that samples need and `special` has not.
void check_special_tokens(const SpecialTokens& special);

}  // namespace tessera
