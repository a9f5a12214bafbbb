#pragma once
#include "tessera/nn/forward.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera {

/// For the residual stream of this rank, which begins where its share of the positions does.
inline Forward on_own_positions(Forward forward, const TensorParallel& tensor) {
  if (forward.shared(tensor).sharded_sequence())
    forward.position0 = forward.input.seq_length / tensor.size() * tensor.rank();
  return forward;
}

}  // namespace tessera
