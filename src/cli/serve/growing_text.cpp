#include "cli/serve/growing_text.hpp"

#include <algorithm>

namespace tessera::cli::serving {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // what tokenizers write for half a character

/// Bytes of a text without a character at its end that is not whole.
std::size_t whole_characters(std::string_view text) {
  while (text.ends_with(kReplacement)) text.remove_suffix(kReplacement.size());
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;  // not a first byte
    const std::size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

/// Bytes without what may be the beginning of a stop text.
std::size_t before_stops(std::string_view text, const std::vector<std::string>& stops) {
  std::size_t kept = text.size();
  for (const std::string& stop : stops) {
    for (std::size_t n = std::min(stop.size() - 1, text.size()); n > 0; --n) {
      if (!text.ends_with(std::string_view(stop).substr(0, n))) continue;
      kept = std::min(kept, text.size() - n);
      break;
    }
  }
  return kept;
}

}  // namespace

void GrowingText::take(const TextNews& news) {
  if (done_) return;
  const GeneratedText& text = news.text;
  const auto before = static_cast<std::size_t>(news.prompt_logprobs);
  prompt_logprobs_ += news.prompt_logprobs;
  const auto add_told = [&](std::size_t i) {
    if (i < text.logprobs.size()) logprobs_.push_back(text.logprobs[i]);
    if (i < text.top_logprobs.size()) top_logprobs_.push_back(text.top_logprobs[i]);
  };
  for (std::size_t i = 0; i < before; ++i) add_told(i);
  for (std::size_t i = 0; i < text.tokens.size() && !done_; ++i) {
    all_.push_back(text.tokens[i]);
    const bool ends = news.done && text.stopped && i + 1 == text.tokens.size();
    if (ends) break;  // the token that ends a text is none of it
    tokens_.push_back(text.tokens[i]);
    add_told(before + i);
    if (!stops_->empty() && find_stop()) done_ = stopped_ = true;
  }
  if (!done_ && news.done) {
    done_ = true;
    stopped_ = text.stopped;
  }
}

bool GrowingText::find_stop() {
  text_ = texts_->decode(tokens_);
  std::size_t end = std::string::npos;
  for (const std::string& stop : *stops_) {
    const std::size_t at = text_.find(stop);
    if (at != std::string::npos) end = std::min(end, at + (keeps_stop_ ? stop.size() : 0));
  }
  if (end == std::string::npos) return false;
  text_.resize(end);
  return text_known_ = true;
}

std::string GrowingText::shown() const {
  if (text_known_) return text_;
  std::string text = texts_->decode(tokens_);
  if (!done_) text.resize(before_stops(std::string_view(text).substr(0, whole_characters(text)), *stops_));
  return text;
}

}  // namespace tessera::cli::serving
