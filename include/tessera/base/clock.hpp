#pragma once
#include <chrono>

namespace tessera {

/// Now by std::chrono::steady_clock, in seconds since its epoch; the same in all processes of a machine.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tessera
