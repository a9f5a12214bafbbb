#pragma once
/// Generation as Python calls it.

#include <pybind11/pybind11.h>

#include <vector>

#include "tessera/engine/generate.hpp"

namespace tessera::bindings {

/// Texts by prompt as (tokens, logprobs, score, stopped); `options`: fields of GenerationOptions by name.
/// Releases the interpreter lock while the model computes. Errors: InvalidArgument, also for names that are
/// no field.
pybind11::list generate(Generator& generator, const std::vector<std::vector<std::int32_t>>& prompts,
                        const pybind11::dict& options);

}  // namespace tessera::bindings
