#include "tessera/data/preprocess.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <future>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "data/documents.hpp"
#include "data/sentences.hpp"
#include "data/unfinished.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

constexpr std::size_t kChunkDocuments = 512;
constexpr std::size_t kChunkBytes = std::size_t{2} << 20;

/// Documents that one worker turns into ids in one go.
struct Chunk {
  std::vector<RawDocument> documents;
  std::int64_t bytes_read = 0;  ///< of the whole input, up to the chunk's end
  DocumentPosition position{};  ///< there
};

/// The sequences of a document: one, sentences, or none of an empty text.
using Sequences = std::vector<std::vector<std::int32_t>>;

/// ids[key][document]
struct Encoded {
  std::vector<std::vector<Sequences>> ids;
  std::int64_t documents = 0;
  std::int64_t bytes_read = 0;
  DocumentPosition position{};
};

std::string place_of(const DocumentReader& reader, const RawDocument& document) {
  const std::string& path = reader.path(document.file);
  return document.line > 0 ? path + ":" + std::to_string(document.line) : path;
}

/// texts[key][document]
std::vector<std::vector<std::string>> texts_of(const Chunk& chunk, const DocumentReader& reader,
                                               const std::vector<std::string>& keys, bool any_bytes) {
  std::vector<std::vector<std::string>> texts(keys.size());
  for (const RawDocument& document : chunk.documents) {
    if (document.line > 0) {
      auto values = json_texts(document.text, keys, place_of(reader, document));
      for (std::size_t k = 0; k < keys.size(); ++k) texts[k].push_back(std::move(values[k]));
      continue;
    }
    const std::int64_t bad = any_bytes ? -1 : first_invalid_utf8(document.text);
    TESSERA_ENSURE(
        DataError, bad < 0, place_of(reader, document), ": byte ", bad,
        " is not UTF-8, which this tokenizer needs. Convert the file, or use --tokenizer-type bytes");
    texts.front().push_back(document.text);
  }
  return texts;
}

/// Null where texts are not split.
std::unique_ptr<SentenceSplitter> splitter_of(const PreprocessOptions& options) {
  if (!options.split_sentences) return nullptr;
  return make_sentence_splitter({.kind = options.sentence_splitter,
                                 .language = options.language,
                                 .python = options.tokenizer.python,
                                 .worker_script = ""});
}

/// Threads that turn chunks into ids, each with a tokenizer of its own.
class EncoderPool {
 public:
  EncoderPool(const PreprocessOptions& options, const DocumentReader& reader,
              std::unique_ptr<Tokenizer> tokenizer, std::unique_ptr<SentenceSplitter> splitter)
      : options_(options), reader_(reader), first_{std::move(tokenizer), std::move(splitter)} {
    for (int i = 0; i < options.workers; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  ~EncoderPool() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      tasks_.clear();
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  EncoderPool(const EncoderPool&) = delete;
  EncoderPool& operator=(const EncoderPool&) = delete;

  std::future<Encoded> submit(Chunk chunk) {
    Task task{std::move(chunk), {}};
    auto result = task.result.get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return result;
  }

 private:
  struct Task {
    Chunk chunk;
    std::promise<Encoded> result;
  };

  /// The tools of one thread; made by it, as starting a process takes time.
  struct Tools {
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<SentenceSplitter> splitter;
  };

  /// Sentences go to the tokenizer in one request.
  std::vector<Sequences> encode_texts(Tools& tools, const std::vector<std::string>& texts) const {
    std::vector<Sequences> documents(texts.size());
    std::vector<std::vector<std::int32_t>> ids;
    if (!options_.split_sentences) {
      ids = tools.tokenizer->encode_batch(texts);
      for (std::size_t d = 0; d < ids.size(); ++d) {
        if (!ids[d].empty()) documents[d].push_back(std::move(ids[d]));
      }
      return documents;
    }
    const auto split = tools.splitter->split_batch(texts);
    std::vector<std::string> sentences;
    for (const auto& document : split) sentences.insert(sentences.end(), document.begin(), document.end());
    ids = tools.tokenizer->encode_batch(sentences);
    std::size_t next = 0;
    for (std::size_t d = 0; d < split.size(); ++d) {
      for (std::size_t s = 0; s < split[d].size(); ++s, ++next) {
        if (!ids[next].empty()) documents[d].push_back(std::move(ids[next]));
      }
    }
    return documents;
  }

  Encoded encode(Tools& tools, const Chunk& chunk) const {
    Encoded out;
    out.documents = static_cast<std::int64_t>(chunk.documents.size());
    out.bytes_read = chunk.bytes_read;
    out.position = chunk.position;
    const bool any_bytes = tools.tokenizer->takes_any_bytes() && options_.sentence_splitter != "punkt";
    for (const auto& texts : texts_of(chunk, reader_, options_.json_keys, any_bytes)) {
      auto documents = encode_texts(tools, texts);
      for (Sequences& document : documents) {
        if (options_.append_eod && !document.empty())
          document.back().push_back(tools.tokenizer->end_of_document());
      }
      out.ids.push_back(std::move(documents));
    }
    return out;
  }

  void work(int worker) {
    Tools tools;
    if (worker == 0) tools = std::move(first_);
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (closed_) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        if (tools.tokenizer == nullptr) tools = {make_tokenizer(options_.tokenizer), splitter_of(options_)};
        task.result.set_value(encode(tools, task.chunk));
      } catch (...) {
        task.result.set_exception(std::current_exception());
      }
    }
  }

