#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/json_reason.hpp"
#include "data/json_depth.hpp"
#include "engine/run_data.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/data/blend.hpp"

namespace tessera {
namespace {

using Json = nlohmann::json;
using Paths = std::vector<std::pair<double, std::string>>;

constexpr std::uintmax_t kMostBytes = 16u << 20;

std::string text_of(const std::string& key, const std::string& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  TESSERA_ENSURE(ConfigError, !error && file.good(), key, ": ", path, " cannot be read",
                 error ? ": " + error.message() : "");
  TESSERA_ENSURE(ConfigError, bytes <= kMostBytes, key, ": ", path, " has ", bytes,
                 " bytes: it is no list of datasets");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

Paths paths_of(const std::string& place, const std::vector<std::string>& words) {
  try {
    Paths paths;
    const auto members = parse_blend(words);
    for (const BlendMember& member : members)
      paths.emplace_back(members.size() > 1 ? member.weight.value_or(kWeightBySize) : 1.0, member.prefix);
    return paths;
  } catch (const ConfigError& error) {
    throw ConfigError(place + ": " + error.what());
  }
}

/// Words in one text, or in a list of texts and numbers.
Paths paths_of(const std::string& place, const Json& value) {
  if (value.is_null()) return {};
  if (value.is_string()) return paths_of(place, words_of(value.get<std::string>()));
  TESSERA_ENSURE(ConfigError, value.is_array(), place, " is ", value.type_name(),
                 ": give a list of weights and prefixes, a text of them, or null");
  std::vector<std::string> words;
  for (const Json& word : value) {
    TESSERA_ENSURE(ConfigError, word.is_string() || word.is_number(), place, " holds ", word.type_name());
    words.push_back(word.is_string() ? word.get<std::string>() : word.dump());
  }
  return words.empty() ? Paths{} : paths_of(place, words);
}

void read_splits(const std::string& path, DataConfig& data) {
  const std::string place = "data.per_split_args_path: " + path;
  Json in;
  try {
    const std::string text = text_of("data.per_split_args_path", path);
    refuse_deep_json(text, path);
    in = Json::parse(text);
  } catch (const Json::exception& error) {
    throw ConfigError(place + " is no JSON: " + reason_of(error));
  }
  TESSERA_ENSURE(ConfigError, in.is_object(), place, " is no JSON object");
  const std::pair<const char*, Paths*> splits[] = {
      {"train", &data.train_path}, {"valid", &data.valid_path}, {"test", &data.test_path}};
  for (const auto& [name, paths] : splits) {
    TESSERA_ENSURE(ConfigError, in.contains(name), place, " has no \"", name,
                   "\": give train, valid and test, null for one without data");
    *paths = paths_of(place + ", \"" + name + "\"", in[name]);
  }
  TESSERA_ENSURE(ConfigError, in.size() == 3, place, " has more than train, valid and test");
  TESSERA_ENSURE(ConfigError, !data.train_path.empty(), place, " names no data for training");
}

}  // namespace

void read_data_lists(Config& config) {
  DataConfig& data = config.data;
  if (data.args_path) {
    const std::string place = "data.args_path: " + *data.args_path;
    data.path = paths_of(place, words_of(text_of("data.args_path", *data.args_path)));
    data.args_path.reset();
  }
  if (data.per_split_args_path) {
    read_splits(*data.per_split_args_path, data);
    data.per_split_args_path.reset();
  }
}

std::vector<NamedDataset> datasets_of(const Config& config) {
  const DataConfig& d = config.data;
  std::vector<NamedDataset> out;
  const auto add = [&out](const Paths& paths, const std::string& split) {
    for (const auto& [weight, prefix] : paths) out.push_back({weight, prefix, split});
  };
  add(d.path, d.split);
  add(d.train_path, "1,0,0");
  add(d.valid_path, "0,1,0");
  add(d.test_path, "0,0,1");
  return out;
}

}  // namespace tessera
