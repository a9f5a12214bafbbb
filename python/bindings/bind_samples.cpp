// Samples of indexed datasets, as GPT and BERT are trained on them. Every call that reads or waits releases
// the interpreter lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.hpp"
#include "tessera/data/bert_dataset.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/id_check.hpp"
#include "tessera/data/loader.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Column = py::array_t<std::int64_t, py::array::c_style>;
using Shares = std::array<std::optional<std::int64_t>, 3>;

/// Samples of one split, and what Python sees of a batch of them. Copies share the samples.
struct IndexedSamples {
  std::shared_ptr<const Dataset> dataset;
  std::function<py::dict(const Batch&)> columns;  ///< called with the interpreter lock
  std::optional<TokenizerRecord> tokenizer{};     ///< what made the ids, where their files say
};

/// A new column of the batch that Python gets.
std::int64_t* add_column(py::dict& out, const char* name, std::vector<py::ssize_t> shape) {
  Column array(std::move(shape));
  std::int64_t* const data = array.mutable_data();
  out[name] = std::move(array);
  return data;
}

void add_copy(py::dict& out, const char* name, std::vector<py::ssize_t> shape,
              const std::vector<std::int32_t>& values) {
  std::ranges::copy(values, add_column(out, name, std::move(shape)));
}

/// `text`, seq_length + 1 ids of which labels are all but the first, and what the options ask for besides.
/// The dataset is one without eod_mask_loss, which would take the last id away.
py::dict gpt_columns(const Batch& batch, std::int32_t end_of_document, bool eod_mask_loss) {
  const auto s = batch.seq_length;
  py::dict out;
  std::int64_t* const text = add_column(out, "text", {batch.batch, s + 1});
  std::int64_t* const labels = eod_mask_loss ? add_column(out, "labels", {batch.batch, s}) : nullptr;
  for (std::int64_t b = 0; b < batch.batch; ++b) {
    std::int64_t* const row = text + b * (s + 1);
    std::copy_n(batch.tokens.begin() + b * s, s, row);
    row[s] = batch.labels[static_cast<std::size_t>((b + 1) * s - 1)];
    if (labels == nullptr) continue;
    for (std::int64_t i = 0; i < s; ++i)
      labels[b * s + i] = row[i] == end_of_document ? kIgnoredLabel : row[i + 1];
  }
  if (!batch.position_ids.empty()) add_copy(out, "position_ids", {batch.batch, s}, batch.position_ids);
  if (!batch.document_ids.empty()) add_copy(out, "document_ids", {batch.batch, s}, batch.document_ids);
  return out;
}

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

py::dict fetch_samples(const IndexedSamples& samples, const std::vector<std::int64_t>& numbers) {
  return samples.columns(unlocked([&] { return read_samples(*samples.dataset, numbers); }));
}

/// The three splits, None for one without a share; tells of caches that were damaged.
py::tuple splits_of(const DatasetSplits& data, const IndexedSamples& kind) {
  for (const std::string& warning : data.warnings) py::module_::import("warnings").attr("warn")(warning);
  const auto wrapped = [&](const std::shared_ptr<const Dataset>& dataset) -> py::object {
    if (dataset == nullptr) return py::none();
    return py::cast(IndexedSamples{dataset, kind.columns, kind.tokenizer});
  };
  return py::make_tuple(wrapped(data.train), wrapped(data.valid), wrapped(data.test));
}

std::optional<DatasetRecord> record_of(const SplitsOptions& options) {
  std::vector<std::string> prefixes;
  for (const BlendMember& member : options.members) prefixes.push_back(member.prefix);
  return shared_record(prefixes);
}

