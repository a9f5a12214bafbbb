#pragma once
/// Whole weights and gradients on rank 0, whatever the layout.

#include <functional>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// Moments: of an engine whose optimizer has these (Optimizer::pieces).
enum class Collected { weights, gradients, adam_m, adam_v, momentum };

/// Collective over the engine's ranks: rank 0 runs `work`, the others give it what it reads of `source`, in
/// fp32 and under Tessera's names, one parameter at a time. `gradients`: what an update would take,
/// unclipped. Errors: those of `work`, on every rank; InvalidArgument for gradients or moments when there are
/// none.
void collect(Engine& engine, Collected what, const std::function<void(const WeightSource& source)>& work);

}  // namespace tessera
