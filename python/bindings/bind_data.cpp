// Indexed datasets, GPT samples and the byte tokenizer. Every call that reads or waits releases the
// interpreter lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/id_check.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/loader.hpp"
#include "tessera/data/tokenizer.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Tokens = py::array_t<std::int32_t, py::array::c_style>;
using Column = py::array_t<std::int64_t, py::array::c_style>;

/// numpy's name of a token type.
const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return "uint8";
    case DType::i8:
      return "int8";
    case DType::i16:
      return "int16";
    case DType::u16:
      return "uint16";
    case DType::i64:
      return "int64";
    case DType::f32:
      return "float32";
    case DType::f64:
      return "float64";
    default:
      return "int32";
  }
}

DType dtype_of(const std::string& name) {
  for (const DType dtype :
       {DType::u8, DType::i8, DType::i16, DType::u16, DType::i32, DType::i64, DType::f32, DType::f64}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw InvalidArgument("tokens cannot be of type " + name);
}

std::span<const std::int32_t> span_of(const Tokens& tokens) {
  TESSERA_CHECK(tokens.ndim() == 1, "token ids have one dimension, not ", tokens.ndim());
  return {tokens.data(), static_cast<std::size_t>(tokens.size())};
}

Tokens tokens_of(std::span<const std::int32_t> ids) {
  Tokens out(static_cast<py::ssize_t>(ids.size()));
  std::copy(ids.begin(), ids.end(), out.mutable_data());
  return out;
}

template <typename Fn>
auto unlocked(Fn&& fn) {
  const py::gil_scoped_release release;
  return fn();
}

/// Samples as `text`, seq_length + 1 ids of which labels are all but the first, and what the options ask for
/// besides.
struct GptSamples {
  std::shared_ptr<const Dataset> dataset;  ///< without eod_mask_loss, which would take the last id away
  std::int32_t end_of_document = -1;
  bool eod_mask_loss = false;
  std::optional<TokenizerRecord> tokenizer{};  ///< what made the ids, where their files say
};

struct Columns {
  std::int64_t* text = nullptr;
  std::int64_t* labels = nullptr;
  std::int64_t* position_ids = nullptr;
  std::int64_t* document_ids = nullptr;
};

void fill(const GptSamples& samples, const Batch& batch, const Columns& out) {
  const auto s = batch.seq_length;
  for (std::int64_t b = 0; b < batch.batch; ++b) {
    std::int64_t* const text = out.text + b * (s + 1);
    std::copy_n(batch.tokens.begin() + b * s, s, text);
    text[s] = batch.labels[static_cast<std::size_t>((b + 1) * s - 1)];
    if (out.labels == nullptr) continue;
    for (std::int64_t i = 0; i < s; ++i) {
      out.labels[b * s + i] = text[i] == samples.end_of_document ? kIgnoredLabel : text[i + 1];
    }
  }
  if (out.position_ids) std::copy(batch.position_ids.begin(), batch.position_ids.end(), out.position_ids);
  if (out.document_ids) std::copy(batch.document_ids.begin(), batch.document_ids.end(), out.document_ids);
}

py::dict columns_of(const GptSamples& samples, const Batch& batch) {
  py::dict out;
  const auto column = [&](const char* name, bool wanted, std::int64_t width) -> std::int64_t* {
    if (!wanted) return nullptr;
    Column array(std::vector<py::ssize_t>{batch.batch, width});
    std::int64_t* const data = array.mutable_data();
    out[name] = std::move(array);
    return data;
  };
  Columns columns;
  columns.text = column("text", true, batch.seq_length + 1);
  columns.labels = column("labels", samples.eod_mask_loss, batch.seq_length);
  columns.position_ids = column("position_ids", samples.dataset->has_position_ids(), batch.seq_length);
  columns.document_ids = column("document_ids", samples.dataset->has_document_ids(), batch.seq_length);
  unlocked([&] { fill(samples, batch, columns); });
  return out;
}

py::dict fetch_samples(const GptSamples& samples, const std::vector<std::int64_t>& numbers) {
  Batch batch;
  unlocked([&] {
    const auto s = static_cast<std::size_t>(samples.dataset->seq_length());
    batch.batch = static_cast<std::int64_t>(numbers.size());
    batch.seq_length = samples.dataset->seq_length();
    const std::size_t n = numbers.size() * s;
    batch.tokens.resize(n);
    batch.labels.resize(n);
    if (samples.dataset->has_position_ids()) batch.position_ids.resize(n);
    if (samples.dataset->has_document_ids()) batch.document_ids.resize(n);
    for (std::size_t b = 0; b < numbers.size(); ++b) {
      const auto row = [&](std::vector<std::int32_t>& all) {
        return all.empty() ? std::span<std::int32_t>() : std::span(all).subspan(b * s, s);
      };
      samples.dataset->fetch(numbers[b], {row(batch.tokens), row(batch.labels), row(batch.position_ids),
                                          row(batch.document_ids)});
    }
  });
  return columns_of(samples, batch);
}

/// The end of documents in these data: what their record says, which `given` (-1: not given) must not
/// contradict. Looks through data of unknown origin for ids beyond the model's vocabulary (0: unknown).
std::int32_t settle_end_of_document(const std::optional<DatasetRecord>& record, std::int32_t given,
                                    const GptDataOptions& options) {
  const std::int64_t vocab_size = options.files.vocab_size;
  if (!record) {
    for (const BlendMember& member : options.members) {
      if (vocab_size > 0) check_ids(IndexedDataset(member.prefix, options.files));
    }
    return given;
  }
  const TokenizerRecord& made = record->tokenizer;
  TESSERA_ENSURE(ConfigError, vocab_size == 0 || made.vocab_size <= vocab_size, "the data were made with ",
                 to_text(made), ", and the model's vocabulary is ", vocab_size,
                 ": they do not belong together");
  TESSERA_ENSURE(ConfigError, given < 0 || given == made.end_of_document, "eos_token_id is ", given,
                 ", but the data were made with ", to_text(made), ", whose end of document is ",
                 made.end_of_document, ": leave eos_token_id out, and it follows from the data");
  return made.end_of_document;
}

py::tuple open_gpt_samples(const std::vector<std::string>& data_path, const std::string& split,
                           const std::array<std::optional<std::int64_t>, 3>& num_samples,
                           std::int64_t seq_length, std::uint32_t seed, std::int32_t given_end,
                           bool reset_position_ids, bool reset_attention_mask, bool eod_mask_loss,
                           const std::string& cache_dir, std::int64_t vocab_size) {
  TESSERA_ENSURE(ConfigError, seq_length > 0, "seq_length is ", seq_length);
  std::optional<TokenizerRecord> tokenizer;
  std::int32_t end_of_document = -1;
  const GptData data = unlocked([&] {
    GptDataOptions options;
    options.members = parse_blend(data_path);
    options.files.vocab_size = vocab_size;
    std::vector<std::string> prefixes;
    for (const BlendMember& member : options.members) prefixes.push_back(member.prefix);
    const std::optional<DatasetRecord> record = shared_record(prefixes);
    if (record) tokenizer = record->tokenizer;
    end_of_document = settle_end_of_document(record, given_end, options);
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
  for (const std::string& warning : data.warnings) py::module_::import("warnings").attr("warn")(warning);
  const auto wrapped = [&](const std::shared_ptr<const Dataset>& dataset) -> py::object {
    if (dataset == nullptr) return py::none();
    return py::cast(GptSamples{dataset, end_of_document, eod_mask_loss, tokenizer});
  };
  return py::make_tuple(wrapped(data.train), wrapped(data.valid), wrapped(data.test));
}

/// This data rank's part of one global batch after another, read ahead by a thread.
class SampleLoader {
 public:
  SampleLoader(const GptSamples& samples, std::int64_t global_batch_size, std::int64_t data_rank,
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
    return columns_of(samples_, *batch);
  }
  std::int64_t consumed_samples() const { return loader_.consumed_samples(); }

 private:
  GptSamples samples_;
  DataLoader loader_;
};

void bind_files(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<IndexedDataset, std::shared_ptr<IndexedDataset>>(
      module, "IndexedFiles",
      "Reader of PREFIX.idx and PREFIX.bin; checks the whole index when it opens them.")
      .def(py::init([](const std::string& prefix, std::int64_t vocab_size) {
             return std::make_shared<IndexedDataset>(prefix, IndexedDatasetOptions{.vocab_size = vocab_size});
           }),
           Unlocked(), py::arg("prefix"), py::arg("vocab_size") = 0)
      .def_property_readonly("prefix", &IndexedDataset::prefix)
      .def_property_readonly("dtype", [](const IndexedDataset& data) { return dtype_name(data.dtype()); })
      .def_property_readonly("sequences", &IndexedDataset::sequences)
      .def_property_readonly("documents", &IndexedDataset::documents)
      .def_property_readonly("tokens", &IndexedDataset::tokens)
      .def_property_readonly("has_modes", &IndexedDataset::has_modes)
      .def("length", &IndexedDataset::length, py::arg("sequence"))
      .def("mode", &IndexedDataset::mode, py::arg("sequence"))
      .def("document_begin", &IndexedDataset::document_begin, py::arg("document"),
           "First sequence of a document.")
      .def("check_vocabulary", &IndexedDataset::check_vocabulary, Unlocked(), py::arg("vocab_size"),
           "Reads every token; DataError for the first id not in [0, vocab_size).");

  py::class_<IndexedDatasetWriter>(module, "IndexedWriter",
                                   "Writes PREFIX.idx and PREFIX.bin; they appear with finish().")
      .def(py::init([](const std::string& prefix, const std::string& dtype) {
             return std::make_unique<IndexedDatasetWriter>(prefix, dtype_of(dtype));
           }),
           py::arg("prefix"), py::arg("dtype"))
      .def(
          "add_sequence",
          [](IndexedDatasetWriter& writer, const Tokens& tokens) {
            const auto ids = span_of(tokens);
            unlocked([&] { writer.add_sequence(ids); });
          },
          py::arg("tokens"), "Appends a sequence, int32 [n], to the open document.")
      .def("end_document", &IndexedDatasetWriter::end_document, Unlocked())
      .def("append", &IndexedDatasetWriter::append, Unlocked(), py::arg("files"),
           "Appends all documents of an IndexedFiles of the same dtype.")
      .def("finish", &IndexedDatasetWriter::finish, Unlocked())
      .def_property_readonly("sequences", &IndexedDatasetWriter::sequences)
      .def_property_readonly("documents", &IndexedDatasetWriter::documents)
      .def_property_readonly("tokens", &IndexedDatasetWriter::tokens);
  module.def(
      "token_dtype", [](std::int64_t vocab_size) { return dtype_name(token_dtype(vocab_size)); },
      py::arg("vocab_size"), "Megatron's choice: uint16 below 65500 ids, else int32.");
}

void bind_samples(py::module_& module) {
  py::class_<GptSamples>(module, "GptSamples", "GPT samples of one split, numbered from 0.")
      .def("__len__", [](const GptSamples& samples) { return samples.dataset->size(); })
      .def_property_readonly("seq_length",
                             [](const GptSamples& samples) { return samples.dataset->seq_length(); })
      .def_property_readonly(
          "tokenizer",
          [](const GptSamples& samples) {
            return samples.tokenizer ? std::optional(to_json(*samples.tokenizer)) : std::nullopt;
          },
          "The record of the tokenizer that made the ids, as JSON; None where the files have none.")
      .def("fetch", &fetch_samples, py::arg("numbers"),
           "Samples as a dict of int64 arrays: text [n, s+1], and labels (-100 = ignored), position_ids and "
           "document_ids [n, s] where the options ask for them. InvalidArgument out of range.");
  module.def("open_gpt_samples", &open_gpt_samples, py::arg("data_path"), py::arg("split"),
             py::arg("num_samples"), py::arg("seq_length"), py::arg("seed"), py::arg("end_of_document") = -1,
             py::arg("reset_position_ids") = false, py::arg("reset_attention_mask") = false,
             py::arg("eod_mask_loss") = false, py::arg("cache_dir") = "", py::arg("vocab_size") = 0,
             "(train, valid, test) GptSamples; None for a split without a share. data_path: prefixes, or "
             "weights and "
             "prefixes in turn. ConfigError, DataError.");
  py::class_<SampleLoader>(module, "SampleLoader", "Reads batches of GptSamples ahead in a thread.")
      .def(py::init<const GptSamples&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double>(),
           py::arg("samples"), py::arg("global_batch_size"), py::arg("data_rank"), py::arg("data_ranks"),
           py::arg("consumed_samples"), py::arg("timeout_s") = 600.0)
      .def("next", &SampleLoader::next,
           "This data rank's part of the next global batch, a dict as of GptSamples.fetch; None when less "
           "than a global "
           "batch is left.")
      .def_property_readonly("consumed_samples", &SampleLoader::consumed_samples);
}

void bind_tokenizer(py::module_& module) {
  module.def(
      "check_same_tokenizer",
      [](const std::string& saved, const std::string& here) {
        const TokenizerRecord before = tokenizer_record_from_json(saved, "the saved state");
        const TokenizerRecord now = tokenizer_record_from_json(here, "the data");
        TESSERA_ENSURE(ConfigError, same_ids(before, now), "the state was saved with data of ",
                       to_text(before), "; here they are of ", to_text(now),
                       ": go on with data of the same tokenizer");
      },
      py::arg("saved"), py::arg("here"), "ConfigError unless both records, JSON, give the same ids.");
  py::class_<ByteTokenizer>(module, "ByteTokenizer", "Ids 0-255 are bytes, 256 is the end of a document.")
      .def(py::init<>())
      .def(
          "encode",
          [](ByteTokenizer& tokenizer, const std::string& text) { return tokens_of(tokenizer.encode(text)); },
          py::arg("text"), "int32 [n] of a str (as UTF-8) or bytes.")
      .def(
          "decode",
          [](ByteTokenizer& tokenizer,
             const py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>& ids) {
            return py::bytes(tokenizer.decode({ids.data(), static_cast<std::size_t>(ids.size())}));
          },
          py::arg("ids"), "The bytes of ids, ends of documents left out. DataError for an id above 256.")
      .def_property_readonly("vocab_size", &ByteTokenizer::vocab_size)
      .def_property_readonly("end_of_document", &ByteTokenizer::end_of_document);
}

}  // namespace

void bind_data(py::module_& module) {
  bind_files(module);
  bind_samples(module);
  bind_tokenizer(module);
}

}  // namespace tessera::bindings
