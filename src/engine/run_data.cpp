#include "engine/run_data.hpp"

#include "engine/bytes_text.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tessera/base/families.hpp"
#include "tessera/data/bert_dataset.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/id_check.hpp"
#include "tessera/data/split.hpp"
#include "tessera/data/t5_dataset.hpp"

namespace tessera {
namespace {

std::optional<DatasetRecord> record_of(const Config& config) {
  std::vector<std::string> prefixes;
  for (const NamedDataset& data : datasets_of(config)) prefixes.push_back(data.prefix);
  return shared_record(prefixes);
}

bool needs_end_of_document(const DataConfig& data) {
  return data.reset_position_ids || data.reset_attention_mask || data.eod_mask_loss;
}

/// What data.tokenizer calls the tokenizer of a record.
std::string name_of(const TokenizerRecord& tokenizer) {
  if (tokenizer.merge_file.empty()) return tokenizer.file;
  const std::filesystem::path vocab = tokenizer.file, folder = vocab.parent_path();
  TESSERA_ENSURE(ConfigError,
                 vocab.filename() == "vocab.json" && folder / "merges.txt" == tokenizer.merge_file,
                 "the data were made with ", tokenizer.file, " and ", tokenizer.merge_file,
                 ": put them into one folder as vocab.json and merges.txt, and name it in data.tokenizer");
  return folder.string();
}

/// The record of what data.tokenizer names; none if its files are not there. A vocab.txt does not say by
/// itself whether letters keep their case: it is of the type `made` says.
std::optional<TokenizerRecord> named_tokenizer(const std::string& name, const Logger& log,
                                               const TokenizerRecord& made = {}) {
  if (name == "bytes") return TokenizerRecord{};
  std::error_code error;
  if (std::filesystem::exists(name, error)) {
    const bool of_made = name.ends_with(".txt") && made.type.starts_with("BertWordPiece");
    return describe_tokenizer({.type = of_made ? made.type : "", .model = name});
  }
  log.warning("data.tokenizer ", name, " is not there: nothing can be held against it, and generating text ",
              "will need it");
  return std::nullopt;
}

RunTokenizer follow_data(const TokenizerRecord& made, const std::string& given, const Logger& log) {
  if (given == "bytes" && made.type != "bytes") {
    log.info("data.tokenizer: ", name_of(made), ", which the data were made with");
    return {name_of(made), made};
  }
  const std::optional<TokenizerRecord> named = named_tokenizer(given, log, made);
  if (!named) return {given, made};
  TESSERA_ENSURE(ConfigError, same_ids(*named, made), "data.tokenizer is ", to_text(*named),
                 ", but data.path was made with ", to_text(made),
                 ": leave data.tokenizer out, or make the data again (tessera preprocess)");
  // Where it lies now; what ends a document is the data's to say. The run is used from other folders too.
  TokenizerRecord record = *named;
  record.end_of_document = made.end_of_document;
  return {given == "bytes" ? given : name_of(*named), record};
}

RunTokenizer follow_config(const DataConfig& data, const Logger& log) {
  if (data.tokenizer == "bytes") return {};
  RunTokenizer tokenizer{data.tokenizer, named_tokenizer(data.tokenizer, log)};
  if (tokenizer.record) tokenizer.name = name_of(*tokenizer.record);
  return tokenizer;
}

using Samples = ModelSpec::Samples;

bool reads_sentences(const Config& config) { return samples_of(config) != Samples::tokens; }

std::int32_t id_of(const std::optional<std::int64_t>& given, std::int32_t known) {
  return given ? static_cast<std::int32_t>(*given) : known;
}

/// What samples of T5 need besides.
void settle_t5_tokens(const Config& config, RunTokenizer& tokenizer) {
  const DataConfig& d = config.data;
  if (!d.sentinel_ids.empty())
    tokenizer.special.sentinels = sentinels_between(d.sentinel_ids.front(), d.sentinel_ids.back());
  add_t5_tokens(tokenizer.special, tokenizer.ids, d.vocab_extra_ids);
  TESSERA_ENSURE(ConfigError, tokenizer.ids <= config.model.vocab_size, "model.vocab_size is ",
                 config.model.vocab_size, ", and with its ", tokenizer.special.sentinels.size(),
                 " sentinels the vocabulary has ", tokenizer.ids, " tokens: set it to at least as many");
  check_t5_tokens(tokenizer.special);
}

/// Fills in what samples of sentences are put together with.
void settle_special_tokens(const Config& config, const std::optional<DatasetRecord>& data,
                           RunTokenizer& tokenizer) {
  if (!reads_sentences(config)) return;
  const DataConfig& d = config.data;
  const auto known = known_special_tokens(data, tokenizer.record);
  TESSERA_ENSURE(ConfigError, known || !d.masking_do_full_word,
                 "nothing says which tokens go on with the word before them, as data.masking_do_full_word "
                 "needs: name the tokenizer that data.path was made with in data.tokenizer, or set "
                 "data.masking_do_full_word=false");
  SpecialTokens& special = tokenizer.special;
  special = known.value_or(SpecialTokens{});
  special.cls = id_of(d.cls_id, special.cls);
  special.sep = id_of(d.sep_id, special.sep);
  special.mask = id_of(d.mask_id, special.mask);
  special.pad = id_of(d.pad_id, special.pad);
  special.bos = id_of(d.bos_id, special.bos);
  special.eos = id_of(d.eos_id, special.eos);
  tokenizer.ids = known && tokenizer.record ? tokenizer.record->vocab_size : config.model.vocab_size;
  if (samples_of(config) == Samples::corrupted_spans)
    settle_t5_tokens(config, tokenizer);
  else
    check_special_tokens(special);
}

}  // namespace

RunTokenizer tokenizer_of_run(const Config& config, const Logger& log) {
  const auto data = record_of(config);
  RunTokenizer tokenizer =
      data ? follow_data(data->tokenizer, config.data.tokenizer, log) : follow_config(config.data, log);
  if (!tokenizer.record) {
    TESSERA_ENSURE(
        ConfigError, tokenizer.name == "bytes" || !needs_end_of_document(config.data),
        "data.reset_position_ids, data.reset_attention_mask and data.eod_mask_loss need the end of a "
        "document, which only data.tokenizer ",
        tokenizer.name, " knows: put it there, or name the place where it is");
    settle_special_tokens(config, data, tokenizer);
    return tokenizer;
  }
  const TokenizerRecord& record = *tokenizer.record;
  TESSERA_ENSURE(ConfigError, record.vocab_size <= config.model.vocab_size, "model.vocab_size is ",
                 config.model.vocab_size, ", but ", data ? "data.path was made with " : "data.tokenizer is ",
                 to_text(record), ": set it to at least ", record.vocab_size);
  TESSERA_ENSURE(
      ConfigError, record.end_of_document >= 0 || !needs_end_of_document(config.data),
      "data.reset_position_ids, data.reset_attention_mask and data.eod_mask_loss need the end of a "
      "document, and data.tokenizer ",
      tokenizer.name, " names none: put tokenizer_config.json with its eos_token beside it",
      data ? ", and make the data again (tessera preprocess)" : "");
  settle_special_tokens(config, data, tokenizer);
  return tokenizer;
}

namespace {

/// What data of unknown origin can have been made with, judged by their largest id.
void judge_by_ids(const Config& config, std::int32_t largest, const std::string& prefix,
                  RunTokenizer& tokenizer, const Logger& log) {
  const TokenizerRecord bytes;
  if (largest < bytes.vocab_size) {
    tokenizer.record = bytes;
    return;
  }
  const std::string what = detail::concat(
      prefix, " has ids up to ", largest, ", and data.tokenizer is bytes, whose ids end with ",
      bytes.vocab_size - 1, ": set data.tokenizer to the tokenizer.json that the data were made with");
  TESSERA_ENSURE(
      ConfigError, !needs_end_of_document(config.data), what,
      ". data.reset_position_ids, data.reset_attention_mask and data.eod_mask_loss need its end of a "
      "document");
  log.warning(what, "; generating text will need it");
}

/// How often the run reads data for training, where that is more than twice.
void tell_repeats(const Config& config, const std::vector<std::pair<NamedDataset, double>>& tokens,
                  const Logger& log) {
  const TrainingConfig& t = config.training;
  const auto share = [](const NamedDataset& data, double count) {
    return data.weight == kWeightBySize ? count : data.weight;
  };
  double shares = 0;
  for (const auto& [data, count] : tokens) shares += share(data, count);
  for (const auto& [data, count] : tokens) {
    const double read = static_cast<double>(t.steps * t.global_batch_size * t.seq_length) *
                        share(data, count) / std::max(shares, 1e-300);
    if (count == 0 || read <= 2 * count) continue;
    log.info(data.prefix, ": its ", static_cast<std::int64_t>(count), " training tokens are read ",
             std::llround(read / count), " times in training.steps ", t.steps,
             ". Watch eval_loss: it rises where a model learns its text by heart");
  }
}

/// Says that keys which only other families read are set.
void tell_unread_keys(const Config& config, const Logger& log) {
  if (reads_sentences(config)) return;
  DataConfig plain;
  const DataConfig& d = config.data;
  const bool same = d.mask_prob == plain.mask_prob && d.short_seq_prob == plain.short_seq_prob &&
                    d.masking_max_ngram == plain.masking_max_ngram &&
                    d.masking_do_full_word == plain.masking_do_full_word &&
                    d.masking_use_longer_ngrams == plain.masking_use_longer_ngrams &&
                    d.masking_use_geometric_distribution == plain.masking_use_geometric_distribution &&
                    !d.cls_id && !d.sep_id && !d.mask_id && !d.pad_id && !d.bos_id && !d.eos_id &&
                    d.vocab_extra_ids == 0 && d.sentinel_ids.empty();
  if (!same)
    log.warning("data: mask_prob, short_seq_prob, masking_... and the ids of special tokens have no effect: ",
                "model.family ", config.model.family.name, " learns the next token, not masked ones");
}

/// Says how many documents give no samples.
void tell_unusable(const Config& config, const IndexedDataset& data, const Logger& log) {
  if (!reads_sentences(config)) return;
  const bool pairs =
      samples_of(config) == Samples::masked_sentences && config.model.binary_head.value_or(false);
  const std::int64_t sentences = pairs ? 2 : 1;
  const UnusableDocuments unusable =
      count_unusable(data.lengths(), data.document_begins(0, data.documents() + 1), sentences);
  if (unusable.count() > 0)
    log.info(data.prefix(), ": ", unusable.count(), " of its ", data.documents(),
             " documents give no samples: ", to_text(unusable, sentences));
}

/// Says that a run may end at a sample for which the decoder has no room.
void tell_narrow_decoder(const Config& config, const Logger& log) {
  if (samples_of(config) != Samples::corrupted_spans) return;
  const SampleLengths lengths = sample_lengths(config);
  const std::int64_t most = 2 * most_masked(lengths.encoder, config.data.mask_prob) + 1;
  if (lengths.tokens < most)
    log.warning("training.decoder_seq_length ", lengths.tokens, ": a sample may need up to ", most,
                " tokens in the decoder, where no two words that are left out lie together; training stops "
                "at one that "
                "needs more than it has");
}

/// The sequences that training reads: shares are of documents where sequences are sentences.
ElementRange training_sequences(const Config& config, const IndexedDataset& data, const SplitBounds& bounds) {
  if (!reads_sentences(config)) return *split_ranges(bounds, data.sequences()).front();
  const ElementRange documents = *split_ranges(bounds, data.documents()).front();
  return {data.document_begin(documents.begin), data.document_begin(documents.end)};
}

}  // namespace

void check_run_data(const Config& config, RunTokenizer& tokenizer, const Logger& log,
                    const std::function<void()>& on_progress) {
  tell_unread_keys(config, log);
  tell_narrow_decoder(config, log);
  std::int32_t largest = -1;
  std::int64_t kept = 0;
  std::string where;
  std::vector<std::pair<NamedDataset, double>> training;
  for (const NamedDataset& named : datasets_of(config)) {
    const std::string& prefix = named.prefix;
    const IndexedDataset data(prefix, {.vocab_size = config.model.vocab_size, .on_progress = on_progress});
    kept += data.index_bytes() + data.token_bytes();
    if (const std::int32_t id = check_ids(data, on_progress); id > largest) {
      largest = id;
      where = prefix;
    }
    if (!reads_sentences(config) && read_dataset_record(prefix).value_or(DatasetRecord{}).split_sentences)
      log.warning(prefix, " holds sentences, which model.family ", config.model.family.name,
                  " reads one after the other like documents: make its data without --split-sentences");
    tell_unusable(config, data, log);
    const SplitBounds bounds = parse_split(named.split);
    if (!bounds.front() || named.weight == 0) continue;
    const ElementRange range = training_sequences(config, data, bounds);
    training.emplace_back(named, count_tokens(data.lengths(), range.begin, range.end));
  }
  tell_repeats(config, training, log);
  if (config.data.loader == DataLoading::cached)
    log.info("data.loader cached: each process that reads data keeps ", bytes_text(kept),
             " of index and tokens in memory");
  if (!tokenizer.record && tokenizer.name == "bytes" && !reads_sentences(config))
    judge_by_ids(config, largest, where, tokenizer, log);
}

namespace {

/// The tokenizer in a folder of weights, in the form of `data` if it is there in several.
std::optional<TokenizerRecord> tokenizer_beside(const std::filesystem::path& folder,
                                                const TokenizerRecord& data) {
  const auto has = [&folder](const char* name) {
    std::error_code error;
    return std::filesystem::is_regular_file(folder / name, error);
  };
  const bool one = has("tokenizer.json"), two = has("vocab.json") && has("merges.txt");
  if (two && (data.type == "GPT2BPETokenizer" || !one))
    return describe_tokenizer({.type = "GPT2BPETokenizer",
                               .vocab_file = (folder / "vocab.json").string(),
                               .merge_file = (folder / "merges.txt").string()});
  if (one) return describe_tokenizer({.model = (folder / "tokenizer.json").string()});
  if (has("vocab.txt")) return describe_tokenizer({.model = (folder / "vocab.txt").string()});
  return std::nullopt;
}

/// Whether the same ids may mean the same tokens: the two forms of one tokenizer compare by size only.
bool may_be_same(const TokenizerRecord& a, const TokenizerRecord& b) {
  if (a.type == b.type || a.type == "bytes" || b.type == "bytes") return same_ids(a, b);
  return a.vocab_size == b.vocab_size;
}

}  // namespace

void check_weights_tokenizer(const Config& config, const TokenizerRecord& data, const Logger& log) {
  const std::string& folder = *config.model.init_from;
  if (const auto own = tokenizer_beside(folder, data)) {
    if (may_be_same(*own, data)) return;
    const std::string what = detail::concat("the weights in model.init_from ", folder, " belong to ",
                                            to_text(*own), ", but data.path was made with ", to_text(data),
                                            ": the same ids are other tokens there");
    TESSERA_ENSURE(ConfigError, config.model.reinitialize, what,
                   ". Make the data again with the weights' tokenizer (tessera preprocess --tokenizer-model ",
                   own->file,
                   "), or, to teach these weights another vocabulary, say so by "
                   "model.reinitialize=true");
    log.warning(what);
    return;
  }
  // Vocabularies are padded, but not by this much.
  const std::int64_t unused = config.model.vocab_size - data.vocab_size;
  if (unused > std::max<std::int64_t>(1024, config.model.vocab_size / 10))
    log.warning(
        "the weights in model.init_from ", folder, " have ", config.model.vocab_size,
        " tokens, and data.path was made with ", to_text(data), ": ", unused,
        " of them never occur. If the weights were trained with another tokenizer, make the data with "
        "that one; their folder has no tokenizer.json that could tell");
}

void check_same_tokenizer(const RunState& saved, const Config& config, const RunTokenizer& tokenizer,
                          const std::filesystem::path& from) {
  const char* remedy = ". Go on with the data's own tokenizer, or give the new run another logging.dir";
  if (saved.tokenizer && tokenizer.record) {
    TESSERA_ENSURE(ConfigError, same_ids(*saved.tokenizer, *tokenizer.record), from.string(),
                   " was trained on data of ", to_text(*saved.tokenizer), "; here they are of ",
                   to_text(*tokenizer.record), remedy);
  } else if (!saved.tokenizer) {
    // Nobody knew what the data were made with: only another name can tell.
    const std::string& before = saved.config.data.tokenizer;
    TESSERA_ENSURE(ConfigError, before == "bytes" || before == config.data.tokenizer, from.string(),
                   " belongs to a run with data.tokenizer ", before, ", not ", config.data.tokenizer, remedy);
  }
}

}  // namespace tessera
