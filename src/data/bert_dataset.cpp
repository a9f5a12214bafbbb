#include "tessera/data/bert_dataset.hpp"

#include <algorithm>

#include "data/sentence_samples.hpp"
#include "tessera/data/batch.hpp"

namespace tessera {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr const char* kKind = "BERTMaskedWordPieceDataset";
constexpr std::int64_t kSpecials = 3;  // [CLS] and two [SEP]
// What becomes of a masked token: [MASK], else any token or, with this share, itself.
constexpr double kMaskedShare = 0.8, kKeptShareOfRest = 0.5;

/// A part of `tokens`, cut from either end without moving them.
struct Segment {
  Ids tokens{};
  std::size_t begin = 0, end = 0;

  explicit Segment(std::span<const Ids> sentences) {
    for (const Ids& sentence : sentences) tokens.insert(tokens.end(), sentence.begin(), sentence.end());
    end = tokens.size();
  }
  std::size_t size() const { return end - begin; }
  void append_to(Ids& out) const {
    out.insert(out.end(), tokens.begin() + static_cast<std::ptrdiff_t>(begin),
               tokens.begin() + static_cast<std::ptrdiff_t>(end));
  }
};

/// One token at a time from the longer side, of equal ones the second, at an end drawn anew each time.
void trim(Segment& first, Segment& second, std::int64_t target_length, NumpyRandom& random) {
  while (static_cast<std::int64_t>(first.size() + second.size()) > target_length) {
    Segment& longer = first.size() > second.size() ? first : second;
    if (random.random() < 0.5)
      ++longer.begin;
    else
      --longer.end;
  }
}

void mask_tokens(BertSample& sample, std::int64_t target_length, const BertDatasetOptions& options,
                 const std::vector<bool>& continues, NumpyRandom& random) {
  const MaskingOptions& masking = options.masking;
  const Ids original = sample.tokens;
  sample.labels.assign(original.size(), kIgnoredLabel);
  const Words words = find_words(original, options.special, continues, masking.whole_words);
  const double budget =
      mask_budget(static_cast<std::int64_t>(original.size()), target_length, masking.mask_prob);
  choose_runs(words, budget, masking, random, [&](std::span<const std::int32_t> run) {
    for (const std::int32_t position : run) {
      const auto at = static_cast<std::size_t>(position);
      sample.labels[at] = original[at];
      if (random.random() < kMaskedShare)
        sample.tokens[at] = options.special.mask;
      else if (random.random() >= kKeptShareOfRest)
        sample.tokens[at] = static_cast<std::int32_t>(random.randint(0, options.vocab_size));
    }
  });
}

}  // namespace

BertSample make_bert_sample(std::vector<Ids> sentences, std::int64_t target_length, std::int64_t index,
                            const BertDatasetOptions& options, const std::vector<bool>& continues) {
  const auto count = static_cast<std::int64_t>(sentences.size());
  TESSERA_ENSURE(DataError, count >= (options.binary_head ? 2 : 1), "sample ", index, " has ", count,
                 " sentences, and two segments are to be made of them");
  // Megatron: (seed + index) mod 2^32.
  NumpyRandom random(static_cast<std::uint32_t>(options.seed + static_cast<std::uint64_t>(index)));
  std::int64_t pivot = options.binary_head ? 1 : count;
  if (options.binary_head && count >= 3) pivot = random.randint(1, count);
  BertSample sample;
  sample.swapped = options.binary_head && random.random() < 0.5;
  const auto all = std::span<const Ids>(sentences);
  Segment first(all.first(static_cast<std::size_t>(pivot)));
  Segment second(all.subspan(static_cast<std::size_t>(pivot)));
  if (sample.swapped) std::swap(first, second);
  trim(first, second, target_length, random);
  sample.tokens.push_back(options.special.cls);
  first.append_to(sample.tokens);
  sample.tokens.push_back(options.special.sep);
  sample.second = static_cast<std::int32_t>(sample.tokens.size());
  if (second.size() > 0) {
    second.append_to(sample.tokens);
    sample.tokens.push_back(options.special.sep);
  }
  mask_tokens(sample, target_length, options, continues, random);
  return sample;
}

void check_special_tokens(const SpecialTokens& special) {
  struct Need {
    const char *token, *key;
    std::int32_t id;
  };
  for (const Need& need :
       {Need{"[CLS]", "data.cls_id", special.cls}, Need{"[SEP]", "data.sep_id", special.sep},
        Need{"[MASK]", "data.mask_id", special.mask}, Need{"[PAD]", "data.pad_id", special.pad}}) {
    TESSERA_ENSURE(ConfigError, need.id >= 0, "samples of sentences need the token ", need.token,
                   ", and the tokenizer of the data has none that is known by a usual name: give its id as ",
                   need.key, ", or make the data with a tokenizer that has it (tessera preprocess)");
  }
}

BertDataset::BertDataset(std::shared_ptr<const IndexedDataset> data, ElementRange range,
                         BertDatasetOptions options)
    : data_(std::move(data)), options_(std::move(options)) {
  check_special_tokens(options_.special);
  TESSERA_ENSURE(ConfigError, options_.seq_length >= kSpecials + 2, "training.seq_length ",
                 options_.seq_length,
                 " is too short for samples of sentences: [CLS], two [SEP] and two "
                 "tokens are ",
                 kSpecials + 2);
  check_masking(options_.masking);
  continues_ = continuation_flags(options_.special, options_.vocab_size);
  const SentenceMapRequest request{.max_length = options_.seq_length - kSpecials,
                                   .min_sentences = options_.binary_head ? 2 : 1,
                                   .num_samples = options_.num_samples,
                                   .short_seq_prob = options_.short_seq_prob,
                                   .seed = options_.seed,
                                   .on_progress = options_.on_progress};
  const std::string folder =
      options_.use_cache ? map_folder(*data_, options_.cache_folder, kKind) : std::string();
  map_ = cached_sentence_map(*data_, range, request, kKind, name_of(options_.split), folder);
}

void BertDataset::fetch(std::int64_t index, const SampleView& out) const {
  SentenceRow row = read_row(*data_, map_, index);
  check_view(out, options_.seq_length, fields());
  const BertSample sample =
      make_bert_sample(std::move(row.sentences), row.target_length, index, options_, continues_);
  const auto length = static_cast<std::ptrdiff_t>(sample.tokens.size());
  TESSERA_ENSURE(DataError, length <= options_.seq_length, data_->prefix(), ": sample ", index, " has ",
                 length, " tokens, not ", options_.seq_length,
                 ". Its cached map does not belong to the data: remove it, and it is built anew");
  fill_padded(out.tokens, sample.tokens, options_.special.pad);
  fill_padded(out.labels, sample.labels, kIgnoredLabel);
  out.key_end.front() = static_cast<std::int32_t>(length);
  if (!options_.binary_head) return;
  std::ranges::fill(out.token_types, 0);
  std::fill(out.token_types.begin() + sample.second, out.token_types.begin() + length, 1);
  out.sample_label.front() = sample.swapped ? 1 : 0;
}

DatasetSplits build_bert_data(const BertDataOptions& options) {
  return build_splits(options, MakerOfSentences<BertDataset, BertDatasetOptions>(options.dataset));
}

}  // namespace tessera
