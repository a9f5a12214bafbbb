#include "data/python_tokenizer.hpp"

#include <cstring>
#include <limits>

#include "base/python_module.hpp"
#include "tessera/base/error.hpp"
#include "tessera/data/tokenizer_record.hpp"

namespace tessera {
namespace {

// The worker's frames. hello: empty, when the model is loaded. encode: u32 count, u32 bytes of each text,
// texts; its answer: u32 count, u32 ids of each text, u32 ids. decode: u32 ids; its answer: UTF-8.
constexpr std::uint32_t kHello = 1;
constexpr std::uint32_t kEncode = 2;
constexpr std::uint32_t kDecode = 3;
constexpr std::uint32_t kRefused = 4;  ///< UTF-8 message: the text or the model file cannot be used
constexpr std::uint32_t kMissing = 5;  ///< UTF-8 message: a Python package is missing

constexpr const char* kRemedy =
    "Tokenizing with tokenizer.json needs Python 3 with two packages: pip install tessera tokenizers";

std::vector<std::string> command_of(const TokenizerOptions& options) {
  std::vector<std::string> command = {options.python, options.worker_script};
  if (options.worker_script.empty()) command = python_module(options.python, "tessera.tokenize_worker");
  const auto add = [&command](const char* flag, const std::string& value) {
    if (!value.empty()) command.insert(command.end(), {flag, value});
  };
  add("--model", options.type == "HuggingFaceTokenizer" ? options.model : "");
  add("--vocab-file", options.type != "HuggingFaceTokenizer" ? options.vocab_file : "");
  add("--word-piece", options.type == "BertWordPieceLowerCase" ? "lower"
                      : options.type == "BertWordPieceCase"    ? "case"
                                                               : "");
  add("--merge-file", options.type == "GPT2BPETokenizer" ? options.merge_file : "");
  return command;
}

template <typename T>
T read_at(std::span<const std::byte> payload, std::size_t at) {
  TESSERA_ENSURE(DataError, at + sizeof(T) <= payload.size(), "the tokenizer's answer is cut off");
  T value;
  std::memcpy(&value, payload.data() + at, sizeof value);
  return value;
}

void append(std::vector<std::byte>& out, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

}  // namespace

std::vector<std::vector<std::int32_t>> parse_ids(std::span<const std::byte> answer, std::size_t count,
                                                 std::int64_t vocab_size) {
  TESSERA_ENSURE(DataError, read_at<std::uint32_t>(answer, 0) == count, "the tokenizer answered other texts");
  TESSERA_ENSURE(DataError, count <= (answer.size() - 4) / 4, "the tokenizer's answer is cut off");
  std::vector<std::vector<std::int32_t>> out(count);
  std::size_t at = 4 + 4 * count;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t ids = read_at<std::uint32_t>(answer, 4 + 4 * i);
    TESSERA_ENSURE(DataError, ids <= (answer.size() - at) / 4, "the tokenizer's answer is cut off");
    out[i].resize(ids);
    if (ids > 0) std::memcpy(out[i].data(), answer.data() + at, ids * 4);
    at += ids * 4;
    for (const std::int32_t id : out[i]) {
      TESSERA_ENSURE(DataError, id >= 0 && id < vocab_size, "the tokenizer gave id ", id, " of ", vocab_size);
    }
  }
  TESSERA_ENSURE(DataError, at == answer.size(), "the tokenizer's answer goes on behind its end");
  return out;
}

PythonTokenizer::PythonTokenizer(const TokenizerOptions& options)
    : worker_(command_of(options), options.timeout_s, kRemedy) {
  try {
    answer(kHello);
  } catch (const IoError& error) {
    throw ConfigError(error.what());
  }
  const TokenizerRecord record = describe_tokenizer(options);
  vocab_size_ = record.vocab_size;
  end_of_document_ = record.end_of_document;
}

std::vector<std::byte> PythonTokenizer::answer(std::uint32_t expected) {
  Frame frame = worker_.receive();
  const std::string text(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
  if (frame.kind == kMissing) throw ConfigError(text);
  if (frame.kind == kRefused) throw DataError(text);
  TESSERA_ENSURE(DataError, frame.kind == expected, "the tokenizer answered ", frame.kind, " to ", expected,
                 ". ", kRemedy);
  return std::move(frame.payload);
}

std::vector<std::vector<std::int32_t>> PythonTokenizer::encode_batch(std::span<const std::string> texts) {
  std::vector<std::byte> request;
  const auto count = static_cast<std::uint32_t>(texts.size());
  append(request, &count, 4);
  for (const std::string& text : texts) {
    TESSERA_ENSURE(DataError, text.size() <= std::numeric_limits<std::uint32_t>::max(), "a text of ",
                   text.size(), " bytes; split it");
    const auto size = static_cast<std::uint32_t>(text.size());
    append(request, &size, 4);
  }
  for (const std::string& text : texts) append(request, text.data(), text.size());
  worker_.send(kEncode, request);
  return parse_ids(answer(kEncode), texts.size(), vocab_size_);
}

std::string PythonTokenizer::decode(std::span<const std::int32_t> ids) {
  for (const std::int32_t id : ids) {
    TESSERA_ENSURE(DataError, id >= 0 && id < vocab_size_, "token id ", id,
                   " is not in the tokenizer's vocabulary of ", vocab_size_);
  }
  worker_.send(kDecode, std::as_bytes(ids));
  const std::vector<std::byte> reply = answer(kDecode);
  return {reinterpret_cast<const char*>(reply.data()), reply.size()};
}

}  // namespace tessera