/// Data whose record names a tokenizer must fit the model's vocabulary (0: unknown); others are looked
/// through for ids beyond it.
void check_vocabulary(const std::optional<DatasetRecord>& record, const SplitsOptions& options) {
  const std::int64_t vocab_size = options.files.vocab_size;
  if (vocab_size == 0) return;
  for (const BlendMember& member : options.members) {
    if (!record) check_ids(IndexedDataset(member.prefix, options.files));
  }
  TESSERA_ENSURE(ConfigError, !record || record->tokenizer.vocab_size <= vocab_size,
                 "the data were made with ", to_text(record->tokenizer), ", and the model's vocabulary is ",
                 vocab_size, ": they do not belong together");
}

/// The end of documents in these data: what their record says, which `given` (-1: not given) must not
/// contradict.
std::int32_t settle_end_of_document(const std::optional<DatasetRecord>& record, std::int32_t given) {
  if (!record) return given;
  const TokenizerRecord& made = record->tokenizer;
  TESSERA_ENSURE(ConfigError, given < 0 || given == made.end_of_document, "eos_token_id is ", given,
                 ", but the data were made with ", to_text(made), ", whose end of document is ",
                 made.end_of_document, ": leave eos_token_id out, and it follows from the data");
  return made.end_of_document;
}

py::tuple open_gpt_samples(const std::vector<std::string>& data_path, const std::string& split,
                           const Shares& num_samples, std::int64_t seq_length, std::uint32_t seed,
                           std::int32_t given_end, bool reset_position_ids, bool reset_attention_mask,
                           bool eod_mask_loss, const std::string& cache_dir, std::int64_t vocab_size) {
  TESSERA_ENSURE(ConfigError, seq_length > 0, "seq_length is ", seq_length);
  std::optional<TokenizerRecord> tokenizer;
  std::int32_t end_of_document = -1;
  const GptData data = unlocked([&] {
    GptDataOptions options;
    options.members = parse_blend(data_path);
    options.files.vocab_size = vocab_size;
    const std::optional<DatasetRecord> record = record_of(options);
    if (record) tokenizer = record->tokenizer;
    check_vocabulary(record, options);
    end_of_document = settle_end_of_document(record, given_end);
    TESSERA_ENSURE(
        ConfigError, end_of_document >= 0 || !(reset_position_ids || reset_attention_mask || eod_mask_loss),
        "reset_position_ids, reset_attention_mask and eod_mask_loss need the end-of-document id: set "
        "eos_token_id");
    options.split = split;
    options.num_samples = num_samples;
    options.dataset.seq_length = seq_length;
    options.dataset.seed = seed;
    options.dataset.end_of_document = end_of_document;
    options.dataset.reset_position_ids = reset_position_ids;
    options.dataset.reset_attention_mask = reset_attention_mask;
    options.dataset.cache_folder = cache_dir;
    return build_gpt_data(options);
  });
  const auto columns = [=](const Batch& batch) { return gpt_columns(batch, end_of_document, eod_mask_loss); };
  return splits_of(data, {nullptr, columns, tokenizer});
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
  Shares num_samples{};
  std::int64_t vocab_size = 0;
  double short_seq_prob = 0.1;
  std::uint32_t seed = 1234;
  MaskingOptions masking{};
  SpecialTokens ids{};  ///< those that count over the tokenizer's
};

SentenceRequest request_of(py::dict& given) {
  SentenceRequest request;
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
  found.ids = known && found.tokenizer ? found.tokenizer->vocab_size : request.vocab_size;
  return found;
}

py::tuple open_bert_samples(std::int64_t seq_length, bool binary_head, const py::kwargs& more) {
  py::dict given(more);
  const SentenceRequest request = request_of(given);
  refuse_left(given);
  SentenceData found;
  const DatasetSplits data = unlocked([&] {
    BertDataOptions options;
    found = settle(request, options);
    options.dataset.seq_length = seq_length;
    options.dataset.seed = request.seed;
    options.dataset.binary_head = binary_head;
    options.dataset.short_seq_prob = request.short_seq_prob;
    options.dataset.masking = request.masking;
    options.dataset.special = found.special;
    options.dataset.vocab_size = found.ids;
    options.dataset.cache_folder = request.cache_dir;
    return build_bert_data(options);
  });
  return splits_of(data, {nullptr, bert_columns, found.tokenizer});
}

