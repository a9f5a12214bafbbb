#include "tessera/data/sentence_map.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <random>

#include "data/array_cache.hpp"
#include "data/file.hpp"
#include "tessera/base/hash.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMostNarrow = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLongSentence = 512;                   // Megatron's LONG_SENTENCE_LEN
constexpr std::int64_t kMostSamples = std::int64_t{1} << 36;  // more is a mistake
constexpr std::int64_t kDocumentsPerReport = std::int64_t{1} << 20;

/// Draws how long the next sample is to be.
class TargetLength {
 public:
  explicit TargetLength(const SentenceMapRequest& request)
      : ratio_(request.short_seq_prob > 0 ? std::llround(1.0 / request.short_seq_prob) : 0),
        max_(request.max_length),
        random_(request.seed) {}
  std::int64_t next() {
    if (ratio_ == 0) return max_;
    const auto drawn = static_cast<std::int64_t>(random_());
    return drawn % ratio_ == 0 ? 2 + drawn % (max_ - 1) : max_;
  }

 private:
  std::int64_t ratio_, max_;
  std::mt19937 random_;
};

enum class Use { yes, too_short, long_sentence };

/// Whether a document gives samples.
Use use_of(LengthsView lengths, std::int64_t begin, std::int64_t end, std::int64_t min_sentences) {
  if (begin == end || end - begin < min_sentences) return Use::too_short;
  for (std::int64_t i = begin; i < end && end - begin > 1; ++i) {
    if (lengths[i] > kLongSentence) return Use::long_sentence;
  }
  return Use::yes;
}

template <typename T>
class MapBuilder {
 public:
  MapBuilder(LengthsView lengths, const std::vector<std::int64_t>& begins, const SentenceMapRequest& request)
      : lengths_(lengths), begins_(begins), request_(request), target_(request) {}

  /// All documents once more.
  void add_epoch() {
    for (std::size_t d = 0; d + 1 < begins_.size(); ++d) {
      if (request_.on_progress && d % kDocumentsPerReport == 0) request_.on_progress();
      add_document(begins_[d], begins_[d + 1]);
    }
  }
  std::int64_t samples() const { return static_cast<std::int64_t>(rows_.size() / 3); }

  IntArray shuffled() && {
    std::mt19937_64 random(std::uint64_t{request_.seed} + 1);
    for (std::int64_t i = samples() - 1; i > 0; --i) {
      const auto j = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(i + 1));
      std::swap_ranges(rows_.begin() + 3 * i, rows_.begin() + 3 * i + 3, rows_.begin() + 3 * j);
    }
    return IntArray(std::move(rows_));
  }

 private:
  void add_document(std::int64_t begin, std::int64_t end) {
    if (use_of(lengths_, begin, end, request_.min_sentences) != Use::yes) return;
    std::int64_t target = target_.next(), length = 0, first = begin;
    for (std::int64_t i = begin; i < end; ++i) {
      length += lengths_[i];
      const std::int64_t left = end - 1 - i;
      const bool full = length >= target && left > 1 && i + 1 - first >= request_.min_sentences;
      if (!full && left > 0) continue;
      rows_.insert(rows_.end(), {static_cast<T>(first), static_cast<T>(i + 1), static_cast<T>(target)});
      first = i + 1;
      length = 0;
      target = target_.next();
    }
  }

  LengthsView lengths_;
  const std::vector<std::int64_t>& begins_;
  const SentenceMapRequest& request_;
  TargetLength target_;
  std::vector<T> rows_;
};

template <typename T>
IntArray build(LengthsView lengths, const std::vector<std::int64_t>& begins,
               const SentenceMapRequest& request, const std::string& place) {
  MapBuilder<T> map(lengths, begins, request);
  const std::int64_t wanted = request.num_samples.value_or(1);
  while (map.samples() < wanted) {
    const std::int64_t before = map.samples();
    map.add_epoch();
    TESSERA_ENSURE(
        DataError, map.samples() > before, place, ": none of its ", begins.size() - 1,
        " documents gives a sample: ",
        to_text(count_unusable(lengths, begins, request.min_sentences), request.min_sentences),
        ". Sequences must be sentences: make the data with `tessera preprocess --split-sentences`");
    if (!request.num_samples) break;
  }
  return std::move(map).shuffled();
}

CacheJson describe(const IndexedDataset& dataset, ElementRange documents,
                   const std::vector<std::int64_t>& begins, const SentenceMapRequest& request,
                   const std::string& kind, const std::string& split) {
  CacheJson d;
  d["class"] = kind;
  d["dataset_path"] = std::filesystem::path(dataset.prefix()).filename().string();
  d["index_bytes"] = dataset.index_bytes();
  d["token_bytes"] = dataset.token_bytes();
  d["sequence_lengths"] = files::hex(dataset.lengths_hash());
  d["document_begins"] = files::hex(content_hash(std::as_bytes(std::span(begins))));
  d["num_samples"] = request.num_samples ? CacheJson(*request.num_samples) : CacheJson(nullptr);
  d["index_split"] = split;
  d["random_seed"] = request.seed;
  d["max_length"] = request.max_length;
  d["min_sentences"] = request.min_sentences;
  d["short_sequence_probability"] = request.short_seq_prob;
  d["split_range"] = {documents.begin, documents.end};
  return d;
}

