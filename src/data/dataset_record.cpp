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
    return {tokenizer_record_from_json(in.at("tokenizer").dump(), path), in.at("append_eod").get<bool>()};
  } catch (const Json::exception& error) {
    throw DataError(detail::concat(path, ": is damaged: ", reason_of(error),
                                   ". Make the data again with `tessera preprocess`, or remove the file"));
  }
}

}  // namespace

std::string dataset_record_path(const std::string& prefix) { return bare(prefix) + ".tessera.json"; }

void write_dataset_record(const std::string& prefix, const DatasetRecord& record) {
  const Json out{{"format", kFormat},
                 {"version", 1},
                 {"files", sizes_of(bare(prefix))},
                 {"append_eod", record.append_eod},
                 {"tokenizer", Json::parse(to_json(record.tokenizer))}};
  files::OutputFile file(dataset_record_path(prefix));
  file.write(out.dump(2) + "\n");
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
  }
  return shared;
}

}  // namespace tessera
