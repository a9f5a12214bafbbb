#pragma once
#include "engine/timer.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

/// Passes whose loss was not read yet.
struct Engine::PassesUnderWay {
  HostCopy loss_sum;
  double targets = 0;
  Spans forward, backward;
  std::uint64_t launched = 0;  ///< operations of the flight recorder so far
};

}  // namespace tessera
