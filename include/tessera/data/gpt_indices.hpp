#pragma once
/// Megatron's three GPT indices: which documents in which order, where each sample begins, in which order
/// samples come.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/int_array.hpp"

namespace tessera {

struct GptIndexRequest {
  std::int64_t begin = 0;  ///< sequences [begin, end) of the dataset
  std::int64_t end = 0;
  std::int64_t seq_length = 0;
  std::optional<std::int64_t> num_samples{};  ///< at least so many; none = what one epoch gives
  std::uint32_t seed = 1234;
  bool keep_partial = false;            ///< a last sample shorter than the others counts (validation)
  std::function<void()> on_progress{};  ///< called now and then while indices are built, read and written
};

/// What follows from the token count alone.
struct GptIndexPlan {
  std::int64_t tokens_per_epoch = 0;
  std::int64_t epochs = 1;
  bool separate_last_epoch = false;  ///< the last epoch's documents and samples are shuffled apart
  std::int64_t first_shuffle = 0;    ///< samples shuffled together at the front
  std::int64_t samples = 0;
};

struct GptIndices {
  IntArray document_index;  ///< [epochs * documents] sequence numbers in reading order, int32
  IntArray
      sample_index;  ///< [(samples + 1) * 2] rows (position in document_index, token offset), int32 or int64
  IntArray shuffle_index;  ///< [samples] order of the samples, uint32 or int64
  std::int64_t samples() const { return shuffle_index.size(); }
};

/// Epochs = smallest e with e*T >= N*s + 1; the last one is kept apart when it gives less than 80 % of its
/// samples. Errors: InvalidArgument for impossible numbers, DataError if [begin, end) holds no token but
/// samples are asked for.
GptIndexPlan plan_gpt_indices(std::int64_t tokens_per_epoch, const GptIndexRequest& request);
/// Tokens in sequences [begin, end). Errors: InvalidArgument out of range.
std::int64_t count_tokens(LengthsView lengths, std::int64_t begin, std::int64_t end);
/// Row j = place of token j * seq_length of the joined stream; rows overlap by one token.
IntArray build_sample_index(LengthsView lengths, const IntArray& document_index, std::int64_t seq_length,
                            std::int64_t samples, const std::function<void()>& on_progress = {});
/// All three, from one RandomState(seed). Errors: as plan_gpt_indices.
GptIndices build_gpt_indices(LengthsView lengths, const GptIndexRequest& request);

enum class CacheUse {
  off,      ///< no cache folder was asked for
  loaded,   ///< the indices are those of the cache
  saved,    ///< built and saved
  unsaved,  ///< built, but the cache folder cannot be written
};

struct CachedGptIndices {
  GptIndices indices;
  CacheUse cache = CacheUse::off;
  std::string note;  ///< why a cache that is there was not used, or why it was not saved
};

/// As build_gpt_indices, kept in `folder` as <hash>-GPTDataset-<split>-{description.txt, document_index.npy,
/// sample_index.npy, shuffle_index.npy}. The hash covers the request and the data (file name, sizes, all
/// lengths). Every value of a cache is checked before it is used; a damaged or foreign cache is built again;
/// a folder that cannot be written costs only the saving.
CachedGptIndices cached_gpt_indices(const IndexedDataset& dataset, const GptIndexRequest& request,
                                    const std::string& split, const std::string& folder);

}  // namespace tessera
