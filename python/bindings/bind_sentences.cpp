// Samples of sentences, as BERT and T5 are trained on them. Every call that reads releases the interpreter
// lock.
#include <algorithm>

#include "samples.hpp"
#include "tessera/data/bert_dataset.hpp"
#include "tessera/data/t5_dataset.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

/// 1 before each sample's end.
void add_padding_mask(py::dict& out, const char* name, const std::vector<std::int32_t>& ends,
                      std::int64_t width) {
  std::int64_t* mask = add_column(out, name, {static_cast<py::ssize_t>(ends.size()), width});
  for (const std::int32_t end : ends) mask = std::fill_n(std::fill_n(mask, end, 1), width - end, 0);
}

/// Megatron's -1 where there is no loss, and where there is one.
void add_labels(py::dict& out, const std::vector<std::int32_t>& labels,
                const std::vector<py::ssize_t>& shape) {
  std::ranges::transform(labels, add_column(out, "labels", shape),
                         [](std::int32_t label) { return label == kIgnoredLabel ? -1 : label; });
  std::ranges::transform(labels, add_column(out, "loss_mask", shape),
                         [](std::int32_t label) { return label == kIgnoredLabel ? 0 : 1; });
}

/// Megatron's; without a binary head there are no types and no order of segments.
py::dict bert_columns(const Batch& batch) {
  const std::vector<py::ssize_t> shape{batch.batch, batch.seq_length};
  py::dict out;
  add_copy(out, "text", shape, batch.tokens);
  if (!batch.token_types.empty()) add_copy(out, "types", shape, batch.token_types);
  add_labels(out, batch.labels, shape);
  if (!batch.sample_labels.empty()) add_copy(out, "is_random", {batch.batch}, batch.sample_labels);
  add_padding_mask(out, "padding_mask", batch.key_end, batch.seq_length);
  return out;
}

/// uint8 [samples, positions, keys]: 1 where a position before its sample's end sees a key before its;
/// `causal`: and none behind its own.
void add_mask(py::dict& out, const char* name, const std::vector<std::int32_t>& positions,
              const std::vector<std::int32_t>& keys, std::int64_t width, std::int64_t height,
              bool causal = false) {
  py::array_t<std::uint8_t> mask({static_cast<py::ssize_t>(keys.size()), height, width});
  std::uint8_t* at = mask.mutable_data();
  std::fill_n(at, mask.size(), std::uint8_t{0});
  for (std::size_t sample = 0; sample < keys.size(); ++sample) {
    for (std::int64_t i = 0; i < height; ++i, at += width) {
      if (i >= positions[sample]) continue;
      std::fill_n(at, causal ? std::min<std::int64_t>(i + 1, keys[sample]) : keys[sample], std::uint8_t{1});
    }
  }
  out[name] = std::move(mask);
}

/// Where each row's labels end.
std::vector<std::int32_t> ends_of(const std::vector<std::int32_t>& labels, std::int64_t width) {
  std::vector<std::int32_t> ends;
  for (auto row = labels.begin(); row != labels.end(); row += width)
    ends.push_back(static_cast<std::int32_t>(std::find(row, row + width, kIgnoredLabel) - row));
  return ends;
}

/// Megatron's.
py::dict t5_columns(const Batch& batch) {
  const std::vector<py::ssize_t> encoder{batch.batch, batch.encoder_seq_length},
      decoder{batch.batch, batch.seq_length};
  py::dict out;
  add_copy(out, "text_enc", encoder, batch.encoder_tokens);
  add_copy(out, "text_dec", decoder, batch.tokens);
  add_labels(out, batch.labels, decoder);
  // The decoder's tokens end where its labels do.
  const std::vector<std::int32_t>& read = batch.encoder_key_end;
  const std::vector<std::int32_t> said = ends_of(batch.labels, batch.seq_length);
  add_mask(out, "enc_mask", read, read, batch.encoder_seq_length, batch.encoder_seq_length);
  add_mask(out, "dec_mask", said, said, batch.seq_length, batch.seq_length, true);
  add_mask(out, "enc_dec_mask", said, read, batch.encoder_seq_length, batch.seq_length);
  return out;
}

