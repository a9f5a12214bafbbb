#include "tessera/data/tokenizer_record.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/json_reason.hpp"
#include "data/file.hpp"
#include "data/json_depth.hpp"
#include "data/tokenizer_options.hpp"
#include "tessera/base/hash.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// Names under which well-known models mark the end of a document, when no file beside the model says.
constexpr const char* kUsualEnds[] = {"<|endoftext|>", "<|end_of_text|>", "</s>",
                                      "<eos>",         "<|eot_id|>",      "[SEP]"};

std::string read_text(const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, path);
  return text;
}

/// Ids by token, from the files of a tokenizer.
struct Vocabulary {
  std::map<std::string, std::int64_t> ids;
  std::int64_t size = 0;  ///< 1 + the highest id

  void add(const std::string& token, std::int64_t id) {
    constexpr std::int64_t kHighest = std::numeric_limits<std::int32_t>::max() - 1;
    TESSERA_ENSURE(DataError, id >= 0 && id <= kHighest, "token ", token, " has id ", id);
    ids[token] = id;
    size = std::max(size, id + 1);
  }
  std::int32_t find(const std::string& token) const {
    const auto at = ids.find(token);
    return at == ids.end() ? -1 : static_cast<std::int32_t>(at->second);
  }
};

void add_tokens(const Json& vocab, Vocabulary& out) {
  if (vocab.is_array()) {  // Unigram: [token, score] in the order of ids
    for (std::size_t i = 0; i < vocab.size(); ++i)
      out.add(vocab[i].at(0).get<std::string>(), static_cast<std::int64_t>(i));
    return;
  }
  for (const auto& [token, id] : vocab.items()) out.add(token, whole_number<std::int64_t>(id));
}

/// What of a tokenizer.json decides ids, in one spelling: versions of the package differ in how they write
/// merges, and in which options they write out that say nothing.
std::string what_decides_ids(const Json& file) {
  Json model = file.at("model");
  for (auto it = model.begin(); it != model.end();)
    it = it->is_null() || *it == false ? model.erase(it) : std::next(it);
  if (model.contains("merges")) {
    for (Json& merge : model["merges"]) {
      if (merge.is_array()) merge = merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>();
    }
  }
  const auto part = [&file](const char* name) { return file.contains(name) ? file[name] : Json(); };
  return Json{model, part("added_tokens"), part("normalizer"), part("pre_tokenizer")}.dump();
}

/// The token that the files beside the model name under `role` ("eos_token"), or "".
std::string named_token(const fs::path& folder, const char* role) {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    std::error_code error;
    if (!fs::is_regular_file(folder / name, error)) continue;
    const Json file = Json::parse(read_text((folder / name).string()), nullptr, false);
    if (!file.is_object() || !file.contains(role)) continue;
    const Json& token = file[role];
    const Json& text = token.is_object() && token.contains("content") ? token["content"] : token;
    if (text.is_string()) return text.get<std::string>();
  }
  return "";
}

std::int32_t end_of_document(const Vocabulary& vocabulary, const TokenizerOptions& options,
                             const std::string& file) {
  if (const std::string& wanted = options.end_of_document; !wanted.empty()) {
    TESSERA_ENSURE(DataError, vocabulary.find(wanted) >= 0, file, ": the end-of-document token \"", wanted,
                   "\" is not in the tokenizer's vocabulary");
    return vocabulary.find(wanted);
  }
  std::vector<std::string> names(std::begin(kUsualEnds), std::end(kUsualEnds));
  names.insert(names.begin(), named_token(fs::path(file).parent_path(), "eos_token"));
  for (const std::string& name : names) {
    if (!name.empty() && vocabulary.find(name) >= 0) return vocabulary.find(name);
  }
  return -1;
}

std::string absolute(const std::string& path) { return fs::absolute(path).lexically_normal().string(); }

/// vocab.txt: the token of each line has the line's number.
void add_lines(const std::string& text, const std::string& path, Vocabulary& out) {
  TESSERA_ENSURE(DataError, text.find('\0') == std::string::npos, path,
                 ": is no text. A vocab.txt has a token "
                 "on each line");
  std::int64_t id = 0;
  for (std::size_t begin = 0; begin < text.size(); ++id) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string token = text.substr(begin, end - begin);
    if (token.ends_with('\r')) token.pop_back();
    out.add(token, id);
    begin = end + 1;
  }
}