/// This data rank's part of one global batch after another, read ahead by a thread.
class SampleLoader {
 public:
  SampleLoader(const IndexedSamples& samples, std::int64_t global_batch_size, std::int64_t data_rank,
               std::int64_t data_ranks, std::int64_t consumed_samples, double timeout_s)
      : samples_(samples),
        // A rank's part is one run of samples, so it is given as one micro-batch.
        loader_(samples.dataset,
                {.global_batch_size = global_batch_size,
                 .micro_batch_size = global_batch_size / std::max<std::int64_t>(data_ranks, 1),
                 .data_parallel_rank = data_rank,
                 .data_parallel_size = data_ranks,
                 .consumed_samples = consumed_samples,
                 .timeout_s = timeout_s}) {}

  py::object next() {
    const auto batch = unlocked([&] { return loader_.next(); });
    if (!batch) return py::none();
    return samples_.columns(*batch);
  }
  std::int64_t consumed_samples() const { return loader_.consumed_samples(); }

 private:
  IndexedSamples samples_;
  DataLoader loader_;
};

}  // namespace

void bind_samples(py::module_& module) {
  py::class_<IndexedSamples>(module, "IndexedSamples", "Samples of one split, numbered from 0.")
      .def("__len__", [](const IndexedSamples& samples) { return samples.dataset->size(); })
      .def_property_readonly("seq_length",
                             [](const IndexedSamples& samples) { return samples.dataset->seq_length(); })
      .def_property_readonly(
          "tokenizer",
          [](const IndexedSamples& samples) {
            return samples.tokenizer ? std::optional(to_json(*samples.tokenizer)) : std::nullopt;
          },
          "The record of the tokenizer that made the ids, as JSON; None where nothing says.")
      .def("fetch", &fetch_samples, py::arg("numbers"),
           "Samples as a dict of int64 arrays. InvalidArgument out of range.");
  module.def("open_gpt_samples", &open_gpt_samples, py::arg("data_path"), py::arg("split"),
             py::arg("num_samples"), py::arg("seq_length"), py::arg("seed"), py::arg("end_of_document") = -1,
             py::arg("reset_position_ids") = false, py::arg("reset_attention_mask") = false,
             py::arg("eod_mask_loss") = false, py::arg("cache_dir") = "", py::arg("vocab_size") = 0,
             "(train, valid, test), None for a split without a share: text [n, s+1], and labels (-100 = "
             "ignored), position_ids and document_ids [n, s] where the options ask for them. data_path: "
             "prefixes, or weights and prefixes in turn. ConfigError, DataError.");
  module.def(
      "open_bert_samples", &open_bert_samples, py::arg("seq_length"), py::arg("binary_head"),
      "(train, valid, test), None for a split without a share: text, labels (-1 = ignored), loss_mask, "
      "padding_mask [n, s], and with the binary head types [n, s] and is_random [n]. Options: "
      "data_path, split, num_samples, seed, cache_dir and vocab_size as above, vocab_file, and the "
      "keys of `data` in YAML, mask_prob to pad_id. ConfigError, DataError, InvalidArgument.");
  py::class_<SampleLoader>(module, "SampleLoader", "Reads batches of IndexedSamples ahead in a thread.")
      .def(py::init<const IndexedSamples&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double>(),
           py::arg("samples"), py::arg("global_batch_size"), py::arg("data_rank"), py::arg("data_ranks"),
           py::arg("consumed_samples"), py::arg("timeout_s") = 600.0)
      .def("next", &SampleLoader::next,
           "This data rank's part of the next global batch, a dict as of IndexedSamples.fetch; None when "
           "less than a global batch is left.")
      .def_property_readonly("consumed_samples", &SampleLoader::consumed_samples);
}

}  // namespace tessera::bindings
