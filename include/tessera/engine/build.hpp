#pragma once
/// From a configuration to an engine.

#include <memory>

#include "tessera/engine/engine.hpp"

namespace tessera {

/// Context, decoder and engine for `config`. trainable = false leaves gradients and optimizer state out.
std::unique_ptr<Engine> build_engine(const Config& config, bool trainable = true);

}  // namespace tessera
