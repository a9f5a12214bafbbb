#pragma once
/// Generation as Python calls it.

#include <pybind11/pybind11.h>

#include <vector>

#include "tessera/engine/generate.hpp"
#include "tessera/engine/score.hpp"

namespace tessera::bindings {

/// Texts by prompt as (tokens, logprobs, score, stopped); `options`: fields of GenerationOptions by name.
/// Releases the interpreter lock while the model computes. Errors: InvalidArgument, also for names that are
/// no field.
pybind11::list generate(Generator& generator, const std::vector<std::vector<std::int32_t>>& prompts,
                        const pybind11::dict& options);

/// score_texts() as (log-probabilities, whether each token is the likeliest) of tokens [firsts[i], end) of
/// each text.
pybind11::list score(Engine& engine, const std::vector<std::vector<std::int32_t>>& texts,
                     const std::vector<std::int64_t>& firsts, bool likeliest);

}  // namespace tessera::bindings
