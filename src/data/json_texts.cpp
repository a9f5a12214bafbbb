#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/documents.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// Keeps the strings under the wanted keys of the outermost object; everything else is passed over unstored.
class TextsHandler final : public nlohmann::json_sax<Json> {
 public:
  TextsHandler(std::span<const std::string> keys, const std::string& place) : keys_(keys), place_(place) {
    texts_.resize(keys.size());
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("binary"); }
  bool string(string_t& text) override {
    if (depth_ == 1 && wanted_ >= 0) {
      texts_[static_cast<std::size_t>(wanted_)] = std::move(text);
      return true;
    }
    return value("a string");
  }
  bool start_object(std::size_t) override {
    if (depth_ > 0) value("an object");
    ++depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    value("an array");
    ++depth_;
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool key(string_t& name) override {
    if (depth_ != 1) return true;
    const auto at = std::find(keys_.begin(), keys_.end(), name);
    wanted_ = at == keys_.end() ? -1 : at - keys_.begin();
    if (seen_.size() < 200) seen_ += (seen_.empty() ? "" : ", ") + name;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    std::string reason = error.what();
    // What comes before the colon repeats the position, with a line number counted inside the line.
    if (const auto colon = reason.find(": "); colon != std::string::npos) reason.erase(0, colon + 2);
    throw DataError(detail::concat(place_, ":", position, ": not valid JSON: ", reason,
                                   ". Each line holds one JSON object, in UTF-8"));
  }

  std::vector<std::string> take() {
    std::vector<std::string> out;
    for (std::size_t i = 0; i < texts_.size(); ++i) {
      TESSERA_ENSURE(DataError, texts_[i].has_value(), place_, ": the object has no key \"", keys_[i],
                     "\"; it has ", seen_.empty() ? "none" : seen_,
                     ". Name the keys that hold text with --json-keys");
      out.push_back(std::move(*texts_[i]));
    }
    return out;
  }

 private:
  bool value(const char* kind) {
    TESSERA_ENSURE(DataError, depth_ > 0, place_, ": the line holds ", kind, ", not an object");
    TESSERA_ENSURE(DataError, depth_ > 1 || wanted_ < 0, place_, ": the key \"",
                   keys_[static_cast<std::size_t>(std::max<std::ptrdiff_t>(wanted_, 0))], "\" holds ", kind,
                   ", not a string");
    return true;
  }

  std::span<const std::string> keys_;
  const std::string& place_;
  std::vector<std::optional<std::string>> texts_;
  std::string seen_;
  std::ptrdiff_t wanted_ = -1;
  int depth_ = 0;
};

}  // namespace

std::vector<std::string> json_texts(const std::string& line, std::span<const std::string> keys,
                                    const std::string& place) {
  TextsHandler handler(keys, place);
  Json::sax_parse(line, &handler);
  return handler.take();
}

}  // namespace tessera
