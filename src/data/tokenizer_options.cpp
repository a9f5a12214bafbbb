#include "data/tokenizer_options.hpp"

#include <filesystem>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

std::string type_of(const TokenizerOptions& options) {
  const bool two_files = !options.vocab_file.empty() || !options.merge_file.empty();
  TESSERA_ENSURE(ConfigError, options.model.empty() || !two_files,
                 "--tokenizer-model is for HuggingFaceTokenizer, --vocab-file and --merge-file are for "
                 "GPT2BPETokenizer: give one tokenizer only");
  if (!options.model.empty()) return "HuggingFaceTokenizer";
  return two_files ? "GPT2BPETokenizer" : "bytes";
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
                   ": there is no such file. A tokenizer is a tokenizer.json, a folder that holds one, or "
                   "vocab.json and merges.txt");
  }
}

}  // namespace

TokenizerOptions settle(TokenizerOptions options) {
  const std::string implied = type_of(options);
  if (options.type.empty()) options.type = implied;
  const std::string& type = options.type;
  TESSERA_ENSURE(ConfigError, type == "bytes" || type == "HuggingFaceTokenizer" || type == "GPT2BPETokenizer",
                 "tokenizer type \"", type,
                 "\" is not known; use bytes, HuggingFaceTokenizer or GPT2BPETokenizer");
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
