/// Tensor groups on machines whose GPUs are connected one way or another.

#include <gtest/gtest.h>

#include "tessera/engine/plan.hpp"

namespace tessera {
namespace {

constexpr const char* kPairs =
    "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV4 SYS SYS\nGPU1 NV4 X SYS SYS\nGPU2 SYS SYS X NV4\nGPU3 SYS SYS NV4 X\n";
constexpr const char* kNoLinks = "GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n";

std::vector<std::string> warnings(int tensor, int pipeline, int data, const char* table) {
  Settings config;
  config.model.num_layers = 8;
  config.model.hidden_size = 48;
  config.model.num_heads = 24;
  config.training.global_batch_size = 24;
  config.training.micro_batch_size = 1;
  config.parallel.tensor = tensor;
  config.parallel.pipeline = pipeline;
  config.parallel.data = data;
  return link_warnings(make_plan(config), parse_topology(table, "table"));
}

TEST(LinkWarnings, NoneWhereGroupsStayInTheirIsland) {
  EXPECT_TRUE(warnings(2, 1, 1, kPairs).empty());
  EXPECT_TRUE(warnings(2, 2, 2, kPairs).empty());  // over two machines
  EXPECT_TRUE(warnings(1, 4, 3, kNoLinks).empty());
  EXPECT_TRUE(link_warnings(make_plan(Settings{}), Topology{}).empty());
}

TEST(LinkWarnings, GroupsThatLeaveTheirIsland) {
  EXPECT_EQ(warnings(4, 1, 2, kPairs),
            std::vector<std::string>{
                "all 2 tensor groups leave their NVLink island, such as ranks [0 1 2 3]: GPU0 and "
                "GPU2 are connected by SYS; the islands are [0 1] [2 3]. Take a parallel.tensor of "
                "at most 2 that stays within them, and pipeline stages or data ranks between them"});
  EXPECT_EQ(warnings(2, 2, 1, kNoLinks),
            std::vector<std::string>{
                "all 2 tensor groups leave their NVLink island, such as ranks [0 1]: GPU0 and GPU1 "
                "are connected by PHB, and there is no NVLink at all. Pipeline stages and data ranks "
                "send less than tensor ranks"});
}

TEST(LinkWarnings, GroupsThatLeaveTheirMachine) {
  const std::vector<std::string> lines = warnings(3, 1, 4, kPairs);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0],
            "2 of 4 tensor groups leave their machine of 4 GPUs, such as ranks [3 4 5]: tensor ranks talk in "
            "every layer "
            "and would wait for the network. Take a parallel.tensor that divides 4, and pipeline stages or "
            "data ranks "
            "between machines");
  EXPECT_EQ(lines[1].substr(0, 75),
            "2 of 4 tensor groups leave their NVLink island, such as ranks [0 1 2]: GPU0");
  EXPECT_EQ(warnings(8, 1, 1, kPairs).size(), 1u);
}

}  // namespace
}  // namespace tessera
