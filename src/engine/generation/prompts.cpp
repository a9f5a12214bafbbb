#include "engine/generation/prompts.hpp"

#include <algorithm>

namespace tessera::generation {
namespace {

/// Tokens that a text begins with.
std::int64_t first_tokens(const Model& model, const Prompt& prompt) {
  return model.reads_encoder_tokens() ? 1 : static_cast<std::int64_t>(prompt.size());
}

/// Positions of a text at most. Models with an encoder were made for no particular length.
std::int64_t most_positions(const Model& model) {
  return model.reads_encoder_tokens() ? model.position_limit() : model.max_positions();
}

std::int64_t longest_text(const Model& model, const Prompt& prompt, const GenerationOptions& options) {
  const std::int64_t first = first_tokens(model, prompt), limit = most_positions(model);
  const std::int64_t most = options.max_length > 0 ? std::min(limit, options.max_length) : limit;
  return first + std::clamp<std::int64_t>(most - first, 0, options.max_new_tokens);
}

}  // namespace

std::int64_t most_new_tokens(const Model& model, const Prompt& prompt, const GenerationOptions& options) {
  return longest_text(model, prompt, options) - first_tokens(model, prompt);
}

std::int64_t longest_of(const Model& model, const Prompt& prompt, const GenerationOptions& options) {
  return std::max(longest_text(model, prompt, options), static_cast<std::int64_t>(prompt.size()));
}

void check_prompts(const Model& model, const std::vector<Prompt>& prompts, const GenerationOptions& options) {
  check(options);
  model.check_generates(0);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<std::int64_t>(prompts[i].size());
    TESSERA_CHECK(length > 0, "generation needs at least one token to begin with: prompt ", i, " has none");
    TESSERA_CHECK(length <= most_positions(model), "prompt ", i, " of ", length,
                  " tokens is longer than the model's ", most_positions(model), " positions");
    for (const std::int32_t token : prompts[i]) {
      TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "token ", token, " of prompt ", i,
                    " is outside the vocabulary of ", model.vocab_size());
    }
    model.check_generates(longest_text(model, prompts[i], options));
  }
  TESSERA_CHECK(!options.prompt_logprobs || !model.reads_encoder_tokens(),
                "prompt_logprobs are of decoders: an encoder gives the tokens it reads none");
  TESSERA_CHECK(options.decoder_start >= 0 && options.decoder_start < model.vocab_size(), "decoder_start ",
                options.decoder_start, " is outside the vocabulary of ", model.vocab_size());
  for (const std::int32_t token : options.stop_tokens) {
    TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "stop token ", token,
                  " is outside the vocabulary of ", model.vocab_size());
  }
}

void add_units(std::deque<std::unique_ptr<Unit>>& waiting, const GenerationOptions& options,
               std::int64_t index, std::uint64_t first, const Prompt& prompt, const Prompt* start,
               std::int64_t most_new) {
  for (std::int64_t s = 0; s < options.num_samples; ++s) {
    auto unit = std::make_unique<Unit>();
    unit->prompt = index;
    unit->sample = s;
    unit->number = first + static_cast<std::uint64_t>(s);
    unit->options = &options;
    unit->tokens = start != nullptr ? start : &prompt;
    unit->encoded = start != nullptr ? &prompt : nullptr;
    unit->most_new = most_new;
    unit->text.resize(1);
    unit->logprobs.resize(1);
    waiting.push_back(std::move(unit));
  }
}

}  // namespace tessera::generation
