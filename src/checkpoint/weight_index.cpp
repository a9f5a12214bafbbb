#include "checkpoint/weight_index.hpp"

#include "checkpoint/json_strict.hpp"

namespace tessera::checkpoint_detail {

WeightIndex parse_weight_index(std::string_view text, const std::string& origin) {
  const Json document = parse_json(text, origin, kHfFileRemedy);
  const JsonView root(document, origin, kHfFileRemedy);
  const JsonView map = root["weight_map"];
  WeightIndex index;
  if (const auto metadata = root.find("metadata")) index.metadata = to_text(metadata->object(), -1);
  for (const auto& item : map.object().items()) {
    const JsonView place = map[item.key()];
    const std::string& file = place.text();
    if (!is_plain_file_name(file))
      place.fail(
          detail::concat('"', file.substr(0, 200), "\" is not the plain name of a file in this folder"),
          "Names with '/', '\\' or a leading '.' are refused: they could read files elsewhere.");
    index.files.emplace(item.key(), file);
  }
  return index;
}

}  // namespace tessera::checkpoint_detail
