#include "tessera/data/t5_dataset.hpp"

#include <algorithm>

#include "data/sentence_samples.hpp"
#include "tessera/data/batch.hpp"

namespace tessera {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr const char* kKind = "T5MaskedWordPieceDataset";
constexpr std::int64_t kRoom =
    2;  // Megatron leaves it in the encoder, for a start and an end that it does not write

/// Positions of the runs to be left out, in the order of the text.
std::vector<Ids> draw_runs(const Ids& tokens, std::int64_t target_length, const T5DatasetOptions& options,
                           const std::vector<bool>& continues, NumpyRandom& random) {
  const Words words = find_words(tokens, options.special, continues, options.masking.whole_words);
  const double budget =
      mask_budget(static_cast<std::int64_t>(tokens.size()), target_length, options.masking.mask_prob);
  std::vector<Ids> runs;
  choose_runs(words, budget, options.masking, random,
              [&](std::span<const std::int32_t> run) { runs.emplace_back(run.begin(), run.end()); });
  std::ranges::sort(runs, {}, [](const Ids& run) { return run.front(); });
  return runs;
}

}  // namespace

T5Sample make_t5_sample(const std::vector<Ids>& sentences, std::int64_t target_length, std::int64_t index,
                        const T5DatasetOptions& options, const std::vector<bool>& continues) {
  Ids text;
  for (const Ids& sentence : sentences) text.insert(text.end(), sentence.begin(), sentence.end());
  text.resize(std::min(text.size(), static_cast<std::size_t>(target_length)));
  // Megatron: (seed + index) mod 2^32.
  NumpyRandom random(static_cast<std::uint32_t>(options.seed + static_cast<std::uint64_t>(index)));
  const std::vector<Ids> runs = draw_runs(text, target_length, options, continues, random);
  const Ids& sentinels = options.special.sentinels;
  TESSERA_ENSURE(DataError, runs.size() <= sentinels.size(), "sample ", index, " leaves out ", runs.size(),
                 " runs of words, and there are ", sentinels.size(),
                 " sentinels: raise data.vocab_extra_ids, or lower data.mask_prob");
  T5Sample sample;
  sample.tokens.push_back(options.special.bos);
  auto rest = text.begin();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    sample.encoder_tokens.insert(sample.encoder_tokens.end(), rest, text.begin() + runs[i].front());
    sample.encoder_tokens.push_back(sentinels[i]);
    sample.tokens.push_back(sentinels[i]);
    for (const std::int32_t position : runs[i])
      sample.tokens.push_back(text[static_cast<std::size_t>(position)]);
    rest = text.begin() + runs[i].back() + 1;
  }
  sample.encoder_tokens.insert(sample.encoder_tokens.end(), rest, text.end());
  sample.labels.assign(sample.tokens.begin() + 1, sample.tokens.end());
  sample.labels.push_back(options.special.eos);
  return sample;
}

std::int64_t most_masked(std::int64_t encoder_length, double mask_prob) {
  const std::int64_t tokens = encoder_length - kRoom;
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(mask_budget(tokens, tokens, mask_prob)));
}

std::vector<std::int32_t> sentinels_between(std::int64_t first, std::int64_t last) {
  const std::int64_t step = first <= last ? 1 : -1;
  std::vector<std::int32_t> ids;
  for (std::int64_t id = first; id != last + step; id += step) ids.push_back(static_cast<std::int32_t>(id));
  return ids;
}

void add_t5_tokens(SpecialTokens& special, std::int64_t& ids, std::int64_t extra_ids) {
  const auto have = static_cast<std::int64_t>(special.sentinels.size());
  if (have > 0) {
    TESSERA_ENSURE(ConfigError, extra_ids <= have, "data.vocab_extra_ids is ", extra_ids,
                   ", and the tokenizer of the data has ", have,
                   " sentinels (<extra_id_0> and so on): leave it out, and all are used");
    if (extra_ids > 0) special.sentinels.resize(static_cast<std::size_t>(extra_ids));
  } else if (extra_ids > 0) {
    const auto next = [&ids] { return static_cast<std::int32_t>(ids++); };
    if (special.bos < 0) special.bos = next();
    if (special.eos < 0) special.eos = next();
    for (std::int64_t i = 0; i < extra_ids; ++i) special.sentinels.push_back(next());
  }
  if (special.bos < 0) special.bos = special.pad;
}

