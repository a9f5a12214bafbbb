#pragma once
/// What is asked of a model that writes: checked, and made into texts to compute.

#include <deque>
#include <memory>
#include <vector>

#include "engine/generation/unit.hpp"
#include "tessera/nn/model.hpp"

namespace tessera::generation {

using Prompt = std::vector<std::int32_t>;

/// New tokens that a text may get.
std::int64_t most_new_tokens(const Model& model, const Prompt& prompt, const GenerationOptions& options);
/// Positions of the longest text.
std::int64_t longest_of(const Model& model, const Prompt& prompt, const GenerationOptions& options);
/// Errors: InvalidArgument as of Generator::run, for the options and for prompts by number.
void check_prompts(const Model& model, const std::vector<Prompt>& prompts, const GenerationOptions& options);

/// One prompt's texts, all in `options`, `prompt` and `start`, which must outlive them. `start`: what they
/// begin with where an encoder reads the prompt, or null; `first`: number of the first one.
void add_units(std::deque<std::unique_ptr<Unit>>& waiting, const GenerationOptions& options,
               std::int64_t index, std::uint64_t first, const Prompt& prompt, const Prompt* start,
               std::int64_t most_new);

}  // namespace tessera::generation
