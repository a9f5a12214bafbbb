#pragma once
/// The version of the library.

namespace tessera {

/// "major.minor.patch", the version of the CMake project.
const char* version();

}  // namespace tessera
