#include "data/tokenizer_options.hpp"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "data/file.hpp"
#include "data/json_depth.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// vocab.txt of WordPiece has no merges beside it.
bool is_word_piece_file(const std::string& path) { return fs::path(path).extension() == ".txt"; }

/// Whether the file beside a vocab.txt says that letters keep their case.
bool keeps_case(const fs::path& vocab) {
  const fs::path beside = vocab.parent_path() / "tokenizer_config.json";
  if (!is_file(beside)) return false;
  const files::InputFile file(beside.string(), files::Keep::nothing);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, beside.string());
  const auto config = nlohmann::json::parse(text, nullptr, false);
  return config.is_object() && config.value("do_lower_case", nlohmann::json()) == false;
}

std::string word_piece_type(const std::string& vocab) {
  return keeps_case(vocab) ? "BertWordPieceCase" : "BertWordPieceLowerCase";
}

std::string type_of(const TokenizerOptions& options) {
  if (is_word_piece(options.type) || (is_word_piece_file(options.vocab_file) && options.merge_file.empty())) {
    TESSERA_ENSURE(ConfigError, options.model.empty() && options.merge_file.empty(),
                   "a vocab.txt is a whole tokenizer: leave --tokenizer-model and --merge-file out");
    return is_word_piece(options.type) ? options.type : word_piece_type(options.vocab_file);
  }
  const bool two_files = !options.vocab_file.empty() || !options.merge_file.empty();
  TESSERA_ENSURE(ConfigError, options.model.empty() || !two_files,
                 "--tokenizer-model is for HuggingFaceTokenizer, --vocab-file and --merge-file are for "
                 "GPT2BPETokenizer: give one tokenizer only");
  if (!options.model.empty()) return "HuggingFaceTokenizer";
  return two_files ? "GPT2BPETokenizer" : "bytes";
}

void take_vocab_txt(TokenizerOptions& options, const std::string& path) {
  options.vocab_file = path;
  options.model.clear();
  options.type = word_piece_type(path);
}

/// A folder stands for the tokenizer in it.
void open_folder(TokenizerOptions& options) {
  const fs::path folder = options.model;
  std::error_code error;
  if (!fs::is_directory(folder, error)) return;
  if (!is_file(folder / "tokenizer.json") && is_file(folder / "vocab.json") &&
      is_file(folder / "merges.txt")) {
    options.type = "GPT2BPETokenizer";
    options.vocab_file = (folder / "vocab.json").string();
    options.merge_file = (folder / "merges.txt").string();
    options.model.clear();
  } else if (!is_file(folder / "tokenizer.json") && is_file(folder / "vocab.txt")) {
    take_vocab_txt(options, (folder / "vocab.txt").string());
  } else {
    options.model = (folder / "tokenizer.json").string();
  }
}

void check_files(const TokenizerOptions& options) {
  TESSERA_ENSURE(ConfigError, !options.model.ends_with(".model"), options.model,
                 ": models of SentencePiece are not read. Transformers makes a tokenizer.json of it: "
                 "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)");
  for (const std::string* file : {&options.model, &options.vocab_file, &options.merge_file}) {
    TESSERA_ENSURE(DataError, file->empty() || is_file(*file), *file,
                   ": there is no such file. A tokenizer is a tokenizer.json, a folder that holds one, "
                   "vocab.json and merges.txt, or vocab.txt");
  }
}

}  // namespace

bool is_word_piece(const std::string& type) {
  return type == "BertWordPieceLowerCase" || type == "BertWordPieceCase";
}

TokenizerOptions settle(TokenizerOptions options) {
  if (is_word_piece_file(options.model)) {
    // Named as any other tokenizer is, by its one file.
    options.vocab_file = std::exchange(options.model, "");
    if (options.type == "HuggingFaceTokenizer") options.type.clear();
  }
  const std::string implied = type_of(options);
  if (options.type.empty()) options.type = implied;
  const std::string& type = options.type;
  TESSERA_ENSURE(
      ConfigError,
      type == "bytes" || type == "HuggingFaceTokenizer" || type == "GPT2BPETokenizer" || is_word_piece(type),
      "tokenizer type \"", type,
      "\" is not known; use bytes, HuggingFaceTokenizer, GPT2BPETokenizer, BertWordPieceLowerCase "
      "or BertWordPieceCase");
  TESSERA_ENSURE(ConfigError, !is_word_piece(type) || !options.vocab_file.empty(), type,
                 " needs --vocab-file: the vocab.txt with a token on each line");
  TESSERA_ENSURE(
      ConfigError, implied == type || type != "HuggingFaceTokenizer",
      "HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or the folder that holds it");
  TESSERA_ENSURE(ConfigError, implied == type || type != "bytes",
                 "the tokenizer type bytes needs no file, but ",
                 options.model + options.vocab_file + options.merge_file,
                 " is given: leave --tokenizer-type out to use it");
  TESSERA_ENSURE(ConfigError,
                 type != "GPT2BPETokenizer" || (!options.vocab_file.empty() && !options.merge_file.empty()),
                 "GPT2BPETokenizer needs --vocab-file and --merge-file");
  TESSERA_ENSURE(ConfigError, type != "bytes" || options.end_of_document.empty(),
                 "--eod-token: the end of a document is id 256 with the tokenizer of bytes");
  if (type == "HuggingFaceTokenizer") open_folder(options);
  check_files(options);
  return options;
}

}  // namespace tessera