/// The tokenizer that `vocab_file` names, which must be that of the data's record.
std::optional<TokenizerRecord> tokenizer_of(const std::optional<DatasetRecord>& record,
                                            const std::string& vocab_file) {
  if (vocab_file.empty()) return record ? std::optional(record->tokenizer) : std::nullopt;
  TokenizerOptions options;
  (vocab_file.ends_with(".txt") ? options.vocab_file : options.model) = vocab_file;
  // A vocab.txt does not say by itself whether letters keep their case.
  if (record && vocab_file.ends_with(".txt") && record->tokenizer.type.starts_with("BertWordPiece"))
    options.type = record->tokenizer.type;
  const TokenizerRecord named = describe_tokenizer(options);
  TESSERA_ENSURE(ConfigError, !record || same_ids(named, record->tokenizer), "vocab_file is ", to_text(named),
                 ", but the data were made with ", to_text(record->tokenizer),
                 ": leave vocab_file out, and it follows from the data");
  return record ? record->tokenizer : named;
}

/// Takes `name` out of `given`, where it is there.
template <typename T>
void take(py::dict& given, const char* name, T& value) {
  if (given.contains(name)) value = given.attr("pop")(name).cast<T>();
}

/// What is asked of samples of sentences.
struct SentenceRequest {
  std::vector<std::string> data_path{};
  std::string split = "969,30,1", vocab_file{}, cache_dir{};
  SampleCounts num_samples{};
  std::int64_t vocab_size = 0;
  double short_seq_prob = 0.1;
  std::uint32_t seed = 1234;
  MaskingOptions masking{};
  SpecialTokens ids{};  ///< those that count over the tokenizer's
  std::int64_t extra_ids = 0;
};

/// `masking`: what is not given.
SentenceRequest request_of(py::dict& given, const MaskingOptions& masking) {
  SentenceRequest request{.masking = masking};
  take(given, "data_path", request.data_path);
  take(given, "split", request.split);
  take(given, "num_samples", request.num_samples);
  take(given, "seed", request.seed);
  take(given, "vocab_file", request.vocab_file);
  take(given, "vocab_size", request.vocab_size);
  take(given, "cache_dir", request.cache_dir);
  take(given, "short_seq_prob", request.short_seq_prob);
  take(given, "mask_prob", request.masking.mask_prob);
  take(given, "masking_max_ngram", request.masking.max_ngram);
  take(given, "masking_do_full_word", request.masking.whole_words);
  take(given, "masking_use_longer_ngrams", request.masking.longer_ngrams);
  take(given, "masking_use_geometric_distribution", request.masking.geometric);
  take(given, "cls_id", request.ids.cls);
  take(given, "sep_id", request.ids.sep);
  take(given, "mask_id", request.ids.mask);
  take(given, "pad_id", request.ids.pad);
  take(given, "bos_id", request.ids.bos);
  take(given, "eos_id", request.ids.eos);
  take(given, "vocab_extra_ids", request.extra_ids);
  std::vector<std::int64_t> sentinels;
  take(given, "sentinel_ids", sentinels);
  TESSERA_ENSURE(ConfigError, sentinels.empty() || sentinels.size() == 2,
                 "sentinel_ids are two ids, the first and the last, not ", sentinels.size());
  if (!sentinels.empty()) request.ids.sentinels = sentinels_between(sentinels.front(), sentinels.back());
  return request;
}

void refuse_left(const py::dict& given) {
  if (given.empty()) return;
  throw InvalidArgument("no option of these samples: " + py::cast<std::string>(py::str(given)));
}

/// What follows from the request and the data.
struct SentenceData {
  std::optional<TokenizerRecord> tokenizer{};
  SpecialTokens special{};
  std::int64_t ids = 0;  ///< of the tokenizer
};

