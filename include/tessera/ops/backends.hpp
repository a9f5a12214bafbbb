#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tessera::ops {

/// Names and values describing what computes here: instruction sets, libraries, devices.
std::vector<std::pair<std::string, std::string>> describe_backends();

}  // namespace tessera::ops
