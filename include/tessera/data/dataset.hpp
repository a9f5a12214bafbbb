#pragma once
/// Datasets of training samples: GPT samples cut from an indexed dataset, and blends of several.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/blend.hpp"
#include "tessera/data/gpt_indices.hpp"
#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

/// What the samples of a dataset have besides tokens and labels.
struct SampleFields {
  bool position_ids = false;
  bool document_ids = false;
  bool token_types = false;
  bool key_end = false;  ///< they may end before seq_length: what follows is padding
  bool sample_label = false;
  std::int64_t encoder_length = 0;  ///< tokens of the encoder's sequence, where there is one

  friend bool operator==(const SampleFields&, const SampleFields&) = default;
};

/// Where a sample is written: [s] each, encoder_tokens [encoder_length], key_end, encoder_key_end and
/// sample_label [1]; empty where the dataset has none.
struct SampleView {
  std::span<std::int32_t> tokens{};
  std::span<std::int32_t> labels{};
  std::span<std::int32_t> position_ids{};
  std::span<std::int32_t> document_ids{};
  std::span<std::int32_t> token_types{};
  std::span<std::int32_t> key_end{};
  std::span<std::int32_t> sample_label{};
  std::span<std::int32_t> encoder_tokens{};
  std::span<std::int32_t> encoder_key_end{};
};

/// Errors: InvalidArgument unless `view` has room for a sample of that length with those fields.
void check_view(const SampleView& view, std::int64_t seq_length, const SampleFields& fields);

/// Numbered samples of equal length; that of the decoder where there is an encoder beside it. fetch() may be
/// called from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;
  virtual std::int64_t seq_length() const = 0;
  virtual SampleFields fields() const { return {}; }
  bool has_position_ids() const { return fields().position_ids; }
  bool has_document_ids() const { return fields().document_ids; }
  /// Writes sample `index` into `out`. Errors: InvalidArgument out of range, DataError for damaged data.
  virtual void fetch(std::int64_t index, const SampleView& out) const = 0;
};

struct GptDatasetOptions {
  std::int64_t seq_length = 0;
  std::optional<std::int64_t>
      num_samples{};  ///< at least so many, over several epochs if need be; none = one epoch
  std::uint32_t seed = 1234;
  Split split = Split::train;
  std::int32_t end_of_document = -1;  ///< its token id; -1 = none, then the three options below are refused
  bool reset_position_ids = false;    ///< positions begin at 0 after each end of document
  bool reset_attention_mask = false;  ///< attention stays within a document (document_ids)
  bool eod_mask_loss = false;         ///< what follows an end of document is not learned
  bool drop_last_partial = true;      ///< false keeps a last short sample of the validation split, padded
  bool use_cache = true;
  std::string cache_folder{};           ///< "" = PREFIX/cache/GPTDataset_indices
  std::function<void()> on_progress{};  ///< called now and then while the indices are made or read
};

/// Megatron's GPTDataset over sequences [range.begin, range.end) of an indexed dataset.
class GptDataset final : public Dataset {
 public:
  /// Builds or loads the indices. Errors: InvalidArgument, DataError if the range holds no token but samples
  /// are asked for.
  GptDataset(std::shared_ptr<const IndexedDataset> data, ElementRange range,
             const GptDatasetOptions& options);

  std::int64_t size() const override { return cached_.indices.samples(); }
  std::int64_t seq_length() const override { return options_.seq_length; }
  SampleFields fields() const override {
    return {.position_ids = options_.reset_position_ids, .document_ids = options_.reset_attention_mask};
  }
  void fetch(std::int64_t index, const SampleView& out) const override;

  const GptIndices& indices() const { return cached_.indices; }
  CacheUse cache_use() const { return cached_.cache; }
  /// Why a cache that is there was not used, or why it was not saved.
  const std::string& cache_note() const { return cached_.note; }

 private:
  std::int64_t gather(std::int64_t row, std::span<std::int32_t> out) const;

  std::shared_ptr<const IndexedDataset> data_;
  GptDatasetOptions options_;
  bool keep_partial_;  ///< the last sample may be shorter
  CachedGptIndices cached_;
};

/// Samples drawn from several datasets in given proportions.
class BlendedDataset final : public Dataset {
 public:
  /// `size` samples by `weights`, or, without a size, every sample of every member once. Errors:
  /// InvalidArgument when members differ in sequence length or fields, or one is too small for its share.
  BlendedDataset(std::vector<std::shared_ptr<const Dataset>> members, std::span<const double> weights,
                 std::optional<std::int64_t> size);

  std::int64_t size() const override { return static_cast<std::int64_t>(indices_.dataset.size()); }
  std::int64_t seq_length() const override { return members_.front()->seq_length(); }
  SampleFields fields() const override { return members_.front()->fields(); }
  void fetch(std::int64_t index, const SampleView& out) const override;
  const BlendIndices& indices() const { return indices_; }

 private:
  std::vector<std::shared_ptr<const Dataset>> members_;
  BlendIndices indices_;
};

/// How one kind of samples is made of indexed datasets.
class SampleMaker {
 public:
  struct Made {
    std::shared_ptr<const Dataset> samples;
    std::string note{};  ///< a cache that was damaged or could not be saved
  };
  virtual ~SampleMaker() = default;
  /// What shares of the data are counted in: "sequences".
  virtual const char* unit() const = 0;
  /// How many units a dataset has.
  virtual std::int64_t units(const IndexedDataset& data) const = 0;
  /// The sequences of some of its units.
  virtual ElementRange sequences(const IndexedDataset& data, ElementRange units) const = 0;
  /// Errors: DataError, InvalidArgument.
  virtual Made make(std::shared_ptr<const IndexedDataset> data, ElementRange units, Split split,
                    std::optional<std::int64_t> num_samples) const = 0;
};

/// Samples of whole datasets: what every kind has.
struct SplitsOptions {
  std::vector<BlendMember> members{};  ///< one prefix, or a blend; all with a weight or none
  std::string split = "969,30,1";
  /// In place of members and split: data of its own for training, validation and test, whole.
  std::array<std::vector<BlendMember>, 3> split_members{};
  std::array<std::optional<std::int64_t>, 3> num_samples{};  ///< training, validation, test; none = one epoch
  IndexedDatasetOptions files{};
};

/// Null where a split has no share, or holds no token and none were asked for.
struct DatasetSplits {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> valid;
  std::shared_ptr<const Dataset> test;
  std::vector<std::string> warnings;  ///< caches that were damaged or could not be saved: one sentence each
};
using GptData = DatasetSplits;

/// Opens the files and makes the samples of all splits. Errors: ConfigError, DataError.
DatasetSplits build_splits(const SplitsOptions& options, const SampleMaker& maker);

struct GptDataOptions : SplitsOptions {
  GptDatasetOptions dataset{};  ///< its num_samples and split are set for each split
};

/// The same of GPT samples; shares are of sequences, as Megatron's.
GptData build_gpt_data(const GptDataOptions& options);

}  // namespace tessera
