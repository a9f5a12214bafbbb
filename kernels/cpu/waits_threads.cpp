#include "kernels/api/short_waits.hpp"

namespace tessera::kernels {

struct ShortWaits::Team {};

ShortWaits::ShortWaits() = default;
ShortWaits::~ShortWaits() = default;

}  // namespace tessera::kernels
