#pragma once
/// Beam search of one prompt.

#include <span>

#include "engine/generation/candidates.hpp"
#include "engine/generation/unit.hpp"

namespace tessera::generation {

/// Candidates that each beam must bring to a step.
std::int64_t candidates_per_beam(const GenerationOptions& options);

/// One step: `rows` are the likeliest next tokens of each row (one before the first step, then num_beams),
/// their scores log-probabilities after penalties, likeliest first. Errors: InvalidArgument where fewer
/// tokens than beams can go on.
Choice advance_beams(Unit& unit, const std::vector<std::vector<Candidate>>& rows,
                     const GenerationOptions& options);

/// The num_return best of a unit that is done.
Generated best_of(Unit& unit, const GenerationOptions& options);

}  // namespace tessera::generation
