#include "base/yaml_tree.hpp"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <tuple>
#include <unordered_map>

namespace tessera {

namespace {

constexpr std::size_t kMostBytes = 1 << 20;
constexpr std::size_t kMostDepth = 64;

/// Ends the parse; the reason is in the issues.
struct StopParsing {};

/// Builds the tree from the parser's events and refuses what the parser lets through.
class TreeBuilder final : public YAML::EventHandler {
 public:
  TreeBuilder(const Place& source, Issues& issues) : source_(source), issues_(issues) {}

  YamlNode take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ == 0) return;
    issues_.add(place(mark), "a second YAML document begins here; a configuration is one document");
    throw StopParsing{};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    attach(make(YamlNode::Kind::null, mark, "?", anchor));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    issues_.add(place(mark), "YAML aliases (*name) are refused; write the value out");
    attach(make(YamlNode::Kind::invalid, mark, "?", 0));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node = make(YamlNode::Kind::scalar, mark, tag, anchor);
    node.text = value;
    node.quoted = tag == "!";
    attach(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(make(YamlNode::Kind::sequence, mark, tag, anchor));
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(make(YamlNode::Kind::mapping, mark, tag, anchor));
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    YamlNode node;
    std::optional<YamlNode> key;
    std::unordered_map<std::string, int> lines;  ///< of the keys so far
  };

  Place place(const YAML::Mark& mark) const {
    Place place = source_;
    if (place.order == 0) {
      place.line = mark.line + 1;
      place.column = mark.column + 1;
    }
    return place;
  }

  YamlNode make(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    YamlNode node;
    node.kind = kind;
    node.place = place(mark);
    if (anchor != YAML::NullAnchor) {
      issues_.add(node.place, "YAML anchors (&name) are refused; write the value out where it is used");
    }
    if (!tag.empty() && tag != "?" && tag != "!") {
      issues_.add(node.place, "YAML tags (!name) are refused; every key knows its type");
    }
    return node;
  }

  void open(YamlNode node) {
    if (stack_.size() == kMostDepth) {
      issues_.add(node.place, "nested more than ", kMostDepth, " deep");
      throw StopParsing{};
    }
    stack_.push_back({std::move(node), std::nullopt, {}});
  }

  void close() {
    YamlNode node = std::move(stack_.back().node);
    stack_.pop_back();
    attach(std::move(node));
  }

  void attach(YamlNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.kind == YamlNode::Kind::sequence) {
      frame.node.items.push_back(std::move(node));
    } else if (!frame.key) {
      check_key(node);
      frame.key = std::move(node);
    } else {
      add_entry(frame, std::move(node));
    }
  }

  void check_key(const YamlNode& key) {
    if (key.kind == YamlNode::Kind::scalar || key.kind == YamlNode::Kind::invalid) return;
    issues_.add(key.place, "a key must be a word, not ", key.describe());
  }

  void add_entry(Frame& frame, YamlNode value) {
    YamlNode key = std::move(*frame.key);
    frame.key.reset();
    if (key.kind != YamlNode::Kind::scalar) return;
    if (key.text == "<<") {
      issues_.add(key.place, "YAML merge keys (<<) are refused; write the keys out");
      return;
    }
    const auto [earlier, is_new] = frame.lines.emplace(key.text, key.place.line);
    if (!is_new) {
      issues_.add(key.place, "duplicate key ", in_quotes(key.text),
                  earlier->second > 0 ? detail::concat("; it is already at line ", earlier->second) : "");
      return;
    }
    // The parser places an absent value wherever the next thing stands.
    if (value.kind == YamlNode::Kind::null) value.place = key.place;
    frame.node.entries.push_back({std::move(key), std::move(value)});
  }

  const Place& source_;
  Issues& issues_;
  std::vector<Frame> stack_;
  YamlNode root_;
  int documents_ = 0;
};

/// The first line up to `last` (from 1) that is indented with a tab; 0 if there is none.
int find_tab_indent(std::string_view text, int last) {
  std::size_t begin = 0;
  for (int line = 1; line <= last && begin < text.size(); ++line) {
    const std::size_t word = text.find_first_not_of(" \t", begin);
    if (word != std::string_view::npos &&
        text.substr(begin, word - begin).find('\t') != std::string_view::npos) {
      return line;
    }
    const std::size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) break;
    begin = end + 1;
  }
  return 0;
}

/// The parser takes some control characters for the end of the text and drops the rest without a word.
bool check_characters(std::string_view text, const Place& source, Issues& issues) {
  Place place = source;
  int line = 1;
  std::size_t line_start = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == '\n') {
      ++line;
      line_start = i + 1;
    } else if ((c < 0x20 && c != '\t' && c != '\r') || c == 0x7f) {
      if (place.order == 0) {
        place.line = line;
        place.column = static_cast<int>(i - line_start) + 1;
      }
      issues.add(place, "control character number ", static_cast<int>(c),
                 "; a configuration is plain UTF-8 text");
      return false;
    }
  }
  return true;
}

}  // namespace

std::string in_quotes(std::string_view text, std::size_t longest) {
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte == 0x7f ? ' ' : c;
  }
  return result.append(text.size() > longest ? "...'" : "'");
}

std::string Place::text() const { return line > 0 ? detail::concat(source, ":", line, ":", column) : source; }

void Issues::throw_if_any() const {
  if (list_.empty()) return;
  std::vector<Issue> sorted = list_;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Issue& a, const Issue& b) {
    return std::tie(a.place.order, a.place.line, a.place.column) <
           std::tie(b.place.order, b.place.line, b.place.column);
  });
  std::string text;
  for (std::size_t i = 0; i < std::min(sorted.size(), Issues::kMostShown); ++i) {
    text += detail::concat(i > 0 ? "\n" : "", sorted[i].place.text(), ": ", sorted[i].message);
  }
  if (sorted.size() > Issues::kMostShown)
    text += detail::concat("\nand ", sorted.size() - Issues::kMostShown, " more");
  throw ConfigError(text);
}

const YamlNode* YamlNode::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name.text == key) return &value;
  }
  return nullptr;
}

YamlNode* YamlNode::find(std::string_view key) {
  return const_cast<YamlNode*>(static_cast<const YamlNode*>(this)->find(key));
}

std::string YamlNode::describe() const {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::scalar:
      return (quoted ? "the quoted text " : "") + in_quotes(text);
    case Kind::sequence:
      return "a list";
    case Kind::mapping:
      return "a mapping";
    case Kind::invalid:
      break;
  }
  return "an invalid value";
}

YamlNode parse_yaml(std::string_view text, const Place& source, Issues& issues) {
  TreeBuilder builder(source, issues);
  if (text.size() > kMostBytes) {
    issues.add(source, "larger than ", kMostBytes, " bytes; this is not a configuration");
    return {};
  }
  if (!check_characters(text, source, issues)) return {};
  std::istringstream stream{std::string(text)};
  try {
    YAML::Parser parser(stream);
    // The builder ends the loop at a second document.
    while (parser.HandleNextDocument(builder)) continue;
  } catch (const StopParsing&) {
  } catch (const YAML::Exception& error) {
    Place place = source;
    if (place.order == 0 && !error.mark.is_null()) {
      place.line = error.mark.line + 1;
      place.column = error.mark.column + 1;
      if (const int line = find_tab_indent(text, place.line); line > 0) {
        place.line = line;
        place.column = 1;
        issues.add(place, "not valid YAML: indented with a tab; use spaces");
        return {};
      }
    }
    issues.add(place, "not valid YAML: ", error.msg);
  }
  return builder.take_root();
}

}  // namespace tessera
