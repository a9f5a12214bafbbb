#pragma once
/// Megatron's sample map of a dataset whose sequences are sentences: which sentences of a document make up a
/// sample, and how long it is to be.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/gpt_indices.hpp"
#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/int_array.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

struct SentenceMapRequest {
  std::int64_t max_length = 0;                ///< tokens of a sample, without special ones
  std::int64_t min_sentences = 2;             ///< of a sample
  std::optional<std::int64_t> num_samples{};  ///< at least so many; none = what one epoch gives
  double short_seq_prob = 0.1;  ///< share of the samples that are shorter, of 2 to max_length tokens
  std::uint32_t seed = 1234;
  std::function<void()> on_progress{};  ///< called now and then while the map is built, read and written
};

/// Rows (first sentence, one after the last, tokens), shuffled over all epochs: int32, or int64 for more
/// sentences. `begins`: first sentences of the documents, and the end of the last. Documents with fewer
/// sentences than a sample needs give none, nor do those of several sentences with one of more than 512
/// tokens. Errors: InvalidArgument for impossible numbers; DataError beginning with `place` if no document
/// gives a sample.
IntArray build_sentence_map(LengthsView lengths, const std::vector<std::int64_t>& begins,
                            const SentenceMapRequest& request, const std::string& place);

/// Documents that give no samples.
struct UnusableDocuments {
  std::int64_t short_ones = 0;     ///< with fewer sentences than a sample needs
  std::int64_t long_sentence = 0;  ///< of several sentences, one of them of more than 512 tokens
  std::int64_t count() const { return short_ones + long_sentence; }
};

/// Of the documents with the first sentences `begins`, as for build_sentence_map.
UnusableDocuments count_unusable(LengthsView lengths, const std::vector<std::int64_t>& begins,
                                 std::int64_t min_sentences);

/// "3 have fewer than 2 sentences, 1 a sentence of more than 512 tokens".
std::string to_text(const UnusableDocuments& documents, std::int64_t min_sentences);

struct CachedSentenceMap {
  IntArray rows;
  CacheUse cache = CacheUse::off;
  std::string note;  ///< as that of CachedGptIndices
  std::int64_t samples() const { return rows.size() / 3; }
};

/// The same for documents [documents.begin, documents.end) of a dataset, kept in `folder` ("" = nowhere) as
/// <hash>-<kind>-<split>-{description.txt, sample_index.npy}: checked, built again and saved as
/// cached_gpt_indices does it.
CachedSentenceMap cached_sentence_map(const IndexedDataset& dataset, ElementRange documents,
                                      const SentenceMapRequest& request, const std::string& kind,
                                      const std::string& split, const std::string& folder);

}  // namespace tessera
