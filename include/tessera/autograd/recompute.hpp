#pragma once
/// Recomputation: memory for time (Chen et al., "Training deep nets with sublinear memory cost").

#include <functional>

#include "tessera/autograd/tape.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

/// What is computed again; gets the inputs as Vars, on a tape or not, and must give the same values each time
/// (random numbers are keyed, so they repeat). What it captures outlives the tape, and is no Var on a tape.
using RecomputedPart = std::function<std::vector<Var>(const std::vector<Var>&)>;

/// fn(inputs), recorded as one node that keeps only the inputs. Backward runs fn again on a tape of its own,
/// walks it, and frees it; with deferred weight gradients it keeps that tape until they were run. Inputs and
/// results may be empty.
/// `parameters`: every trained parameter fn uses (others may be among them). `partition`: keep 1 / size() of
/// each input on each of these ranks, which all hold the same, and gather them in backward (null = keep
/// whole); inputs with a recipe keep that, and those whose index `differs` says that each rank has another
/// one are kept whole. Errors: InvalidArgument if fn uses a Var on a tape that is not an input; in backward
/// if fn trains a parameter not named, or gives another number of results.
std::vector<Var> recompute(const ExecCtx& ctx, const std::vector<Var>& inputs,
                           std::vector<Parameter*> parameters, RecomputedPart fn,
                           Communicator* partition = nullptr,
                           const std::function<bool(std::size_t)>& differs = {});

}  // namespace tessera
