// Samples of indexed datasets, as GPT is trained on them, and their loader. Every call that reads or waits
// releases the interpreter lock.
#include "samples.hpp"

#include <algorithm>

#include "tessera/data/id_check.hpp"
#include "tessera/data/loader.hpp"

namespace py = pybind11;

namespace tessera::bindings {

std::int64_t* add_column(py::dict& out, const char* name, const std::vector<py::ssize_t>& shape) {
  py::array_t<std::int64_t, py::array::c_style> array(shape);
  std::int64_t* const data = array.mutable_data();
  out[name] = std::move(array);
  return data;
}

void add_copy(py::dict& out, const char* name, const std::vector<py::ssize_t>& shape,
              const std::vector<std::int32_t>& values) {
  std::ranges::copy(values, add_column(out, name, shape));
}

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

namespace {

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

py::dict fetch_samples(const IndexedSamples& samples, const std::vector<std::int64_t>& numbers) {
  return samples.columns(unlocked([&] { return read_samples(*samples.dataset, numbers); }));
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
                           const SampleCounts& num_samples, std::int64_t seq_length, std::uint32_t seed,
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
  bind_sentences(module);
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
