#pragma once
/// JSON read as data from strangers: capped in size and depth, no duplicate keys, every type checked, errors
/// that name the file and the place inside it.

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/file_io.hpp"

namespace tessera::checkpoint_detail {

using Json = nlohmann::json;

/// What to do about a file, where an error does not say something more fitting.
inline constexpr const char* kOwnFileRemedy =
    "The file is damaged or was not written by Tessera; restore it or use another one.";
/// The same of config.json and model.safetensors.index.json.
inline constexpr const char* kHfFileRemedy =
    "Correct it, or save the model again with save_pretrained() of Transformers.";

/// Parses `text`; `origin` names it in messages. Errors: CheckpointError.
Json parse_json(std::string_view text, const std::string& origin, const char* remedy = kOwnFileRemedy);
/// Reads and parses a file of at most max_bytes. Errors: CheckpointError, IoError.
Json read_json(const std::filesystem::path& path, std::uint64_t max_bytes,
               SymbolicLinks links = SymbolicLinks::within_folder, const char* remedy = kOwnFileRemedy);
/// As UTF-8 text; `indent` -1 = compact. Errors: InvalidArgument if a string in it is not UTF-8.
std::string to_text(const Json& json, int indent);

/// A place inside a document: checked access with the path in every error.
class JsonView {
 public:
  JsonView(const Json& value, std::string origin, const char* remedy = kOwnFileRemedy)
      : JsonView(value, std::move(origin), remedy, "$") {}

  /// The member `key`. Errors: CheckpointError if this is no object or has no such member.
  JsonView operator[](const std::string& key) const;
  /// The member `key`, or nothing if it is absent or null.
  std::optional<JsonView> find(const std::string& key) const;
  /// Element i of an array.
  JsonView operator[](std::size_t i) const;
  /// Elements of an array.
  std::size_t size() const;

  std::int64_t integer(std::int64_t min = 0, std::int64_t max = INT64_MAX) const;
  double number() const;
  bool boolean() const;
  const std::string& text() const;
  const Json& object() const;
  /// An array of non-negative integers as a shape.
  Shape shape() const;
  const Json& json() const { return *value_; }

  /// Throws CheckpointError if this object has a member that is not listed.
  void only(std::span<const std::string_view> keys) const;
  void only(std::initializer_list<std::string_view> keys) const { only({keys.begin(), keys.size()}); }
  /// Throws CheckpointError: origin, path, reason.
  [[noreturn]] void fail(const std::string& reason, const std::string& remedy = "") const;

 private:
  JsonView(const Json& value, std::string origin, const char* remedy, std::string path)
      : value_(&value), origin_(std::move(origin)), remedy_(remedy), path_(std::move(path)) {}
  [[noreturn]] void expected(const char* what) const;

  const Json* value_;
  std::string origin_;
  const char* remedy_;
  std::string path_;
};

}  // namespace tessera::checkpoint_detail
