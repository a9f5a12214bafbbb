#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/torch_file.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
using OrderedJson = nlohmann::ordered_json;
using Kind = PickleValue::Kind;

constexpr std::size_t kMostDepth = 64;

/// A value that is shared is shown where it is met first, so that the text is no longer than the pickle and
/// circles end.
class Structure {
 public:
  explicit Structure(const TorchFile& file) : file_(file) {}

  OrderedJson show(const PickleValue& value, std::size_t depth = 0) {
    if (const auto tensor = file_.tensor(value))
      return {{"tensor", std::string(name_of(tensor->dtype))}, {"shape", tensor->shape}};
    switch (value.kind) {
      case Kind::none:
        return nullptr;
      case Kind::boolean:
        return value.integer != 0;
      case Kind::integer:
        return value.integer;
      case Kind::real:
        return value.real;
      case Kind::text:
        return value.text;
      case Kind::bytes:
        return {{"bytes", value.text.size()}};
      case Kind::global:
        return {{"global", value.text}};
      default:
        break;
    }
    const bool empty = value.items.empty() && value.entries.empty();
    if (!empty && (depth > kMostDepth || !shown_.insert(&value).second)) return "...";
    if (value.is(Kind::dict))
      return value.is_namespace ? OrderedJson{{"namespace", entries(value, depth)}} : entries(value, depth);
    OrderedJson items = OrderedJson::array();
    for (const PickleValue* item : value.items) items.push_back(show(*item, depth + 1));
    if (value.is(Kind::object))
      return {{"object", value.text}, {"arguments", items}, {"state", entries(value, depth)}};
    return items;
  }

 private:
  OrderedJson entries(const PickleValue& value, std::size_t depth) {
    OrderedJson out = OrderedJson::object();
    for (const auto& [key, each] : value.entries) out[name_of_key(*key)] = show(*each, depth + 1);
    return out;
  }
  static std::string name_of_key(const PickleValue& key) {
    return key.is(Kind::text)      ? key.text
           : key.is(Kind::integer) ? std::to_string(key.integer)
                                   : key.describe();
  }

  const TorchFile& file_;
  std::set<const PickleValue*> shown_;
};

}  // namespace

std::string torch_file_json(const std::filesystem::path& path, SymbolicLinks links) {
  const TorchFile file(path, links);
  return Structure(file).show(file.root()).dump(2, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace tessera
