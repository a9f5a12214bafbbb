#include "checkpoint/json_strict.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/json_reason.hpp"

namespace tessera::checkpoint_detail {
namespace {

constexpr std::size_t kMaxDepth = 64;

/// Builds the document, refusing what a lenient parser would let pass.
class StrictBuilder : public nlohmann::json_sax<Json> {
 public:
  Json root;
  std::string error;

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(std::int64_t value) override { return put(value); }
  bool number_unsigned(std::uint64_t value) override { return put(value); }
  bool number_float(double value, const std::string&) override { return put(value); }
  bool string(std::string& value) override { return put(std::move(value)); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    if (stack_.back()->contains(name)) {
      error = "the key \"" + name + "\" appears twice in one object";
      return false;
    }
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& exception) override {
    error = reason_of(exception);
    return false;
  }

 private:
  template <typename Value>
  Json* add(Value&& value) {
    if (stack_.empty()) return &(root = std::forward<Value>(value));
    Json& parent = *stack_.back();
    if (parent.is_object()) return &(parent[key_] = std::forward<Value>(value));
    parent.push_back(std::forward<Value>(value));
    return &parent.back();
  }
  template <typename Value>
  bool put(Value&& value) {
    add(std::forward<Value>(value));
    return true;
  }
  bool open(Json&& container) {
    if (stack_.size() == kMaxDepth) {
      error = detail::concat("nested more than ", kMaxDepth, " deep");
      return false;
    }
    // Parents cannot move while a child is open: only the innermost container grows.
    stack_.push_back(add(std::move(container)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  std::vector<Json*> stack_;
  std::string key_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin, const char* remedy) {
  // The parser takes a NUL for the end of its input; what follows it would go unseen.
  if (text.find('\0') != std::string_view::npos) bad_file(origin, "", "contains a NUL byte", remedy);
  StrictBuilder builder;
  if (!Json::sax_parse(text.begin(), text.end(), &builder))
    bad_file(origin, "", "is not valid JSON: " + builder.error, remedy);
  return std::move(builder.root);
}

Json read_json(const std::filesystem::path& path, std::uint64_t max_bytes, SymbolicLinks links,
               const char* remedy) {
  return parse_json(read_text(path, max_bytes, links), path.string(), remedy);
}

std::string to_text(const Json& json, int indent) {
  try {
    return json.dump(indent);
  } catch (const Json::exception& error) {
    throw InvalidArgument(
        detail::concat("a name or text for a JSON file is not valid UTF-8: ", reason_of(error)));
  }
}

void JsonView::fail(const std::string& reason, const std::string& remedy) const {
  bad_file(origin_, path_, reason, remedy.empty() ? remedy_ : remedy);
}

void JsonView::expected(const char* what) const {
  fail(detail::concat("expected ", what, ", found ", value_->type_name()));
}

JsonView JsonView::operator[](const std::string& key) const {
  if (!value_->is_object()) expected("an object");
  const auto it = value_->find(key);
  if (it == value_->end()) fail("\"" + key + "\" is missing");
  return {*it, origin_, remedy_, path_ + "." + key};
}

std::optional<JsonView> JsonView::find(const std::string& key) const {
  if (!value_->is_object()) expected("an object");
  const auto it = value_->find(key);
  if (it == value_->end() || it->is_null()) return std::nullopt;
  return JsonView(*it, origin_, remedy_, path_ + "." + key);
}

JsonView JsonView::operator[](std::size_t i) const {
  if (i >= size()) fail(detail::concat("element ", i, " is missing"));
  return {(*value_)[i], origin_, remedy_, detail::concat(path_, "[", i, "]")};
}

std::size_t JsonView::size() const {
  if (!value_->is_array()) expected("an array");
  return value_->size();
}

std::int64_t JsonView::integer(std::int64_t min, std::int64_t max) const {
  if (!value_->is_number_integer()) expected("an integer");
  const bool too_large = value_->is_number_unsigned() && value_->get<std::uint64_t>() > INT64_MAX;
  const std::int64_t value = value_->get<std::int64_t>();
  if (too_large || value < min || value > max)
    fail(detail::concat(value_->dump(), " is outside ", min, " to ", max));
  return value;
}

double JsonView::number() const {
  if (!value_->is_number()) expected("a number");
  const double value = value_->get<double>();
  if (!std::isfinite(value)) fail("is not finite");
  return value;
}

bool JsonView::boolean() const {
  if (!value_->is_boolean()) expected("true or false");
  return value_->get<bool>();
}

const std::string& JsonView::text() const {
  if (!value_->is_string()) expected("a string");
  return value_->get_ref<const std::string&>();
}

const Json& JsonView::object() const {
  if (!value_->is_object()) expected("an object");
  return *value_;
}

Shape JsonView::shape() const {
  if (size() > Shape::kMaxRank)
    fail(detail::concat("has ", size(), " dimensions, more than ", Shape::kMaxRank));
  std::vector<std::int64_t> dims;
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < size(); ++i) {
    dims.push_back((*this)[i].integer());
    if (__builtin_mul_overflow(numel, dims.back(), &numel) || numel > (INT64_MAX >> 4)) fail("is too large");
  }
  return Shape(dims);
}

void JsonView::only(std::span<const std::string_view> keys) const {
  for (const auto& item : object().items()) {
    if (std::find(keys.begin(), keys.end(), item.key()) == keys.end())
      fail("\"" + item.key() + "\" is not a known key",
           "A newer Tessera may have written the file; use that version.");
  }
}

}  // namespace tessera::checkpoint_detail
