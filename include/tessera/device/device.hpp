#pragma once
#include <ostream>

namespace tessera {

enum class DeviceType { cpu, cuda };

/// Where memory lives and kernels run.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  bool is_cpu() const { return type == DeviceType::cpu; }
  friend bool operator==(const Device&, const Device&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Device& device) {
    return device.is_cpu() ? out << "cpu" : out << "cuda:" << device.index;
  }
};

}  // namespace tessera
