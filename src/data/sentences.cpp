#include "data/sentences.hpp"

#include <algorithm>
#include <cstring>

#include "base/python_module.hpp"
#include "data/worker_process.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::string_view kBlanks = " \t\r\n\v\f";

std::string stripped(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1));
}

class LineSplitter final : public SentenceSplitter {
 public:
  std::vector<std::vector<std::string>> split_batch(std::span<const std::string> texts) override {
    std::vector<std::vector<std::string>> out;
    for (const std::string& text : texts) {
      std::vector<std::string>& sentences = out.emplace_back();
      for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        std::string line = stripped(std::string_view(text).substr(begin, end - begin));
        if (!line.empty()) sentences.push_back(std::move(line));
        begin = end + 1;
      }
    }
    return out;
  }
};

/// nltk's punkt, run by python/tessera/sentence_worker.py.
class PunktSplitter final : public SentenceSplitter {
 public:
  explicit PunktSplitter(const SentenceOptions& options)
      : worker_(command_of(options), options.timeout_s, kInstall) {
    try {
      answer(kReady);
    } catch (const IoError& error) {
      throw ConfigError(error.what());
    }
  }

  std::vector<std::vector<std::string>> split_batch(std::span<const std::string> texts) override {
    std::vector<std::byte> request;
    add_number(request, texts.size());
    for (const std::string& text : texts) add_number(request, text.size());
    for (const std::string& text : texts) {
      const auto bytes = std::as_bytes(std::span(text));
      request.insert(request.end(), bytes.begin(), bytes.end());
    }
    worker_.send(kSplit, request);
    return parse_sentences(answer(kSplit), texts.size());
  }

 private:
  // Frames as those of the tokenizer's worker. split: u32 count, u32 bytes of each text, texts; its answer:
  // u32 count, u32 sentences of each text, u32 bytes of each sentence, sentences.
  static constexpr std::uint32_t kReady = 1, kCannotSplit = 4, kNotInstalled = 5, kSplit = 6;
  static constexpr const char* kInstall =
      "Sentences by punkt need Python 3 with two packages and punkt's data: pip install tessera nltk; "
      "python3 "
      "-m nltk.downloader punkt_tab. Or put one sentence on each line and use --sentence-splitter lines";

  static std::vector<std::string> command_of(const SentenceOptions& options) {
    std::vector<std::string> command = {options.python, options.worker_script};
    if (options.worker_script.empty()) command = python_module(options.python, "tessera.sentence_worker");
    command.insert(command.end(), {"--language", options.language});
    return command;
  }
  static void add_number(std::vector<std::byte>& out, std::size_t value) {
    TESSERA_ENSURE(DataError, value <= 0xFFFFFFFFU, "a text of ", value, " bytes; split it");
    const auto number = static_cast<std::uint32_t>(value);
    const auto* bytes = reinterpret_cast<const std::byte*>(&number);
    out.insert(out.end(), bytes, bytes + sizeof number);
  }
  std::vector<std::byte> answer(std::uint32_t expected) {
    Frame frame = worker_.receive();
    const std::string text(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
    if (frame.kind == kNotInstalled) throw ConfigError(text);
    if (frame.kind == kCannotSplit) throw DataError(text);
    TESSERA_ENSURE(DataError, frame.kind == expected, "punkt answered ", frame.kind, " to ", expected, ". ",
                   kInstall);
    return std::move(frame.payload);
  }

  WorkerProcess worker_;
};

/// Takes numbers and texts off the front of an answer.
class Answer {
 public:
  explicit Answer(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::size_t left() const { return bytes_.size(); }
  std::span<const std::byte> take(std::size_t count) {
    TESSERA_ENSURE(DataError, count <= bytes_.size(), "punkt's answer is cut off");
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  std::vector<std::uint32_t> numbers(std::size_t count) {
    TESSERA_ENSURE(DataError, count <= bytes_.size() / 4, "punkt's answer is cut off");
    std::vector<std::uint32_t> out(count);
    if (count > 0) std::memcpy(out.data(), take(4 * count).data(), 4 * count);
    return out;
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace

std::vector<std::vector<std::string>> parse_sentences(std::span<const std::byte> answer, std::size_t count) {
  Answer rest(answer);
  TESSERA_ENSURE(DataError, rest.numbers(1)[0] == count, "punkt answered other texts");
  const std::vector<std::uint32_t> sentences = rest.numbers(count);
  std::size_t total = 0;
  for (const std::uint32_t n : sentences) total += n;
  const std::vector<std::uint32_t> sizes = rest.numbers(total);
  std::vector<std::vector<std::string>> out(count);
  std::size_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::uint32_t k = 0; k < sentences[i]; ++k) {
      const auto bytes = rest.take(sizes[next++]);
      std::string sentence = stripped({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      if (!sentence.empty()) out[i].push_back(std::move(sentence));
    }
  }
  TESSERA_ENSURE(DataError, rest.left() == 0, "punkt's answer goes on behind its end");
  return out;
}

std::unique_ptr<SentenceSplitter> make_sentence_splitter(const SentenceOptions& options) {
  TESSERA_ENSURE(ConfigError, options.kind == "lines" || options.kind == "punkt", "--sentence-splitter ",
                 options.kind, " is not known; use lines or punkt");
  if (options.kind == "punkt") return std::make_unique<PunktSplitter>(options);
  return std::make_unique<LineSplitter>();
}

}  // namespace tessera
