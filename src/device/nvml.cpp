/// The GPUs of this machine as NVIDIA's management library tells of them. The library belongs to the driver,
/// so it is looked for when asked, and its few types are declared here.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <memory>

#include "tessera/base/error.hpp"
#include "tessera/device/topology.hpp"

namespace tessera {
namespace {

using Result = int;  // 0 = success
using Handle = void*;
constexpr unsigned kMostLinks = 36;
constexpr unsigned kRemoteGpu = 0, kRemoteSwitch = 2;

/// nvmlPciInfo_t of version 3.
struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, pci_device, pci_subsystem;
  char bus_id[32];
};

/// Throws for the refusal of a call whose answer is needed; what only some drivers can say returns false.
class Nvml {
 public:
  explicit Nvml(const std::string& library) : library_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    TESSERA_ENSURE(DeviceError, library_ != nullptr,
                   "NVIDIA's management library is not here: ", ::dlerror());
    need("nvmlInit_v2", init_);
    need("nvmlShutdown", shutdown_);
    need("nvmlDeviceGetCount_v2", count_);
    need("nvmlDeviceGetHandleByIndex_v2", handle_);
    need("nvmlDeviceGetName", name_);
    need("nvmlDeviceGetPciInfo_v3", pci_);
    need("nvmlDeviceGetTopologyCommonAncestor", ancestor_);
    need("nvmlDeviceGetNvLinkState", link_state_);
    need("nvmlDeviceGetNvLinkRemotePciInfo_v2", link_pci_);
    find("nvmlDeviceGetNvLinkRemoteDeviceType", link_type_);
    check(init_(), "nvmlInit");
  }
  ~Nvml() { shutdown_(); }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::vector<Handle> devices() const {
    unsigned count = 0;
    check(count_(&count), "nvmlDeviceGetCount");
    std::vector<Handle> list(count);
    for (unsigned i = 0; i < count; ++i) check(handle_(i, &list[i]), "nvmlDeviceGetHandleByIndex");
    return list;
  }

  std::string name(Handle device) const {
    std::array<char, 96> text{};
    check(name_(device, text.data(), static_cast<unsigned>(text.size())), "nvmlDeviceGetName");
    return text.data();
  }

  PciInfo pci(Handle device) const {
    PciInfo info{};
    check(pci_(device, &info), "nvmlDeviceGetPciInfo");
    return info;
  }

  /// How far two devices are apart on PCIe.
  LinkKind ancestor(Handle a, Handle b) const {
    int level = 0;
    check(ancestor_(a, b, &level), "nvmlDeviceGetTopologyCommonAncestor");
    if (level <= 10) return LinkKind::pcie_switch;
    if (level <= 20) return LinkKind::pcie_switches;
    if (level <= 30) return LinkKind::host_bridge;
    return level <= 40 ? LinkKind::numa_node : LinkKind::system;
  }

  bool is_active(Handle device, unsigned link) const {
    unsigned state = 0;
    return link_state_(device, link, &state) == 0 && state == 1;
  }
  /// Old libraries have no word for it: before NVSwitch there were only GPUs.
  bool goes_to_switch(Handle device, unsigned link) const {
    unsigned type = kRemoteGpu;
    return link_type_ != nullptr && link_type_(device, link, &type) == 0 && type == kRemoteSwitch;
  }
  bool remote(Handle device, unsigned link, PciInfo& info) const {
    return link_pci_(device, link, &info) == 0;
  }

 private:
  template <typename Function>
  void find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(::dlsym(library_.get(), symbol));
  }
  template <typename Function>
  void need(const char* symbol, Function& function) const {
    find(symbol, function);
    TESSERA_ENSURE(DeviceError, function != nullptr, "NVIDIA's management library has no ", symbol,
                   ": the driver is too old");
  }
  static void check(Result result, const char* call) {
    TESSERA_ENSURE(DeviceError, result == 0, call, " of NVIDIA's management library failed with ", result);
  }

  struct Close {
    void operator()(void* library) const { ::dlclose(library); }
  };
  std::unique_ptr<void, Close> library_;
  Result (*init_)() = nullptr;
  Result (*shutdown_)() = nullptr;
  Result (*count_)(unsigned*) = nullptr;
  Result (*handle_)(unsigned, Handle*) = nullptr;
  Result (*name_)(Handle, char*, unsigned) = nullptr;
  Result (*pci_)(Handle, PciInfo*) = nullptr;
  Result (*ancestor_)(Handle, Handle, int*) = nullptr;
  Result (*link_state_)(Handle, unsigned, unsigned*) = nullptr;
  Result (*link_pci_)(Handle, unsigned, PciInfo*) = nullptr;
  Result (*link_type_)(Handle, unsigned, unsigned*) = nullptr;
};

/// "0000:1b:00.0", as the system names the device; NVML writes "00000000:1B:00.0".
std::string system_name(const PciInfo& pci) {
  std::string name = pci.bus_id;
  if (name.size() > 12) name.erase(0, name.size() - 12);
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

int numa_node_of(const std::string& pci) {
  std::ifstream file("/sys/bus/pci/devices/" + pci + "/numa_node");
  int node = -1;
  file >> node;
  return file ? node : -1;
}

/// NVLinks of one GPU: to each of the others, and to switches, which reach all that are on them.
struct Links {
  std::vector<int> direct;
  int to_switch = 0;
};

Links links_of(const Nvml& nvml, Handle device, const std::vector<GpuPlace>& gpus) {
  Links links{.direct = std::vector<int>(gpus.size(), 0)};
  for (unsigned link = 0; link < kMostLinks; ++link) {
    PciInfo remote{};
    if (!nvml.is_active(device, link)) continue;
    if (nvml.goes_to_switch(device, link)) {
      ++links.to_switch;
    } else if (nvml.remote(device, link, remote)) {
      for (std::size_t i = 0; i < gpus.size(); ++i) links.direct[i] += gpus[i].pci == system_name(remote);
    }
  }
  return links;
}

Topology ask(const Nvml& nvml) {
  Topology topology;
  const std::vector<Handle> devices = nvml.devices();
  for (Handle device : devices) {
    const std::string pci = system_name(nvml.pci(device));
    topology.gpus.push_back({nvml.name(device), pci, numa_node_of(pci)});
  }
  std::vector<Links> links;
  for (Handle device : devices) links.push_back(links_of(nvml, device, topology.gpus));
  for (std::size_t a = 0; a < devices.size(); ++a) {
    for (std::size_t b = 0; b < devices.size(); ++b) {
      const int count = links[a].direct[b] + std::min(links[a].to_switch, links[b].to_switch);
      if (a == b) {
        topology.links.push_back({});
      } else if (count > 0) {
        topology.links.push_back({LinkKind::nvlink, count});
      } else {
        topology.links.push_back({nvml.ancestor(devices[a], devices[b])});
      }
    }
  }
  if (devices.empty()) topology.why_none = "NVIDIA's management library finds no GPU";
  return topology;
}

}  // namespace

Topology machine_topology(const std::string& library) {
  try {
    return ask(Nvml(library));
  } catch (const DeviceError& error) {
    return {.gpus = {}, .links = {}, .why_none = error.what()};
  }
}

}  // namespace tessera
