#pragma once
#include <unistd.h>

#include <array>
#include <string>

namespace tessera {

/// This machine's name for itself.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

}  // namespace tessera
