#include "tessera/data/dataset_record.hpp"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json_reason.hpp"
#include "data/file.hpp"
#include "data/json_depth.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kFormat = "tessera-dataset";
constexpr std::int64_t kMaxBytes = 1 << 20;

std::string bare(const std::string& prefix) {
  return prefix.ends_with(".idx") || prefix.ends_with(".bin") ? prefix.substr(0, prefix.size() - 4) : prefix;
}

std::int64_t bytes_of(const std::string& path) { return files::InputFile(path, files::Keep::nothing).size(); }

Json sizes_of(const std::string& prefix) {
  return {{"idx_bytes", bytes_of(prefix + ".idx")}, {"bin_bytes", bytes_of(prefix + ".bin")}};
}

/// Ids as runs [first, count]: pieces of words follow each other in most vocabularies.
Json runs_of(const std::vector<std::int32_t>& ids) {
  Json runs = Json::array();
  for (const std::int32_t id : ids) {
    if (!runs.empty() && runs.back()[0].get<std::int64_t>() + runs.back()[1].get<std::int64_t>() == id)
      runs.back()[1] = runs.back()[1].get<std::int64_t>() + 1;
    else
      runs.push_back({id, 1});
  }
  return runs;
}

Json to_record(const SpecialTokens& special) {
  Json out{{"continuations", runs_of(special.continuations)}};
  const auto add = [&out](const char* name, std::int32_t id) { out[name] = id >= 0 ? Json(id) : Json(); };
  add("cls", special.cls);
  add("sep", special.sep);
  add("mask", special.mask);
  add("pad", special.pad);
  if (special.bos >= 0) out["bos"] = special.bos;
  if (special.eos >= 0) out["eos"] = special.eos;
  if (!special.sentinels.empty()) out["sentinels"] = special.sentinels;
  return out;
}

SpecialTokens special_from(const Json& in, std::int64_t vocab_size, const std::string& path) {
  const auto id_of = [&](const Json& value) {
    const auto id = whole_number<std::int32_t>(value);
    TESSERA_ENSURE(DataError, id >= 0 && id < vocab_size, path, ": names the token ", id, " of ", vocab_size);
    return id;
  };
  const auto find = [&](const char* name) { return in.at(name).is_null() ? -1 : id_of(in.at(name)); };
  const auto find_new = [&](const char* name) { return in.contains(name) ? find(name) : -1; };
  SpecialTokens special{.cls = find("cls"),
                        .sep = find("sep"),
                        .mask = find("mask"),
                        .pad = find("pad"),
                        .bos = find_new("bos"),
                        .eos = find_new("eos"),
                        .sentinels = {},
                        .continuations = {}};
  if (in.contains("sentinels"))
    for (const Json& id : in["sentinels"]) special.sentinels.push_back(id_of(id));
  for (const Json& run : in.at("continuations")) {
    const std::int32_t first = id_of(run.at(0));
    const auto count = whole_number<std::int32_t>(run.at(1));
    TESSERA_ENSURE(DataError, count > 0 && count <= vocab_size - first, path, ": names ", count,
                   " tokens from ", first, " on, of ", vocab_size);
    for (std::int32_t i = 0; i < count; ++i) special.continuations.push_back(first + i);
  }
  TESSERA_ENSURE(DataError, std::ranges::is_sorted(special.continuations), path,
                 ": its pieces of words do not rise");
  return special;
}

DatasetRecord parse(const std::string& prefix, const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  TESSERA_ENSURE(DataError, file.size() <= kMaxBytes, path, ": has ", file.size(),
                 " bytes: it is no dataset's record. Remove it, or make the data again");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, path);
  try {
    const Json in = Json::parse(text);
    TESSERA_ENSURE(DataError, in.at("format") == kFormat && in.at("version") == 1, path, ": is of format ",
                   in.at("format").dump(), ", version ", in.at("version").dump(),
                   "; this Tessera reads version 1. Remove it, or make the data again");
    TESSERA_ENSURE(
        DataError, in.at("files") == sizes_of(prefix), path, ": describes ", in.at("files").dump(),
        ", beside it lie ", sizes_of(prefix).dump(),
        ": it belongs to other files. Remove it, or make the data again with `tessera preprocess`");
    DatasetRecord record{.tokenizer = tokenizer_record_from_json(in.at("tokenizer").dump(), path),
                         .append_eod = in.at("append_eod").get<bool>(),
                         .split_sentences = in.value("split_sentences", false)};
    if (in.contains("special_tokens"))
      record.special = special_from(in.at("special_tokens"), record.tokenizer.vocab_size, path);
    return record;
  } catch (const Json::exception& error) {
    throw DataError(detail::concat(path, ": is damaged: ", reason_of(error),
                                   ". Make the data again with `tessera preprocess`, or remove the file"));
  }
}

}  // namespace

std::string dataset_record_path(const std::string& prefix) { return bare(prefix) + ".tessera.json"; }

void write_dataset_record(const std::string& prefix, const DatasetRecord& record) {
  Json out{{"format", kFormat},
           {"version", 1},
           {"files", sizes_of(bare(prefix))},
           {"append_eod", record.append_eod},
           {"split_sentences", record.split_sentences},
           {"tokenizer", Json::parse(to_json(record.tokenizer))}};
  if (record.special) out["special_tokens"] = to_record(*record.special);
  files::OutputFile file(dataset_record_path(prefix));
  file.write(out.dump(record.special ? -1 : 2) + "\n");
  file.publish();
}

std::optional<DatasetRecord> read_dataset_record(const std::string& prefix) {
  const std::string path = dataset_record_path(prefix);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  return parse(bare(prefix), path);
}

std::optional<DatasetRecord> shared_record(std::span<const std::string> prefixes) {
  std::optional<DatasetRecord> shared;
  std::string from;
  for (const std::string& prefix : prefixes) {
    const auto record = read_dataset_record(prefix);
    if (!record) continue;
    if (!shared) {
      shared = record;
      from = prefix;
    }
    const TokenizerRecord &a = shared->tokenizer, &b = record->tokenizer;
    TESSERA_ENSURE(ConfigError, same_ids(a, b) && a.end_of_document == b.end_of_document,
                   "data.path mixes data of two tokenizers: ", dataset_record_path(from), " names ",
                   to_text(a), ", end of document ", a.end_of_document, "; ", dataset_record_path(prefix),
                   " names ", to_text(b), ", end of document ", b.end_of_document,
                   ". Make one of them again with the other's tokenizer (`tessera preprocess`)");
    shared->append_eod = shared->append_eod && record->append_eod;
    if (!shared->special) shared->special = record->special;
  }
  return shared;
}

std::optional<SpecialTokens> known_special_tokens(const std::optional<DatasetRecord>& data,
                                                  const std::optional<TokenizerRecord>& tokenizer) {
  if (data && data->special) return data->special;
  std::error_code error;
  if (!tokenizer || !fs::exists(tokenizer->file, error)) return std::nullopt;
  return special_tokens(options_of(*tokenizer));
}

}  // namespace tessera
