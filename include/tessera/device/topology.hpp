#pragma once
/// How the GPUs of a machine are connected, and which part of its memory they are near.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// From near to far; nvidia-smi's names for them: X, NV#, PIX, PXB, PHB, NODE, SYS.
enum class LinkKind {
  self,
  nvlink,
  pcie_switch,    ///< PIX: at most one PCIe bridge
  pcie_switches,  ///< PXB: several, without the CPU's host bridge
  host_bridge,    ///< PHB: through a CPU's PCIe host bridge
  numa_node,      ///< NODE: through several host bridges of one NUMA node
  system,         ///< SYS: between NUMA nodes
};

struct GpuLink {
  LinkKind kind = LinkKind::self;
  int nvlinks = 0;  ///< how many together, for nvlink
  friend bool operator==(const GpuLink&, const GpuLink&) = default;
};
/// "X", "NV12", "PHB", ...
std::string to_text(const GpuLink& link);

struct GpuPlace {
  std::string name;    ///< "" where nobody said
  std::string pci;     ///< "0000:1b:00.0", "" where nobody said
  int numa_node = -1;  ///< -1 = not known
};

struct Topology {
  std::vector<GpuPlace> gpus;
  std::vector<GpuLink> links;  ///< [gpu, gpu]
  std::string why_none;        ///< without GPUs: the reason

  const GpuLink& between(std::size_t a, std::size_t b) const { return links.at(a * gpus.size() + b); }
};

/// Groups of GPUs that reach each other over NVLink, directly or by others of the group; in order.
std::vector<std::vector<int>> nvlink_islands(const Topology& topology);

/// The table that `nvidia-smi topo -m` prints, NICs left out.
std::string to_text(const Topology& topology);

/// Reads such a table, also one with NICs, affinities, a legend and a terminal's escape codes. `source` is
/// for messages. Errors: DataError with source, line and reason.
Topology parse_topology(std::string_view text, const std::string& source);

/// Of this machine, asked of NVIDIA's management library (NVML), which is loaded if it is there. Without it,
/// or where it refuses, no GPUs and why.
Topology machine_topology(const std::string& library = "libnvidia-ml.so.1");

/// A NUMA node of this machine and its processors as the system writes them: "0-31,64-95".
struct NumaNode {
  int number = 0;
  std::string cpus;
};
/// In order; none where the system has no such folder.
std::vector<NumaNode> numa_nodes(const std::filesystem::path& system = "/sys");

}  // namespace tessera
