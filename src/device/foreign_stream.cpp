#include "tessera/device/foreign_stream.hpp"

#include "device/cuda.hpp"

namespace tessera {

void synchronize_foreign(Device device, void* stream) {
  if (device.is_cpu()) return;
  cuda::use_device(device.index);
  cuda::synchronize(stream);
}

}  // namespace tessera