/// Rows of sentences of `begins`, in order, of lengths that were asked for.
std::uint64_t check_rows(const IntArray& rows, const std::vector<std::int64_t>& begins,
                         const SentenceMapRequest& request, const std::string& path) {
  ContentHash hash;
  rows.for_each_piece([&](std::span<const std::byte> piece) { hash.add(piece); });
  std::vector<std::int64_t> piece(3 << 12);
  for (std::int64_t at = 0; at < rows.size(); at += static_cast<std::int64_t>(piece.size())) {
    piece.resize(static_cast<std::size_t>(
        std::min<std::int64_t>(rows.size() - at, static_cast<std::int64_t>(piece.size()))));
    rows.read(at, piece);
    for (std::size_t i = 0; i < piece.size(); i += 3) {
      TESSERA_ENSURE(DataError,
                     piece[i] >= begins.front() && piece[i + 1] - piece[i] >= request.min_sentences &&
                         piece[i + 1] <= begins.back() && piece[i + 2] >= 2 &&
                         piece[i + 2] <= request.max_length,
                     path, ": row (", piece[i], ", ", piece[i + 1], ", ", piece[i + 2],
                     ") is no sample of sentences [", begins.front(), ", ", begins.back(), ")");
    }
  }
  return hash.value();
}

}  // namespace

UnusableDocuments count_unusable(LengthsView lengths, const std::vector<std::int64_t>& begins,
                                 std::int64_t min_sentences) {
  UnusableDocuments found;
  for (std::size_t d = 0; d + 1 < begins.size(); ++d) {
    const Use use = use_of(lengths, begins[d], begins[d + 1], min_sentences);
    found.short_ones += use == Use::too_short ? 1 : 0;
    found.long_sentence += use == Use::long_sentence ? 1 : 0;
  }
  return found;
}

std::string to_text(const UnusableDocuments& documents, std::int64_t min_sentences) {
  return detail::concat(documents.short_ones, " have fewer than ", min_sentences, " sentences, ",
                        documents.long_sentence, " a sentence of more than ", kLongSentence, " tokens");
}

IntArray build_sentence_map(LengthsView lengths, const std::vector<std::int64_t>& begins,
                            const SentenceMapRequest& request, const std::string& place) {
  TESSERA_CHECK(!begins.empty() && begins.front() >= 0 && begins.back() <= lengths.size(),
                "documents of sentences beyond the ", lengths.size());
  TESSERA_CHECK(request.max_length >= 2 && request.max_length < kMostNarrow && request.min_sentences >= 1,
                "samples of ", request.max_length, " tokens in ", request.min_sentences, " sentences");
  TESSERA_CHECK(request.short_seq_prob >= 0 && request.short_seq_prob <= 1, "short_seq_prob ",
                request.short_seq_prob, " is not in [0, 1]");
  TESSERA_CHECK(request.num_samples.value_or(0) >= 0 && request.num_samples.value_or(0) <= kMostSamples,
                *request.num_samples, " samples");
  if (request.num_samples == 0) return IntArray(std::vector<std::int32_t>());
  if (lengths.size() > kMostNarrow) return build<std::int64_t>(lengths, begins, request, place);
  return build<std::int32_t>(lengths, begins, request, place);
}

CachedSentenceMap cached_sentence_map(const IndexedDataset& dataset, ElementRange documents,
                                      const SentenceMapRequest& request, const std::string& kind,
                                      const std::string& split, const std::string& folder) {
  const std::vector<std::int64_t> begins = dataset.document_begins(documents.begin, documents.end + 1);
  const auto build = [&] {
    const std::vector<std::int32_t> lengths = dataset.lengths();
    return std::vector<IntArray>{build_sentence_map(lengths, begins, request, dataset.prefix())};
  };
  const bool wide = dataset.sequences() > kMostNarrow;
  const CachedEntry rows{"sample_index",
                         {wide ? DType::i64 : DType::i32, {CachedEntry::kAnyRows, 3}},
                         [&](const IntArray& array, const std::string& path) {
                           return check_rows(array, begins, request, path);
                         }};
  CachedArrays found =
      cached_arrays({.folder = request.num_samples == 0 ? "" : folder,
                     .kind = kind,
                     .split = split,
                     .description = describe(dataset, documents, begins, request, kind, split),
                     .on_progress = request.on_progress},
                    std::span(&rows, 1), build);
  return {std::move(found.arrays.front()), found.cache, std::move(found.note)};
}

}  // namespace tessera