  const PreprocessOptions& options_;
  const DocumentReader& reader_;
  Tools first_;
  std::mutex mutex_;  ///< guards tasks_ and closed_
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

void check_options(const PreprocessOptions& options) {
  TESSERA_ENSURE(ConfigError, !options.input.empty(), "--input names no file");
  TESSERA_ENSURE(ConfigError, !options.output_prefix.empty(), "--output-prefix is not given");
  TESSERA_ENSURE(ConfigError, options.workers >= 1 && options.workers <= 1024, "--workers ", options.workers,
                 " is not in 1 to 1024");
  TESSERA_ENSURE(ConfigError, !options.json_keys.empty(), "--json-keys names no key");
  const std::set<std::string> keys(options.json_keys.begin(), options.json_keys.end());
  TESSERA_ENSURE(ConfigError, keys.size() == options.json_keys.size(), "--json-keys names a key twice");
  for (const std::string& key : keys) {
    TESSERA_ENSURE(ConfigError, !key.empty() && key.find('/') == std::string::npos, "--json-keys: \"", key,
                   "\" cannot be part of a file name");
  }
}

std::string prefix_of(const PreprocessOptions& options, const std::string& key) {
  return options.output_prefix + "_" + key + (options.split_sentences ? "_sentence" : "_document");
}

void check_output(const PreprocessOptions& options) {
  for (const std::string& key : options.json_keys) {
    for (const char* suffix : {".idx", ".bin"}) {
      const std::string path = prefix_of(options, key) + suffix;
      TESSERA_ENSURE(ConfigError, options.overwrite || !std::filesystem::exists(path), path,
                     " is there already: choose another --output-prefix, or replace it with --overwrite");
    }
  }
}

bool read_chunk(DocumentReader& reader, Chunk& chunk) {
  chunk = {};
  RawDocument document;
  for (std::size_t bytes = 0; chunk.documents.size() < kChunkDocuments && bytes < kChunkBytes;) {
    if (!reader.next(document)) break;
    bytes += document.text.size();
    chunk.documents.push_back(std::move(document));
    document = {};
  }
  chunk.bytes_read = reader.bytes_read();
  chunk.position = reader.position();
  return !chunk.documents.empty();
}

/// All that decides the bytes of the output, besides the input's.
std::string options_text(const PreprocessOptions& o, const TokenizerRecord& tokenizer) {
  return nlohmann::json{{"json_keys", o.json_keys},       {"append_eod", o.append_eod},
                        {"sentences", o.split_sentences}, {"splitter", o.sentence_splitter},
                        {"language", o.language},         {"tokenizer", to_json(tokenizer)}}
      .dump();
}

/// The datasets while they are written.
class Output {
 public:
  /// Takes up what a killed call left, or begins anew. `result` is told which.
  Output(const PreprocessOptions& options, std::string identity, PreprocessResult& result)
      : every_s_(options.keep_every_s),
        identity_(std::move(identity)),
        unfinished_(prefix_of(options, options.json_keys.front()) + ".unfinished") {
    for (const std::string& key : options.json_keys) result.prefixes.push_back(prefix_of(options, key));
    std::string note;
    if (const auto mark = unfinished_.find(identity_, note)) {
      try {
        open(options, result, *mark);
        mark_ = *mark;
        result.documents_kept = mark_.documents;
      } catch (const DataError& damage) {
        writers_.clear();
        note = std::string(damage.what()) + ": begun anew";
      }
    }
    if (!note.empty()) result.notes.push_back(note);
    if (!writers_.empty()) return;
    unfinished_.clear();
    open(options, result, {.keys = std::vector<IndexedMark>(options.json_keys.size())});
  }

