#include "checkpoint/safetensors_header.hpp"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "base/json_reason.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/json_strict.hpp"

namespace tessera::checkpoint_detail {
namespace {

struct NamedDType {
  std::string_view name;
  DType dtype;
};
// In the order in which the format's reference implementation lays tensors out: widest first.
constexpr NamedDType kDTypes[] = {{"I64", DType::i64}, {"F64", DType::f64}, {"F32", DType::f32},
                                  {"U32", DType::u32}, {"I32", DType::i32}, {"BF16", DType::bf16},
                                  {"F16", DType::f16}, {"U16", DType::u16}, {"I16", DType::i16},
                                  {"I8", DType::i8},   {"U8", DType::u8},   {"BOOL", DType::u8}};

struct OtherType {
  std::string_view name;
  std::size_t bytes;
};
constexpr OtherType kOtherTypes[] = {{"U64", 8}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
constexpr std::size_t kMostDimensions = 64;  // NumPy's

std::size_t layout_rank(DType dtype) {
  return static_cast<std::size_t>(
      std::find_if(std::begin(kDTypes), std::end(kDTypes),
                   [&](const NamedDType& known) { return known.dtype == dtype; }) -
      std::begin(kDTypes));
}

/// Takes the header's events one by one: no document is built, so a hostile header costs no more than its own
/// length.
class HeaderParser : public nlohmann::json_sax<Json> {
 public:
  struct Tensor {
    SafetensorsEntry entry = {};
    std::string_view type = {};
    std::size_t element_bytes = 0;
    std::vector<std::int64_t> dims = {};
    std::vector<std::uint64_t> offsets = {};
  };
  explicit HeaderParser(ElementTypes types) : types_(types) {}
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;
  std::string tensor;  ///< the one being read, for messages
  std::string reason;

  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("a boolean"); }
  bool number_float(double, const std::string& text) override { return wrong("the number " + text); }
  bool number_integer(std::int64_t value) override { return wrong(detail::concat("the number ", value)); }
  bool binary(Json::binary_t&) override { return wrong("binary"); }
  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape) {
      const std::size_t most = types_ == ElementTypes::all ? kMostDimensions : Shape::kMaxRank;
      if (tensors.back().dims.size() == most)
        return refuse(detail::concat("more than ", most, " dimensions"));
      if (value > INT64_MAX) return refuse(detail::concat("the dimension ", value, " is too large"));
      tensors.back().dims.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ != Place::offsets) return wrong(detail::concat("the number ", value));
    if (tensors.back().offsets.size() == 2) return refuse("data_offsets has more than two numbers");
    tensors.back().offsets.push_back(value);
    return true;
  }
  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::tensor || key_ != "dtype") return wrong("the text \"" + value.substr(0, 80) + "\"");
    const auto known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                    [&](const NamedDType& entry) { return entry.name == value; });
    const auto other = std::find_if(std::begin(kOtherTypes), std::end(kOtherTypes),
                                    [&](const OtherType& entry) { return entry.name == value; });
    Tensor& tensor = tensors.back();
    if (known != std::end(kDTypes)) {
      tensor.entry.dtype = known->dtype;
      tensor.entry.is_bool = known->name == "BOOL";
      tensor.type = known->name;
      tensor.element_bytes = size_of(known->dtype);
    } else if (types_ == ElementTypes::all && other != std::end(kOtherTypes)) {
      tensor.type = other->name;
      tensor.element_bytes = other->bytes;
    } else {
      return refuse("unknown dtype \"" + value.substr(0, 80) + "\"");
    }
    return true;
  }
  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::outside:
        place_ = Place::root;
        return true;
      case Place::root:
        if (key_ == "__metadata__") {
          place_ = Place::metadata;
        } else {
          place_ = Place::tensor;
          seen_fields_ = 0;
          tensors.emplace_back().entry.name = tensor = key_;
        }
        return true;
      default:
        return wrong("an object");
    }
  }
  bool end_object() override {
    if (place_ == Place::tensor) {
      if (seen_fields_ != 7) return refuse("dtype, shape or data_offsets is missing");
      if (tensors.back().offsets.size() != 2) return refuse("data_offsets must be two numbers");
    }
    tensor.clear();
    place_ = place_ == Place::root ? Place::outside : Place::root;
    return true;
  }
  bool key(std::string& name) override {
    key_ = std::move(name);
    if (place_ == Place::tensor) {
      const int field = key_ == "dtype" ? 1 : key_ == "shape" ? 2 : key_ == "data_offsets" ? 4 : 0;
      if (field == 0) return refuse("unknown key \"" + key_.substr(0, 80) + "\"");
      if (seen_fields_ & field) return refuse("the key \"" + key_ + "\" appears twice");
      seen_fields_ |= field;
      return true;
    }
    if (place_ == Place::metadata)
      return metadata.count(key_) == 0 || refuse("the key \"" + key_ + "\" of __metadata__ appears twice");
    if (key_.empty()) return refuse("a tensor without a name");
    return names_.insert(key_).second || refuse("the name \"" + key_ + "\" appears twice");
  }
  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") return wrong("an array");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& exception) override {
    return refuse(detail::concat("the header is not valid JSON: ", reason_of(exception)));
  }

 private:
  enum class Place { outside, root, metadata, tensor, shape, offsets };

  bool refuse(std::string text) {
    reason = std::move(text);
    return false;
  }
  bool wrong(const std::string& what) {
    const char* where = place_ == Place::metadata  ? "__metadata__ may hold text only"
                        : place_ == Place::shape   ? "shape must hold non-negative integers"
                        : place_ == Place::offsets ? "data_offsets must hold non-negative integers"
                        : place_ == Place::tensor
                            ? "a tensor has a text dtype and the arrays shape and data_offsets"
                            : "the header must be an object of tensors";
    return refuse(detail::concat(where, ", found ", what, key_.empty() ? "" : " at \"", key_.substr(0, 80),
                                 key_.empty() ? "" : "\""));
  }

  ElementTypes types_;
  Place place_ = Place::outside;
  std::string key_;
  int seen_fields_ = 0;
  std::unordered_set<std::string> names_;
};

