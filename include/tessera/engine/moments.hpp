#pragma once
/// An optimizer's state from elsewhere: moments by parameter, and how many updates each has had.

#include <cstdint>
#include <map>
#include <string>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// Puts moments of one kind ("adam_m", "adam_v" or "momentum") of every parameter into `engine`. `moments`:
/// on rank 0, under the names and with the shapes of weights; null elsewhere. Each is sent to all ranks in
/// turn, which keep their parts. Collective. Errors: InvalidArgument on every rank if the optimizer keeps no
/// such state.
void load_moments(Engine& engine, const std::string& kind, const HfModel* moments);

/// How many updates each parameter of the model has had, whole, on every rank. Collective.
std::map<std::string, std::int64_t> update_counts(Engine& engine);

/// For state from elsewhere: a parameter has had `counts` of its name, or none; the optimizer as many as the
/// most. Errors: InvalidArgument for negative ones.
void set_update_counts(Engine& engine, const std::map<std::string, std::int64_t>& counts);

}  // namespace tessera
