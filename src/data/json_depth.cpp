#include "data/json_depth.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

void refuse_deep_json(std::string_view text, const std::string& origin) {
  constexpr int kMostDepth = 64;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      ++depth;
    } else if (c == ']' || c == '}') {
      --depth;
    }
    TESSERA_ENSURE(DataError, depth <= kMostDepth, origin, ": is JSON nested more than ", kMostDepth,
                   " deep: it is damaged");
  }
}

}  // namespace tessera
