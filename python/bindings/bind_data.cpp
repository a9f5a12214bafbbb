// Indexed datasets and the byte tokenizer. Every call that reads or waits releases the interpreter lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/tokenizer.hpp"
#include "tessera/data/tokenizer_record.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Tokens = py::array_t<std::int32_t, py::array::c_style>;

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
  bind_tokenizer(module);
}

}  // namespace tessera::bindings