/// Fills in `options`, and finds the special tokens.
SentenceData settle(const SentenceRequest& request, SplitsOptions& options) {
  options.members = parse_blend(request.data_path);
  options.split = request.split;
  options.num_samples = request.num_samples;
  options.files.vocab_size = request.vocab_size;
  const std::optional<DatasetRecord> record = record_of(options);
  check_vocabulary(record, options);
  SentenceData found{.tokenizer = tokenizer_of(record, request.vocab_file)};
  const auto known = known_special_tokens(record, found.tokenizer);
  TESSERA_ENSURE(
      ConfigError, known || !request.masking.whole_words,
      "nothing says which tokens go on with the word before them: give the tokenizer that the data "
      "were made with as vocab_file, or masking_do_full_word=False");
  found.special = known.value_or(SpecialTokens{});
  const auto given = [&](const char* name, std::int32_t id, std::int32_t& into) {
    if (id < 0) return;
    TESSERA_ENSURE(ConfigError, request.vocab_size == 0 || id < request.vocab_size, name, " is ", id,
                   ", and the model's vocabulary is ", request.vocab_size);
    into = id;
  };
  given("cls_id", request.ids.cls, found.special.cls);
  given("sep_id", request.ids.sep, found.special.sep);
  given("mask_id", request.ids.mask, found.special.mask);
  given("pad_id", request.ids.pad, found.special.pad);
  given("bos_id", request.ids.bos, found.special.bos);
  given("eos_id", request.ids.eos, found.special.eos);
  if (!request.ids.sentinels.empty()) found.special.sentinels = request.ids.sentinels;
  found.ids = known && found.tokenizer ? found.tokenizer->vocab_size : request.vocab_size;
  return found;
}

/// What samples of both kinds are told alike.
template <typename Options>
void fill(Options& options, const SentenceRequest& request, const SentenceData& found) {
  options.seed = request.seed;
  options.short_seq_prob = request.short_seq_prob;
  options.masking = request.masking;
  options.special = found.special;
  options.vocab_size = found.ids;
  options.cache_folder = request.cache_dir;
}

py::tuple open_bert_samples(std::int64_t seq_length, bool binary_head, const py::kwargs& more) {
  py::dict given(more);
  const SentenceRequest request = request_of(given, BertDatasetOptions{}.masking);
  refuse_left(given);
  SentenceData found;
  const DatasetSplits data = unlocked([&] {
    BertDataOptions options;
    found = settle(request, options);
    options.dataset.seq_length = seq_length;
    options.dataset.binary_head = binary_head;
    fill(options.dataset, request, found);
    return build_bert_data(options);
  });
  return splits_of(data, {nullptr, bert_columns, found.tokenizer});
}

py::tuple open_t5_samples(std::int64_t encoder_length, std::int64_t decoder_length, const py::kwargs& more) {
  py::dict given(more);
  const SentenceRequest request = request_of(given, T5DatasetOptions{}.masking);
  refuse_left(given);
  SentenceData found;
  const DatasetSplits data = unlocked([&] {
    T5DataOptions options;
    found = settle(request, options);
    add_t5_tokens(found.special, found.ids, request.extra_ids);
    TESSERA_ENSURE(ConfigError, request.vocab_size == 0 || found.ids <= request.vocab_size, "with its ",
                   found.special.sentinels.size(), " sentinels the vocabulary of the data has ", found.ids,
                   " tokens, and the model's ", request.vocab_size);
    options.dataset.encoder_length = encoder_length;
    options.dataset.decoder_length = decoder_length;
    fill(options.dataset, request, found);
    return build_t5_data(options);
  });
  return splits_of(data, {nullptr, t5_columns, found.tokenizer});
}

}  // namespace

void bind_sentences(py::module_& module) {
  module.def(
      "open_bert_samples", &open_bert_samples, py::arg("seq_length"), py::arg("binary_head"),
      "(train, valid, test), None for a split without a share: text, labels (-1 = ignored), loss_mask, "
      "padding_mask [n, s], and with the binary head types [n, s] and is_random [n]. Options: "
      "data_path, split, num_samples, seed, cache_dir and vocab_size as above, vocab_file, and the "
      "keys of `data` in YAML, mask_prob to pad_id. ConfigError, DataError, InvalidArgument.");
  module.def(
      "open_t5_samples", &open_t5_samples, py::arg("encoder_length"), py::arg("decoder_length"),
      "(train, valid, test), None for a split without a share: text_enc [n, encoder_length], text_dec, "
      "labels (-1 = ignored), loss_mask [n, decoder_length], and uint8 masks enc_mask, dec_mask, "
      "enc_dec_mask [n, positions, keys], 1 where a position sees a key. Options: as of "
      "open_bert_samples, and bos_id, eos_id, vocab_extra_ids, sentinel_ids. ConfigError, DataError, "
      "InvalidArgument.");
}

}  // namespace tessera::bindings
