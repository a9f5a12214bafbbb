#pragma once
/// T5's training samples: sentences of which runs of words are replaced by sentinels, and what a decoder says
/// for these.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/dataset.hpp"
#include "tessera/data/masking.hpp"
#include "tessera/data/sentence_map.hpp"

namespace tessera {

struct T5DatasetOptions {
  std::int64_t encoder_length = 0;            ///< padding included
  std::int64_t decoder_length = 0;            ///< the start and padding included
  std::optional<std::int64_t> num_samples{};  ///< at least so many, over several epochs if need be
  std::uint32_t seed = 1234;
  Split split = Split::train;
  double short_seq_prob = 0.1;
  MaskingOptions masking{.max_ngram = 10, .geometric = true};
  SpecialTokens special{};
  std::int64_t vocab_size = 0;  ///< of the tokenizer
  bool use_cache = true;
  std::string cache_folder{};           ///< "" = PREFIX/cache/T5MaskedWordPieceDataset_indices
  std::function<void()> on_progress{};  ///< called now and then while the map is made or read
};

/// A sample before it is padded.
struct T5Sample {
  std::vector<std::int32_t> encoder_tokens{};  ///< the text, a sentinel in place of each run that is left out
  std::vector<std::int32_t> tokens{};          ///< the start, and each sentinel with what it stands for
  std::vector<std::int32_t> labels{};          ///< what follows each of `tokens`; the end in the last place
};

/// Megatron's sample number `index` of `sentences`, cut to `target_length` tokens: drawn from
/// RandomState(seed + index) as Megatron draws. `continues`: as that of find_words. Errors: DataError where
/// there are fewer sentinels than runs.
T5Sample make_t5_sample(const std::vector<std::vector<std::int32_t>>& sentences, std::int64_t target_length,
                        std::int64_t index, const T5DatasetOptions& options,
                        const std::vector<bool>& continues);

/// Megatron's T5MaskedWordPieceDataset over documents [range.begin, range.end) of an indexed dataset whose
/// sequences are sentences. Padding is special.pad: behind encoder_key_end, and in the decoder without
/// labels.
class T5Dataset final : public Dataset {
 public:
  /// Builds or loads the sample map. Errors: ConfigError naming a special token that the vocabulary has not;
  /// InvalidArgument for impossible numbers; DataError if the documents give no sample but some are asked
  /// for.
  T5Dataset(std::shared_ptr<const IndexedDataset> data, ElementRange range, T5DatasetOptions options);

  std::int64_t size() const override { return map_.samples(); }
  std::int64_t seq_length() const override { return options_.decoder_length; }
  SampleFields fields() const override { return {.encoder_length = options_.encoder_length}; }
  /// Errors: also DataError for a sample of more than seq_length() tokens in the decoder.
  void fetch(std::int64_t index, const SampleView& out) const override;

  const CachedSentenceMap& map() const { return map_; }

 private:
  std::shared_ptr<const IndexedDataset> data_;
  T5DatasetOptions options_;
  std::vector<bool> continues_;  ///< by id
  CachedSentenceMap map_;
};

struct T5DataOptions : SplitsOptions {
  T5DatasetOptions dataset{};  ///< its num_samples and split are set for each split
};

/// Opens the files and makes the samples of all splits; shares are of documents, as Megatron's. Errors:
/// ConfigError, DataError.
DatasetSplits build_t5_data(const T5DataOptions& options);

/// Tokens of a full sample that are masked at most. The decoder sees as many, one sentinel for each run of
/// them and the start.
std::int64_t most_masked(std::int64_t encoder_length, double mask_prob);

/// Ids from `first` to `last`, both counted, which may be below it.
std::vector<std::int32_t> sentinels_between(std::int64_t first, std::int64_t last);

/// What T5's samples need and `special`, of a vocabulary of `ids` tokens, has not, as Megatron's tokenizers
/// add it: without sentinels, behind the vocabulary a start and an end where it has none and then `extra_ids`
/// sentinels, which `ids` counts. With some, the first `extra_ids` of them (0 = all) are used. A vocabulary
/// without a start begins with padding, as T5's own. Errors: ConfigError for more than there are.
void add_t5_tokens(SpecialTokens& special, std::int64_t& ids, std::int64_t extra_ids);

/// Errors: ConfigError naming the token (data.eos_id and the like) that samples need and `special` has not.
void check_t5_tokens(const SpecialTokens& special);

}  // namespace tessera
