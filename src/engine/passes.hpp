#pragma once
#include "engine/timer.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

/// Passes whose loss was not read yet.
struct Engine::PassesUnderWay {
  std::vector<LossTerm> terms;
  std::vector<HostCopy> sums;  ///< of each term, on this rank
  Spans forward, backward;
  std::uint64_t launched = 0;  ///< operations of the flight recorder so far
};

}  // namespace tessera