  /// Where the input goes on.
  const PreprocessMark& mark() const { return mark_; }
  const std::vector<std::unique_ptr<IndexedDatasetWriter>>& writers() const { return writers_; }

  void add(const Encoded& encoded) {
    for (std::size_t k = 0; k < writers_.size(); ++k) {
      for (const auto& document : encoded.ids[k]) {
        // An empty text is a document of no sequences, as Megatron's tool writes it.
        for (const auto& sequence : document) {
          writers_[k]->add_sequence(sequence);
          mark_.tokens += static_cast<std::int64_t>(sequence.size());
        }
        writers_[k]->end_document();
        mark_.long_documents += document.size() > 1 ? 1 : 0;
      }
    }
    mark_.documents += encoded.documents;
    mark_.bytes = encoded.bytes_read;
    mark_.position = encoded.position;
    const auto now = std::chrono::steady_clock::now();
    if (std::chrono::duration<double>(now - marked_at_).count() < every_s_) return;
    for (std::size_t k = 0; k < writers_.size(); ++k) mark_.keys[k] = writers_[k]->mark();
    unfinished_.write(identity_, mark_);
    marked_at_ = std::chrono::steady_clock::now();
  }

  /// What is done stays for the next call, though this one fails. Says where; "" where nothing is worth it.
  std::string keep() {
    if (!unfinished_.has_mark()) return "";
    unfinished_.keep();
    return unfinished_.folder();
  }

 private:
  void open(const PreprocessOptions& options, const PreprocessResult& result, const PreprocessMark& mark) {
    TESSERA_ENSURE(DataError, mark.keys.size() == options.json_keys.size(), unfinished_.folder(), ": has ",
                   mark.keys.size(), " datasets");
    for (std::size_t k = 0; k < mark.keys.size(); ++k) {
      writers_.push_back(std::make_unique<IndexedDatasetWriter>(
          result.prefixes[k], result.dtype, unfinished_.folder(), std::to_string(k), mark.keys[k]));
    }
    mark_.keys.resize(mark.keys.size());
  }