void check_t5_tokens(const SpecialTokens& special) {
  struct Need {
    const char *token, *key;
    bool there;
  };
  for (const Need& need : {Need{"<extra_id_0> and others, which stand for what is left out",
                                "vocab_extra_ids (as many as there are to be)", !special.sentinels.empty()},
                           Need{"[EOS] or </s>", "eos_id", special.eos >= 0},
                           Need{"[PAD] or <pad>", "pad_id", special.pad >= 0}}) {
    TESSERA_ENSURE(ConfigError, need.there, "samples of T5 need the token ", need.token,
                   ", and the tokenizer of the data has none that is known by a usual name: give data.",
                   need.key, ", or make the data with a tokenizer that has it (tessera preprocess)");
  }
}

T5Dataset::T5Dataset(std::shared_ptr<const IndexedDataset> data, ElementRange range, T5DatasetOptions options)
    : data_(std::move(data)), options_(std::move(options)) {
  const T5DatasetOptions& o = options_;
  check_t5_tokens(o.special);
  check_masking(o.masking);
  TESSERA_ENSURE(ConfigError, o.encoder_length >= kRoom + 2, "an encoder of ", o.encoder_length,
                 " tokens is too short for samples of T5: ", kRoom + 2, " are the fewest");
  const std::int64_t masked = most_masked(o.encoder_length, o.masking.mask_prob);
  TESSERA_ENSURE(ConfigError, masked >= 1, "mask_prob ", o.masking.mask_prob, " of the ",
                 o.encoder_length - kRoom,
                 " tokens of a sample is less than one token, so that nothing would be left out");
  TESSERA_ENSURE(
      ConfigError, masked + 2 <= o.decoder_length, "of the ", o.encoder_length - kRoom,
      " tokens of a full sample ", masked, " are left out, and a decoder of ", o.decoder_length,
      " tokens has no room for them, a sentinel and the start: raise training.decoder_seq_length, or lower "
      "data.mask_prob");
  continues_ = continuation_flags(o.special, o.vocab_size);
  map_ = cached_sentence_map(*data_, range,
                             {.max_length = o.encoder_length - kRoom,
                              .min_sentences = 1,
                              .num_samples = o.num_samples,
                              .short_seq_prob = o.short_seq_prob,
                              .seed = o.seed,
                              .on_progress = o.on_progress},
                             kKind, name_of(o.split),
                             o.use_cache ? map_folder(*data_, o.cache_folder, kKind) : "");
}

void T5Dataset::fetch(std::int64_t index, const SampleView& out) const {
  const SentenceRow row = read_row(*data_, map_, index);
  check_view(out, options_.decoder_length, fields());
  const T5Sample sample = make_t5_sample(row.sentences, row.target_length, index, options_, continues_);
  const auto length = static_cast<std::int64_t>(sample.encoder_tokens.size());
  TESSERA_ENSURE(DataError, length <= options_.encoder_length, data_->prefix(), ": sample ", index, " has ",
                 length, " tokens, not ", options_.encoder_length,
                 ". Its cached map does not belong to the data: remove it, and it is built anew");
  const auto said = static_cast<std::int64_t>(sample.tokens.size());
  TESSERA_ENSURE(DataError, said <= options_.decoder_length, data_->prefix(), ": sample ", index, " has ",
                 said, " tokens in the decoder, and training.decoder_seq_length is ", options_.decoder_length,
                 ": raise it to ", 2 * most_masked(options_.encoder_length, options_.masking.mask_prob) + 1,
                 ", which is enough for every sample, or lower data.mask_prob");
  fill_padded(out.encoder_tokens, sample.encoder_tokens, options_.special.pad);
  out.encoder_key_end.front() = static_cast<std::int32_t>(length);
  fill_padded(out.tokens, sample.tokens, options_.special.pad);
  fill_padded(out.labels, sample.labels, kIgnoredLabel);
}

DatasetSplits build_t5_data(const T5DataOptions& options) {
  return build_splits(options, MakerOfSentences<T5Dataset, T5DatasetOptions>(options.dataset));
}

}  // namespace tessera
