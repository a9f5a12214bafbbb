#pragma once
/// How texts of a model begin and end.

#include "cli/model_command.hpp"

namespace tessera::cli {

struct TextEnds {
  bool encodes = false;         ///< an encoder reads the prompts
  bool prompts_end = false;     ///< of these, each ends with `end`
  std::int32_t start = 0;       ///< what texts begin with there
  std::int32_t end = -1;        ///< the token that ends a text, or -1
  std::int64_t vocab_size = 0;  ///< tokens that have a text

  /// As the tokenizers of Transformers' T5 do it; samples of a run of ours have none there.
  void finish_prompt(std::vector<std::int32_t>& prompt) const {
    if (prompts_end && (prompt.empty() || prompt.back() != end)) prompt.push_back(end);
  }
  /// New tokens without the one that ended the text, and without those that have no text: a model's
  /// vocabulary may be padded beyond the tokenizer's, and a run of T5 adds sentinels.
  std::vector<std::int32_t> shown(std::vector<std::int32_t> tokens) const {
    if (!tokens.empty() && tokens.back() == end) tokens.pop_back();
    std::erase_if(tokens, [&](std::int32_t id) { return id >= vocab_size; });
    return tokens;
  }
};

/// Collective over `world`; `tokenizer` is asked on rank 0.
TextEnds text_ends(const LoadedModel& loaded, const ModelArguments& a, Tokenizer* tokenizer,
                   Communicator& world);

}  // namespace tessera::cli
