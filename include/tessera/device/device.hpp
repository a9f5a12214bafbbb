#pragma once
#include <ostream>

namespace tessera {

/// meta: nothing is computed and no memory stands behind an address. Shapes, sizes and the work that would be
/// done are those of a run on the CPU (ExecCtx::meta).
enum class DeviceType { cpu, cuda, meta };

/// Where memory lives and kernels run.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }
  bool is_meta() const { return type == DeviceType::meta; }
  friend bool operator==(const Device&, const Device&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Device& device) {
    if (device.is_cuda()) return out << "cuda:" << device.index;
    return out << (device.is_cpu() ? "cpu" : "meta");
  }
};

}  // namespace tessera
