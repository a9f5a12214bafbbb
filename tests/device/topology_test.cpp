#include "tessera/device/topology.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

/// What nvidia-smi prints on two pairs of GPUs, with a NIC, a terminal's codes and part of its legend.
constexpr const char* kPairs =
    "\t\033[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tNODE\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63,96-127\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPXB\tNODE\tSYS\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n"
    "\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
    "\n"
    "NIC Legend:\n"
    "\n"
    "  NIC0: mlx5_0\n";

using Islands = std::vector<std::vector<int>>;

TEST(Topology, ReadsWhatNvidiaSmiPrints) {
  const Topology pairs = parse_topology(kPairs, "pairs.txt");
  ASSERT_EQ(pairs.gpus.size(), 4u);
  EXPECT_EQ(pairs.between(0, 1), (GpuLink{LinkKind::nvlink, 12}));
  EXPECT_EQ(pairs.between(3, 2), (GpuLink{LinkKind::nvlink, 4}));
  EXPECT_EQ(pairs.between(1, 2), (GpuLink{LinkKind::system}));
  EXPECT_EQ(pairs.between(2, 2), (GpuLink{LinkKind::self}));
  EXPECT_EQ(pairs.gpus[1].numa_node, 0);
  EXPECT_EQ(pairs.gpus[2].numa_node, 1);
  EXPECT_EQ(nvlink_islands(pairs), (Islands{{0, 1}, {2, 3}}));
}

TEST(Topology, ReadsItsOwnTable) {
  const Topology pairs = parse_topology(kPairs, "pairs.txt");
  const std::string text = to_text(pairs);
  EXPECT_EQ(text,
            "\tGPU0\tGPU1\tGPU2\tGPU3\tNUMA Affinity\n"
            "GPU0\tX\tNV12\tSYS\tSYS\t0\n"
            "GPU1\tNV12\tX\tSYS\tSYS\t0\n"
            "GPU2\tSYS\tSYS\tX\tNV4\t1\n"
            "GPU3\tSYS\tSYS\tNV4\tX\t1\n");
  EXPECT_EQ(parse_topology(text, "again").links, pairs.links);
  EXPECT_EQ(to_text(parse_topology("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\n", "spaces")),
            "\tGPU0\tGPU1\tNUMA Affinity\nGPU0\tX\tPIX\tN/A\nGPU1\tPIX\tX\tN/A\n");
}

TEST(Topology, AnIslandNeedsNoLinkBetweenEveryTwo) {
  // A ring: each GPU reaches its neighbours.
  const Topology ring = parse_topology(
      "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV1 PHB NV2\nGPU1 NV1 X NV1 PHB\nGPU2 PHB NV1 X NV1\nGPU3 NV2 PHB NV1 X\n",
      "ring");
  EXPECT_EQ(nvlink_islands(ring), (Islands{{0, 1, 2, 3}}));
  const Topology none = parse_topology("GPU0 GPU1\nGPU0 X PXB\nGPU1 PXB X\n", "none");
  EXPECT_EQ(nvlink_islands(none), (Islands{{0}, {1}}));
}

TEST(Topology, RefusesWhatIsNoTable) {
  const struct {
    const char *text, *reason;
  } bad[] = {
      {"", "t:0: there is no table of GPUs"},
      {"no devices were found\n", "there is no table of GPUs"},
      {"GPU0 X\n", "t:1: the heading must name the columns"},
      {"GPU0 GPU1\nGPU0 X NV1\n", "the table has 1 rows for 2 GPUs"},
      {"GPU0 GPU1\nGPU0 X NV1\nGPU0 NV1 X\n", "t:3: the row of GPU1 should be here, not that of GPU0"},
      {"GPU0 GPU1\nGPU0 X\nGPU1 NV1 X\n", "t:2: the row of GPU0 has 1 entries for 2 GPUs"},
      {"GPU0 GPU1\nGPU0 X NV\nGPU1 NV1 X\n", "t:2: \"NV\" is no connection"},
      {"GPU0 GPU1\nGPU0 X NV0\nGPU1 NV1 X\n", "\"NV0\" is no connection"},
      {"GPU0 GPU1\nGPU0 X X\nGPU1 NV1 X\n", "t:2: GPU0 to GPU1 cannot be X"},
      {"GPU0 GPU1\nGPU0 X NV1\nGPU1 NV2 X\n", "GPU0 and GPU1 are connected in two ways, NV1 and NV2"},
  };
  for (const auto& [text, reason] : bad) {
    try {
      parse_topology(text, "t");
      ADD_FAILURE() << text;
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  }
}

TEST(Topology, AsksTheManagementLibrary) {
  const std::filesystem::path library =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libnvml_stand_in.so";
  if (!std::filesystem::exists(library)) GTEST_SKIP() << "needs " << library;
  for (int times = 0; times < 2; ++times) {
    const Topology machine = machine_topology(library);
    EXPECT_EQ(machine.why_none, "");
    EXPECT_EQ(to_text(machine),
              "\tGPU0\tGPU1\tGPU2\tGPU3\tNUMA Affinity\n"
              "GPU0\tX\tNV4\tNODE\tSYS\tN/A\n"
              "GPU1\tNV4\tX\tPHB\tPXB\tN/A\n"
              "GPU2\tNODE\tPHB\tX\tNV2\tN/A\n"
              "GPU3\tSYS\tPXB\tNV2\tX\tN/A\n");
    EXPECT_EQ(machine.gpus[3].name, "Stand-in 3");
    EXPECT_EQ(machine.gpus[3].pci, "0000:4c:00.0");
  }
}

TEST(Topology, SaysWhyThereIsNone) {
  const Topology absent = machine_topology("libnvml_that_is_not_there.so");
  EXPECT_TRUE(absent.gpus.empty());
  EXPECT_NE(absent.why_none.find("libnvml_that_is_not_there.so"), std::string::npos) << absent.why_none;
  const Topology other = machine_topology("libm.so.6");
  EXPECT_NE(other.why_none.find("has no nvmlInit_v2"), std::string::npos) << other.why_none;
}

TEST(Topology, ReadsNumaNodes) {
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / ("tessera_numa_" + std::to_string(::getpid()));
  for (const char* name : {"node0", "node10", "node2", "power", "node"})
    std::filesystem::create_directories(root / "devices/system/node" / name);
  std::ofstream(root / "devices/system/node/node0/cpulist") << "0-3,8-11\n";
  std::ofstream(root / "devices/system/node/node2/cpulist") << "4-7\n";
  const std::vector<NumaNode> nodes = numa_nodes(root);
  std::filesystem::remove_all(root);
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].cpus, "0-3,8-11");
  EXPECT_EQ(nodes[1].number, 2);
  EXPECT_EQ(nodes[2].number, 10);
  EXPECT_EQ(nodes[2].cpus, "");
  EXPECT_TRUE(numa_nodes(root / "nowhere").empty());
}

}  // namespace
}  // namespace tessera
