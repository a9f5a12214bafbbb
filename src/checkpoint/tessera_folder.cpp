#include "checkpoint/tessera_folder.hpp"

#include "checkpoint/json_strict.hpp"
#include "tessera/base/version.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tessera-model";
constexpr std::int64_t kFormatVersion = 1;

constexpr const char* kExtraFiles[] = {"tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "tokenizer.model",
                                       "spiece.model",
                                       "chat_template.jinja",
                                       "chat_template.json",
                                       "generation_config.json"};

std::vector<std::string> texts(const JsonView& array) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < array.size(); ++i) out.push_back(array[i].text());
  return out;
}

std::map<std::string, std::string> text_map(const JsonView& object) {
  std::map<std::string, std::string> out;
  for (const auto& item : object.object().items()) out[item.key()] = object[item.key()].text();
  return out;
}

HfSource parse_source(const JsonView& in) {
  in.only({"format", "prefix", "embedding_names", "ignored", "weight_map", "file_metadata", "has_index",
           "index_metadata"});
  HfSource source;
  source.prefix = in["prefix"].text();
  source.embedding_names = texts(in["embedding_names"]);
  if (source.embedding_names.empty()) in["embedding_names"].fail("is empty");
  source.ignored = texts(in["ignored"]);
  source.weight_map = text_map(in["weight_map"]);
  for (const auto& [tensor, file] : source.weight_map) {
    if (!is_plain_file_name(file)) in["weight_map"][tensor].fail("is not the plain name of a file");
  }
  const JsonView metadata = in["file_metadata"];
  for (const auto& item : metadata.object().items())
    source.file_metadata[item.key()] = text_map(metadata[item.key()]);
  source.has_index = in["has_index"].boolean();
  if (const auto index = in.find("index_metadata")) source.index_metadata = to_text(index->object(), -1);
  return source;
}

}  // namespace

void write_tessera_json(const fs::path& dir, const Architecture& config, const HfSource* source) {
  Json out = {{"format", kFormat},
              {"format_version", kFormatVersion},
              {"tessera_version", version()},
              {"model", parse_json(to_model_json(config), "model")},
              {"source", nullptr}};
  if (source) {
    Json& place = out["source"];
    place["format"] = "huggingface";
    place["prefix"] = source->prefix;
    place["embedding_names"] = source->embedding_names;
    place["ignored"] = source->ignored;
    place["weight_map"] = source->weight_map;
    place["file_metadata"] = source->file_metadata;
    place["has_index"] = source->has_index;
    place["index_metadata"] =
        source->index_metadata.empty() ? Json(nullptr) : parse_json(source->index_metadata, "index metadata");
    write_text(dir / kHfConfigCopy, source->config_json);
  }
  write_text(dir / kTesseraJson, to_text(out, 2) + "\n");
}

TesseraFolder parse_tessera_json(std::string_view text, const std::string& origin) {
  const Json document = parse_json(text, origin);
  const JsonView root(document, origin);
  root.only({"format", "format_version", "tessera_version", "model", "source"});
  if (root["format"].text() != kFormat) root["format"].fail("is not \"tessera-model\"");
  if (root["format_version"].integer() != kFormatVersion)
    root["format_version"].fail("is not supported",
                                "Another version of Tessera wrote this folder; use that version.");
  TesseraFolder folder;
  folder.config = parse_model_json(to_text(root["model"].json(), -1), origin + ": $.model");
  if (const auto source = root.find("source")) folder.source = parse_source(*source);
  return folder;
}

TesseraFolder read_tessera_json(const fs::path& dir, SymbolicLinks links) {
  const fs::path path = dir / kTesseraJson;
  TesseraFolder folder = parse_tessera_json(read_text(path, kMaxTesseraJsonBytes, links), path.string());
  if (folder.source) folder.source->config_json = read_text(dir / kHfConfigCopy, kMaxConfigBytes, links);
  return folder;
}

void copy_extra_files(const fs::path& from, const fs::path& to, SymbolicLinks links) {
  std::error_code error;
  for (const char* name : kExtraFiles) {
    if (fs::is_regular_file(from / name, error)) copy_file_synced(from / name, to / name, links);
  }
}

}  // namespace tessera::checkpoint_detail