/// Bytes the shape asks for, or nothing if that does not fit 63 bits.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& dims, std::size_t element_bytes) {
  std::int64_t bytes = static_cast<std::int64_t>(element_bytes);
  for (const std::int64_t dim : dims) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
  }
  return static_cast<std::uint64_t>(bytes);
}

}  // namespace

std::uint64_t header_length(const std::filesystem::path& path, std::span<const std::byte, 8> word,
                            std::uint64_t file_bytes) {
  std::uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | std::to_integer<std::uint64_t>(word[i]);
  if (header_bytes > kMaxHeaderBytes || header_bytes > file_bytes - 8)
    bad_file(path, "header",
             detail::concat("it claims a header of ", header_bytes, " bytes; the file has ", file_bytes,
                            " and a header at most ", kMaxHeaderBytes),
             kDamagedRemedy);
  return header_bytes;
}

SafetensorsHeader parse_header(const std::filesystem::path& path, std::string_view text,
                               std::uint64_t data_begin, std::uint64_t file_bytes, ElementTypes types) {
  const auto refuse = [&](const std::string& tensor, const std::string& reason) {
    bad_file(path, tensor.empty() ? "header" : "tensor '" + tensor + "'", reason, kDamagedRemedy);
  };
  if (text.empty() || text.front() != '{') refuse("", "does not begin with '{'");
  // The parser takes a NUL for the end of its input; what follows it would go unseen.
  if (text.find('\0') != std::string_view::npos) refuse("", "contains a NUL byte");
  HeaderParser parser(types);
  if (!Json::sax_parse(text.begin(), text.end(), &parser)) refuse(parser.tensor, parser.reason);

  const std::uint64_t data_bytes = file_bytes - data_begin;
  SafetensorsHeader header;
  header.metadata = std::move(parser.metadata);
  header.entries.reserve(parser.tensors.size());
  for (auto& [entry, type, element_bytes, dims, offsets] : parser.tensors) {
    const auto bytes = bytes_of(dims, element_bytes);
    const bool small = dims.size() <= Shape::kMaxRank;
    if (!bytes) refuse(entry.name, "its shape is too large for any file");
    if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != *bytes)
      refuse(entry.name, detail::concat("data_offsets [", offsets[0], ", ", offsets[1], "] do not match the ",
                                        *bytes, " bytes of its shape ", small ? Shape(dims) : Shape{}));
    if (offsets[1] > data_bytes)
      refuse(entry.name, detail::concat("data_offsets end at ", offsets[1], " but the file holds ",
                                        data_bytes, " bytes of data"));
    if (small) entry.shape = Shape(dims);
    if (types == ElementTypes::all) header.declared[entry.name] = {type, dims};
    entry.begin = data_begin + offsets[0];
    entry.end = data_begin + offsets[1];
    header.entries.push_back(std::move(entry));
  }
  std::sort(header.entries.begin(), header.entries.end(),
            [](const auto& a, const auto& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
  std::uint64_t expected = data_begin;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != expected)
      refuse(entry.name,
             detail::concat("its data begin at ", entry.begin - data_begin, " but the previous ones end at ",
                            expected - data_begin, entry.begin < expected ? " (overlap)" : " (hole)"));
    expected = entry.end;
  }
  if (expected != file_bytes)
    refuse("", detail::concat("the tensors end at byte ", expected, " but the file has ", file_bytes));
  return header;
}

