#include "data/unfinished.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json_reason.hpp"
#include "data/file.hpp"
#include "data/json_depth.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kMarkFile = "/progress.json";
constexpr std::int64_t kMostOfAnything = std::int64_t{1} << 50;
constexpr std::int64_t kLongestMark = std::int64_t{256} << 20;  // it names every file of the input

Json to_json(const PreprocessMark& mark) {
  Json keys = Json::array();
  for (const IndexedMark& key : mark.keys) keys.push_back({key.sequences, key.documents, key.tokens});
  return {{"position", {mark.position.file, mark.position.line, mark.position.offset}},
          {"documents", mark.documents},
          {"tokens", mark.tokens},
          {"long_documents", mark.long_documents},
          {"bytes", mark.bytes},
          {"keys", keys}};
}

PreprocessMark from_json(const Json& in) {
  const auto number = [](const Json& value) {
    const auto out = whole_number<std::int64_t>(value);
    TESSERA_ENSURE(DataError, out >= 0 && out <= kMostOfAnything, "a progress of ", out);
    return out;
  };
  const auto triple = [&](const Json& value) {
    return std::array{number(value.at(0)), number(value.at(1)), number(value.at(2))};
  };
  const auto [file, line, offset] = triple(in.at("position"));
  PreprocessMark mark{.position = {file, line, offset},
                      .documents = number(in.at("documents")),
                      .tokens = number(in.at("tokens")),
                      .long_documents = number(in.at("long_documents")),
                      .bytes = number(in.at("bytes"))};
  for (const Json& key : in.at("keys")) {
    const auto [sequences, documents, tokens] = triple(key);
    mark.keys.push_back({sequences, documents, tokens});
  }
  return mark;
}

std::string text_of(const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  TESSERA_ENSURE(DataError, file.size() <= kLongestMark, path, ": has ", file.size(), " bytes");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, path);
  return text;
}

}  // namespace

Unfinished::Unfinished(std::string folder) : folder_(std::move(folder)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  lock_ = error ? -1 : ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TESSERA_ENSURE(IoError, lock_ >= 0, folder_,
                 ": cannot be created: ", error ? error.message() : files::reason(errno),
                 ". Choose an output folder that can be written");
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(lock_);
  throw ConfigError(folder_ +
                    ": another process is writing this dataset; wait for it, or choose another "
                    "--output-prefix");
}

Unfinished::~Unfinished() {
  std::error_code ignored;
  if (!keep_) fs::remove_all(folder_, ignored);
  ::close(lock_);
}

std::optional<PreprocessMark> Unfinished::find(const std::string& identity, std::string& note) {
  const std::string path = folder_ + kMarkFile;
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  try {
    const Json in = Json::parse(text_of(path));
    if (in.at("identity").get<std::string>() == identity) {
      PreprocessMark mark = from_json(in.at("mark"));
      has_mark_ = true;
      return mark;
    }
    note = folder_ + " was left by a call with other input or options: begun anew";
  } catch (const Json::exception&) {
    note = path + " is damaged: begun anew";
  } catch (const DataError& damage) {
    note = std::string(damage.what()) + ": begun anew";
  }
  return std::nullopt;
}

void Unfinished::clear() {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) fs::remove_all(entry.path(), error);
  TESSERA_ENSURE(IoError, !error, folder_, ": cannot be emptied: ", error.message());
  has_mark_ = false;
}

void Unfinished::write(const std::string& identity, const PreprocessMark& mark) {
  files::OutputFile file(folder_ + kMarkFile);
  file.write(Json{{"identity", identity}, {"mark", to_json(mark)}}.dump() + "\n");
  file.publish();
  has_mark_ = true;
}

std::string identity_of(const std::vector<std::string>& paths, const std::string& options) {
  Json input = Json::array();
  for (const std::string& path : paths) {
    struct stat info {};
    TESSERA_ENSURE(DataError, ::stat(path.c_str(), &info) == 0, path, ": ", files::reason(errno));
    input.push_back({fs::absolute(path).string(), info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec});
  }
  return Json{{"version", 1}, {"input", input}, {"options", options}}.dump(-1, ' ', false,
                                                                           Json::error_handler_t::replace);
}

}  // namespace tessera
