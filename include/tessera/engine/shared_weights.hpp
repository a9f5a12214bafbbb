#pragma once
/// Weights that every rank brought along, where those of rank 0 count.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/engine/weight_fit.hpp"

namespace tessera {

/// How the weights a rank brought differ from those of rank 0.
struct WeightDifference {
  int rank = 0;
  std::int64_t tensors = 0;  ///< of Hugging Face's names
  std::string first;         ///< the first of these names
};

/// Puts the weights of rank 0 of `world` into `engine`. `open` gives what this rank has of them, or nothing;
/// of its errors only rank 0's count, and end all ranks. Hashes are compared first; a tensor that differs
/// anywhere goes out in blocks of at most 64 MB, of which each rank keeps its part, and the others are read
/// by each rank from its own. `config`: the architecture of these weights; `fit`: what of them the engine's
/// model takes. Collective over `world`.
std::vector<WeightDifference> load_weights_of_rank_0(const std::function<std::optional<HfModel>()>& open,
                                                     const Architecture& config, const WeightFit& fit,
                                                     Communicator& world, Engine& engine);

}  // namespace tessera