SafetensorsLayout lay_out(std::span<const TensorSpec> tensors,
                          const std::map<std::string, std::string>& metadata) {
  SafetensorsLayout layout;
  std::unordered_set<std::string_view> names;
  for (const TensorSpec& tensor : tensors) {
    TESSERA_CHECK(!tensor.name.empty() && tensor.name != "__metadata__", "\"", tensor.name,
                  "\" cannot be the name of a tensor");
    TESSERA_CHECK(names.insert(tensor.name).second, "two tensors have the name \"", tensor.name, "\"");
    layout.entries.push_back({tensor.name, tensor.dtype, false, tensor.shape, 0, tensor.bytes()});
  }
  std::sort(layout.entries.begin(), layout.entries.end(), [](const auto& a, const auto& b) {
    const std::size_t rank_a = layout_rank(a.dtype), rank_b = layout_rank(b.dtype);
    return rank_a != rank_b ? rank_a < rank_b : a.name < b.name;
  });
  std::uint64_t data_bytes = 0;
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + to_text(Json(metadata), -1);
  for (SafetensorsEntry& entry : layout.entries) {
    entry.begin = data_bytes;
    data_bytes += entry.end;
    entry.end = data_bytes;
    text += text.size() > 1 ? "," : "";
    text += to_text(Json(entry.name), -1) + ":{\"dtype\":\"" +
            std::string(safetensors_dtype_name(entry.dtype)) + "\",\"shape\":[";
    for (int i = 0; i < entry.shape.rank(); ++i) text += detail::concat(i ? "," : "", entry.shape[i]);
    text += detail::concat("],\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begin 8-byte aligned
  TESSERA_CHECK(text.size() <= kMaxHeaderBytes, "a safetensors header of ", text.size(),
                " bytes is longer than the format allows; write several files");
  for (int i = 0; i < 8; ++i) layout.prefix += static_cast<char>(text.size() >> (8 * i));
  layout.prefix += text;
  for (SafetensorsEntry& entry : layout.entries) {
    entry.begin += layout.prefix.size();
    entry.end += layout.prefix.size();
  }
  layout.file_bytes = layout.prefix.size() + data_bytes;
  return layout;
}

}  // namespace tessera::checkpoint_detail

namespace tessera {

std::string_view safetensors_dtype_name(DType dtype) {
  using namespace checkpoint_detail;
  return kDTypes[layout_rank(dtype)].name;
}

std::uint64_t safetensors_file_bytes(std::span<const TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata) {
  return checkpoint_detail::lay_out(tensors, metadata).file_bytes;
}

}  // namespace tessera