  double every_s_;
  std::string identity_;
  Unfinished unfinished_;
  PreprocessMark mark_;
  std::chrono::steady_clock::time_point marked_at_ = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<IndexedDatasetWriter>> writers_;
};

/// What samples of masked tokens need to know of the tokenizer; none where it has no token for masks.
std::optional<SpecialTokens> recorded_tokens(const PreprocessOptions& options) {
  SpecialTokens special = special_tokens(options.tokenizer);
  if (special.mask < 0 && !options.split_sentences) return std::nullopt;
  return special;
}

void publish(const Output& output, const PreprocessOptions& options, PreprocessResult& result) {
  const auto& writers = output.writers();
  const std::optional<SpecialTokens> special = recorded_tokens(options);
  for (std::size_t k = 0; k < writers.size(); ++k) {
    if (writers[k]->tokens() == 0)
      result.notes.push_back("every text under the key \"" + options.json_keys[k] + "\" is empty");
    std::filesystem::remove(dataset_record_path(result.prefixes[k]));  // never an old record beside new files
    writers[k]->finish();
    write_dataset_record(result.prefixes[k], {.tokenizer = result.tokenizer,
                                              .append_eod = options.append_eod,
                                              .split_sentences = options.split_sentences,
                                              .special = special});
  }
}

/// Reads, encodes and writes all that is left of the input.
void encode_all(const PreprocessOptions& options, DocumentReader& reader, EncoderPool& pool, Output& output) {
  std::deque<std::future<Encoded>> pending;
  const auto write_one = [&] {
    output.add(pending.front().get());
    pending.pop_front();
    const PreprocessMark& mark = output.mark();
    if (options.progress) options.progress({mark.bytes, reader.total_bytes(), mark.documents, mark.tokens});
  };
  for (Chunk chunk; read_chunk(reader, chunk);) {
    pending.push_back(pool.submit(std::move(chunk)));
    if (pending.size() > 2 * static_cast<std::size_t>(options.workers)) write_one();
  }
  while (!pending.empty()) write_one();
}

void check_result(const PreprocessOptions& options, const Output& output, PreprocessResult& result) {
  const PreprocessMark& mark = output.mark();
  result.documents = mark.documents;
  result.tokens = mark.tokens;
  result.long_documents = mark.long_documents;
  result.bytes = mark.bytes;
  TESSERA_ENSURE(DataError, result.documents > 0, options.input.front(), ": the input holds no document");
  TESSERA_ENSURE(DataError, result.tokens > 0, options.input.front(), ": the input holds no text: ",
                 result.documents == 1 ? "its document is empty" : "all its documents are empty");
  if (!options.split_sentences) return;
  for (const auto& writer : output.writers()) result.sentences += writer->sequences();
  if (result.long_documents > 0) return;
  result.notes.push_back("no document has more than one sentence, and samples of two segments need two: " +
                         std::string(options.sentence_splitter == "lines"
                                         ? "put one sentence on each line, or use --sentence-splitter punkt"
                                         : "give longer texts"));
}

}  // namespace

PreprocessResult preprocess(const PreprocessOptions& options) {
  check_options(options);
  check_output(options);
  PreprocessResult result;
  InputFiles inputs = list_inputs(options.input);
  result.notes = std::move(inputs.notes);
  auto tokenizer = make_tokenizer(options.tokenizer);
  auto splitter = splitter_of(options);
  TESSERA_ENSURE(
      ConfigError, !options.append_eod || tokenizer->end_of_document() >= 0,
      "--append-eod: the tokenizer has no end-of-document token; name one of its tokens with --eod-token");
  result.tokenizer = describe_tokenizer(options.tokenizer);
  result.dtype = token_dtype(result.tokenizer.vocab_size);
  std::string identity = identity_of(inputs.paths, options_text(options, result.tokenizer));
  DocumentReader reader(std::move(inputs.paths), {options.tokenizer.python, options.json_keys});
  TESSERA_ENSURE(ConfigError, !reader.any_plain_text() || options.json_keys.size() == 1,
                 "--json-keys names several keys, but some input is plain text (not .jsonl, .json, .ndjson "
                 "or Parquet)");
  Output output(options, std::move(identity), result);
  try {
    reader.seek(output.mark().position);
    EncoderPool pool(options, reader, std::move(tokenizer), std::move(splitter));
    encode_all(options, reader, pool, output);
    check_result(options, output, result);
    publish(output, options, result);
  } catch (const IoError& error) {
    const std::string kept = output.keep();
    if (kept.empty()) throw;
    throw IoError(detail::concat(error.what(), ". What was done is kept in ", kept,
                                 ": the same command goes on from there"));
  }
  return result;
}

}  // namespace tessera
