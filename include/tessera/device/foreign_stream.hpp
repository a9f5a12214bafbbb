#pragma once
#include "tessera/device/device.hpp"

namespace tessera {

/// Blocks until what another library has put on `stream`, a cudaStream_t of `device`, is done; null is the
/// default stream. Nothing on the CPU. Errors: DeviceError; ConfigError in a build without CUDA.
void synchronize_foreign(Device device, void* stream);

}  // namespace tessera
