/// A build without CUDA: no NCCL.

#include "tessera/base/error.hpp"
#include "tessera/comm/nccl.hpp"

namespace tessera {

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator>, Device device) {
  throw ConfigError(
      detail::concat("a communicator for ", device,
                     " needs NCCL, and this build of Tessera has no CUDA backend: set device.type "
                     "to cpu or auto, or build with -DTESSERA_CUDA=ON"));
}

}  // namespace tessera
