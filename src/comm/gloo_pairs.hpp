#pragma once
/// Gloo's transport over connections that exist already.

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <chrono>
#include <memory>
#include <vector>

#include "comm/store_wire.hpp"

namespace tessera {

/// `device` is one of tcp::CreateDevice. `sockets` are by rank, that of `rank` empty. Nobody else can
/// connect: the sockets on which Gloo would listen are closed before it looks at them. Errors: Gloo's
/// exceptions.
std::shared_ptr<gloo::transport::Context> make_gloo_context(
    const std::shared_ptr<gloo::transport::Device>& device, int rank, std::vector<store::Socket> sockets,
    std::chrono::milliseconds timeout);

}  // namespace tessera
