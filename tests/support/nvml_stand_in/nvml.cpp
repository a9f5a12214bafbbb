/// A machine of four GPUs, as NVIDIA's management library would tell of it: 0 and 1 are joined by four
/// NVLinks, 2 and 3 have two each to a switch, and a fifth link of GPU 0 is down.

#include <cstdio>
#include <cstring>

namespace {

struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, pci_device, pci_subsystem;
  char bus_id[32];
};

constexpr int kNotFound = 6, kGpus = 4;
constexpr unsigned kBuses[kGpus] = {0x07, 0x0b, 0x48, 0x4c};
/// NVML's levels: 10 single switch, 20 several, 30 host bridge, 40 node, 50 system.
constexpr int kLevels[kGpus][kGpus] = {{0, 10, 40, 50}, {10, 0, 30, 20}, {40, 30, 0, 10}, {50, 20, 10, 0}};
int handles[kGpus] = {0, 1, 2, 3};
int open_sessions = 0;

int number_of(void* device) { return *static_cast<int*>(device); }

int fill(int gpu, PciInfo* info) {
  info->bus = kBuses[gpu];
  std::snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", kBuses[gpu]);
  return 0;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  ++open_sessions;
  return 0;
}
int nvmlShutdown() {
  --open_sessions;
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = kGpus;
  return open_sessions > 0 ? 0 : 1;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &handles[index];
  return 0;
}
int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  std::snprintf(name, length, "Stand-in %d", number_of(device));
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) { return fill(number_of(device), info); }
int nvmlDeviceGetTopologyCommonAncestor(void* a, void* b, int* level) {
  *level = kLevels[number_of(a)][number_of(b)];
  return 0;
}
int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* state) {
  const int gpu = number_of(device);
  if (link >= 5) return kNotFound;
  *state = link < (gpu < 2 ? 4u : 2u) ? 1 : 0;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned, unsigned* type) {
  *type = number_of(device) < 2 ? 0 : 2;
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned, PciInfo* info) {
  const int gpu = number_of(device);
  return gpu < 2 ? fill(1 - gpu, info) : kNotFound;
}

}  // extern "C"
