#pragma once
/// A text that is being written, as its client sees it.

#include <string>
#include <vector>

#include "cli/serve/service.hpp"

namespace tessera::cli::serving {

class GrowingText {
 public:
  /// `stops`: the text ends before the first of them (behind it if `keeps_stop`).
  GrowingText(Texts& texts, const std::vector<std::string>& stops, bool keeps_stop = false)
      : texts_(&texts), stops_(&stops), keeps_stop_(keeps_stop) {}

  /// Of one text's news. Tokens behind the end are not looked at.
  void take(const TextNews& news);
  bool done() const { return done_; }
  /// "stop" or "length"; null before the end.
  const char* finish_reason() const { return !done_ ? nullptr : stopped_ ? "stop" : "length"; }

  /// What can be shown: all once it is done, before that without what may still become another character or
  /// a stop text.
  std::string shown() const;
  /// Tokens that were computed, with one that ended the text.
  std::int64_t computed() const { return static_cast<std::int64_t>(all_.size()); }
  /// Of the text: without what ended it.
  const std::vector<std::int32_t>& tokens() const { return tokens_; }
  /// Of prompt_count tokens of the prompt behind the first, then of tokens().
  const std::vector<float>& logprobs() const { return logprobs_; }
  const std::vector<std::vector<TokenLogprob>>& top_logprobs() const { return top_logprobs_; }
  std::int64_t prompt_logprobs() const { return prompt_logprobs_; }

 private:
  bool find_stop();

  Texts* texts_;
  const std::vector<std::string>* stops_;
  bool keeps_stop_;
  bool done_ = false, stopped_ = false;
  std::vector<std::int32_t> all_, tokens_;
  std::vector<float> logprobs_;
  std::vector<std::vector<TokenLogprob>> top_logprobs_;
  std::int64_t prompt_logprobs_ = 0;
  std::string text_;         ///< with stop texts: of tokens_
  bool text_known_ = false;  ///< text_ is the end's
};

}  // namespace tessera::cli::serving
