#pragma once
/// YAML text as a plain tree in which every node knows its place. Stricter than the parser underneath:
/// anchors, aliases, tags, duplicate keys, several documents, control characters, deep or large input are
/// refused.

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {

/// Where something was written: a position in a file, or an override as a whole.
struct Place {
  std::string source;  ///< "configs/x.yaml" or "override 'a.b=c'"
  int order = 0;       ///< 0 = the file, then the overrides in turn
  int line = 0;        ///< from 1; 0 = no position
  int column = 0;      ///< from 1, in bytes

  /// "file:line:column" or "override 'a.b=c'".
  std::string text() const;
};

/// 'text' in quotes for a message: not too long, and without line ends or terminal control characters.
std::string in_quotes(std::string_view text, std::size_t longest = 60);

/// One fault of the input.
struct Issue {
  Place place;
  std::string message;
};

/// Collects faults, so that all can be reported at once.
class Issues {
 public:
  static constexpr std::size_t kMostShown = 100;

  template <typename... Parts>
  void add(const Place& place, const Parts&... parts) {
    list_.push_back({place, detail::concat(parts...)});
  }
  bool empty() const { return list_.empty(); }
  /// More would not be shown.
  bool full() const { return list_.size() > kMostShown; }
  /// Errors: ConfigError with one line per fault, in the order of the text, if there are any.
  void throw_if_any() const;

 private:
  std::vector<Issue> list_;
};

struct YamlEntry;

struct YamlNode {
  /// invalid: already reported, nothing to read here.
  enum class Kind { null, scalar, sequence, mapping, invalid };

  Kind kind = Kind::null;
  Place place;
  std::string text;     ///< of a scalar
  bool quoted = false;  ///< the scalar was written in quotes or as a block
  std::vector<YamlNode> items;
  std::vector<YamlEntry> entries;  ///< of a mapping

  /// The value of a mapping's key; nullptr if there is none.
  const YamlNode* find(std::string_view key) const;
  YamlNode* find(std::string_view key);
  /// "a list", "a mapping", "null", "the text 'abc'", "'12'": for messages.
  std::string describe() const;
};

struct YamlEntry {
  YamlNode key, value;
};

/// Parses one document. `source` supplies name and order of all places, and the position too if it is an
/// override. Adds what is wrong to `issues`; after a syntax error the tree is incomplete.
YamlNode parse_yaml(std::string_view text, const Place& source, Issues& issues);

}  // namespace tessera
