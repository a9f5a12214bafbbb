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
};

}  // namespace tessera
