#include "tessera/engine/detokenize.hpp"

#include <array>
#include <string_view>
#include <utility>

namespace tessera {
namespace {

struct Replacement {
  std::string_view from, to;
};

void replace_all(std::string& text, const Replacement& rule) {
  std::string result;
  std::size_t at = 0;
  for (std::size_t next = text.find(rule.from); next != std::string::npos; next = text.find(rule.from, at)) {
    result.append(text, at, next - at).append(rule.to);
    at = next + rule.from.size();
  }
  result.append(text, at);
  text = std::move(result);
}

/// No white space inside of a pair.
void tighten(std::string& text, char open, char close) {
  constexpr std::string_view kWhite = " \t\n\r\f\v";
  std::string result;
  std::size_t at = 0;
  while (true) {
    const std::size_t begin = text.find(open, at);
    const std::size_t end = begin == std::string::npos ? begin : text.find(close, begin + 1);
    if (end == std::string::npos) break;
    const std::string_view inside = std::string_view(text).substr(begin + 1, end - begin - 1);
    const std::size_t first = inside.find_first_not_of(kWhite);
    result.append(text, at, begin + 1 - at);
    if (first != std::string_view::npos)
      result.append(inside.substr(first, inside.find_last_not_of(kWhite) + 1 - first));
    result += close;
    at = end + 1;
  }
  result.append(text, at);
  text = std::move(result);
}

constexpr std::array<Replacement, 10> kMarks{{{"s '", "s'"},
                                              {" @-@ ", "-"},
                                              {" @,@ ", ","},
                                              {" @.@ ", "."},
                                              {" : ", ": "},
                                              {" ; ", "; "},
                                              {" . ", ". "},
                                              {" ! ", "! "},
                                              {" ? ", "? "},
                                              {" , ", ", "}}};
constexpr std::array<Replacement, 8> kRest{{{"= = = =", "===="},
                                            {"= = =", "==="},
                                            {"= =", "=="},
                                            {" \u00b0 ", "\u00b0"},
                                            {" \n", "\n"},
                                            {"\n ", "\n"},
                                            {" N ", " 1 "},
                                            {" 's", "'s"}}};

}  // namespace

std::string detokenize_wikitext(std::string text) {
  for (const Replacement& rule : kMarks) replace_all(text, rule);
  for (const auto& [open, close] : {std::pair('(', ')'), {'[', ']'}, {'{', '}'}, {'"', '"'}, {'\'', '\''}})
    tighten(text, open, close);
  for (const Replacement& rule : kRest) replace_all(text, rule);
  return text;
}

}  // namespace tessera