std::string read_plain(const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Fills `vocabulary` and returns what decides ids.
std::string read_vocabulary(const TokenizerRecord& record, Vocabulary& vocabulary) {
  if (is_word_piece(record.type)) {
    const std::string text = read_plain(record.file);
    add_lines(text, record.file, vocabulary);
    return record.type + "\n" + text;
  }
  const Json file = Json::parse(read_text(record.file));
  if (record.merge_file.empty()) {
    add_tokens(file.at("model").at("vocab"), vocabulary);
    if (file.contains("added_tokens")) {
      for (const Json& token : file["added_tokens"])
        vocabulary.add(token.at("content").get<std::string>(), token.at("id").get<std::int64_t>());
    }
    return what_decides_ids(file);
  }
  add_tokens(file, vocabulary);
  return file.dump() + read_text(record.merge_file);
}

void read_files(const TokenizerOptions& options, TokenizerRecord& record) {
  Vocabulary vocabulary;
  const std::string content = read_vocabulary(record, vocabulary);
  record.hash = files::hex(content_hash(std::as_bytes(std::span(content))));
  record.vocab_size = vocabulary.size;
  record.end_of_document = end_of_document(vocabulary, options, record.file);
}

/// A record that names the files and nothing of what is in them.
TokenizerRecord files_of(const TokenizerOptions& options) {
  return {.type = options.type,
          .file = absolute(options.type == "HuggingFaceTokenizer" ? options.model : options.vocab_file),
          .merge_file = options.type == "GPT2BPETokenizer" ? absolute(options.merge_file) : ""};
}

[[noreturn]] void refuse_files(const TokenizerRecord& record, const Json::exception& error) {
  throw DataError(detail::concat(record.file, ": cannot be read as a tokenizer: ", reason_of(error)));
}

}  // namespace

SpecialTokens special_tokens(const TokenizerOptions& given) {
  const TokenizerOptions options = settle(given);
  if (options.type == "bytes") return {};
  const TokenizerRecord record = files_of(options);
  Vocabulary vocabulary;
  try {
    read_vocabulary(record, vocabulary);
  } catch (const Json::exception& error) {
    refuse_files(record, error);
  }
  const fs::path folder = fs::path(record.file).parent_path();
  const auto find = [&](const char* role, std::initializer_list<const char*> usual) {
    const std::string named = named_token(folder, role);
    std::int32_t id = named.empty() ? -1 : vocabulary.find(named);
    for (const char* name : usual) id = id >= 0 ? id : vocabulary.find(name);
    return id;
  };
  SpecialTokens special{.cls = find("cls_token", {"[CLS]"}),
                        .sep = find("sep_token", {"[SEP]"}),
                        .mask = find("mask_token", {"[MASK]"}),
                        .pad = find("pad_token", {"[PAD]", "<pad>"}),
                        .bos = find("bos_token", {"[BOS]"}),
                        .eos = find("eos_token", {"[EOS]", "</s>"})};
  for (std::int32_t id = 0; id >= 0;) {
    id = vocabulary.find("<extra_id_" + std::to_string(special.sentinels.size()) + ">");
    if (id >= 0) special.sentinels.push_back(id);
  }
  for (const auto& [token, id] : vocabulary.ids) {
    if (token.starts_with("##")) special.continuations.push_back(static_cast<std::int32_t>(id));
  }
  std::ranges::sort(special.continuations);
  return special;
}

TokenizerRecord describe_tokenizer(const TokenizerOptions& given) {
  const TokenizerOptions options = settle(given);
  if (options.type == "bytes") return {};
  TokenizerRecord record = files_of(options);
  try {
    read_files(options, record);
  } catch (const Json::exception& error) {
    refuse_files(record, error);
  }
  TESSERA_ENSURE(DataError, record.vocab_size > 0, record.file, ": the tokenizer has no tokens");
  return record;
}

TokenizerOptions options_of(const TokenizerRecord& record) {
  const bool one_model = record.type == "HuggingFaceTokenizer";
  return {.type = record.type,
          .model = one_model ? record.file : "",
          .vocab_file = one_model ? "" : record.file,
          .merge_file = record.merge_file};
}

bool same_ids(const TokenizerRecord& a, const TokenizerRecord& b) {
  return a.type == b.type && a.hash == b.hash && a.vocab_size == b.vocab_size;
}

std::string to_text(const TokenizerRecord& record) {
  if (record.type == "bytes") return "bytes (257 tokens)";
  return detail::concat(record.type, " ", record.file, " (", record.vocab_size, " tokens, content ",
                        record.hash, ")");
}

std::string to_json(const TokenizerRecord& record) {
  Json out{{"type", record.type}, {"vocab_size", record.vocab_size}, {"end_of_document", nullptr}};
  if (record.end_of_document >= 0) out["end_of_document"] = record.end_of_document;
  if (!record.file.empty()) out["file"] = record.file;
  if (!record.merge_file.empty()) out["merge_file"] = record.merge_file;
  if (!record.hash.empty()) out["hash"] = record.hash;
  return out.dump();
}

TokenizerRecord tokenizer_record_from_json(const std::string& json, const std::string& place) {
  try {
    const Json in = Json::parse(json);
    const Json& end = in.at("end_of_document");
    TokenizerRecord record{.type = in.at("type").get<std::string>(),
                           .file = in.value("file", ""),
                           .merge_file = in.value("merge_file", ""),
                           .hash = in.value("hash", ""),
                           .vocab_size = whole_number<std::int64_t>(in.at("vocab_size")),
                           .end_of_document = end.is_null() ? -1 : whole_number<std::int32_t>(end)};
    const bool end_exists = record.end_of_document >= 0 && record.end_of_document < record.vocab_size;
    TESSERA_ENSURE(DataError, record.vocab_size > 0 && (end.is_null() || end_exists), place,
                   ": a tokenizer of ", record.vocab_size, " tokens whose end of document is ",
                   record.end_of_document);
    return record;
  } catch (const Json::exception& error) {
    throw DataError(detail::concat(place, ": is damaged: ", reason_of(error)));
  }
}

}  // namespace tessera
