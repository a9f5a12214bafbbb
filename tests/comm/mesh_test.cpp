#include "tessera/comm/mesh.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "tests/comm/conformance.hpp"

namespace tessera::test {
namespace {

using Groups = std::vector<std::vector<int>>;

template <typename... Axes>
Groups groups(const MeshShape& shape, Axes... axes) {
  return rank_groups(shape, std::array{axes...});
}

Groups first(Groups all, std::size_t count) {
  all.resize(count);
  return all;
}

// The tables are Megatron's for its default order tp-cp-ep-dp-pp.

TEST(RankGroups, SixteenRanksTp2Cp2Dp2Pp2) {
  const MeshShape shape{.tp = 2, .cp = 2, .dp = 2, .pp = 2};
  EXPECT_EQ(groups(shape, Axis::tp),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(groups(shape, Axis::cp),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(groups(shape, Axis::dp),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
  EXPECT_EQ(groups(shape, Axis::pp),
            (Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  EXPECT_EQ(groups(shape, Axis::dp, Axis::cp),
            (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
  EXPECT_EQ(groups(shape, Axis::tp, Axis::cp),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(first(groups(shape, Axis::tp, Axis::pp), 2), (Groups{{0, 1, 8, 9}, {2, 3, 10, 11}}));
  EXPECT_EQ(groups(shape, Axis::tp, Axis::cp, Axis::dp),
            (Groups{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
}

TEST(RankGroups, ExpertGroupsOfTheSameRanks) {
  const MeshShape two{.tp = 2, .cp = 2, .ep = 2, .dp = 2, .pp = 2};
  EXPECT_EQ(groups(two, Axis::ep),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(groups(two, Axis::tp, Axis::ep),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(groups(two, Axis::tp, Axis::ep, Axis::pp),
            (Groups{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}}));
  // Expert tensor parallelism 1 over the same sixteen ranks.
  const MeshShape four{.tp = 1, .cp = 2, .ep = 4, .dp = 4, .pp = 2};
  EXPECT_EQ(groups(four, Axis::ep), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
}

TEST(RankGroups, SixteenRanksTp2Pp4) {
  const MeshShape shape{.tp = 2, .dp = 2, .pp = 4};
  EXPECT_EQ(groups(shape, Axis::dp),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(groups(shape, Axis::tp),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(groups(shape, Axis::pp), (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
}

TEST(RankGroups, TwentyFourRanksTp2Dp3Pp4) {
  const Groups dp = groups(MeshShape{.tp = 2, .dp = 3, .pp = 4}, Axis::dp);
  ASSERT_EQ(dp.size(), 8u);
  EXPECT_EQ(dp[0], (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(dp[1], (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(dp[7], (std::vector<int>{19, 21, 23}));
}

TEST(RankGroups, EightRanksTp2Cp2Dp2) {
  EXPECT_EQ(groups(MeshShape{.tp = 2, .cp = 2, .dp = 2}, Axis::tp, Axis::cp),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(groups(MeshShape{.tp = 2, .dp = 4}, Axis::tp), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

/// Next and previous stage of tp 2, pp 4 are two ranks away, as a ring.
TEST(RankGroups, PipelineNeighboursOfTp2Pp4) {
  for (const auto& stages : groups(MeshShape{.tp = 2, .pp = 4}, Axis::pp)) {
    for (std::size_t s = 0; s < stages.size(); ++s) {
      EXPECT_EQ(stages[0], stages[s] % 2);
      EXPECT_EQ(stages[(s + 1) % 4], (stages[s] + 2) % 8);
      EXPECT_EQ(stages[(s + 3) % 4], (stages[s] + 6) % 8);
    }
  }
}

TEST(RankGroups, AxesAreTakenInTheMeshOrder) {
  const MeshShape shape{.tp = 2, .cp = 2, .dp = 2, .pp = 2};
  EXPECT_EQ(groups(shape, Axis::cp, Axis::dp), groups(shape, Axis::dp, Axis::cp));
  EXPECT_EQ(rank_groups(shape, {}).size(), 16u);
}

/// Closed forms, over every small shape: coordinates, and groups that hold every rank once.
TEST(RankGroups, EveryShapeIsPartitioned) {
  for (int code = 0; code < 3 * 3 * 3 * 3; ++code) {
    MeshShape shape{.tp = 1 + code % 3, .cp = 1 + code / 3 % 3, .dp = 1 + code / 9 % 3, .pp = 1 + code / 27};
    for (int ep = 1; ep <= shape.cp * shape.dp; ++ep) {
      if (shape.cp * shape.dp % ep != 0) continue;
      shape.ep = ep;
      for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
        std::set<int> seen;
        for (const auto& group : groups(shape, axis)) {
          ASSERT_EQ(static_cast<int>(group.size()), shape.along(axis));
          ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
          for (std::size_t i = 0; i < group.size(); ++i) {
            seen.insert(group[i]);
            ASSERT_EQ(coordinates_of(shape, group[i]).along(axis), static_cast<int>(i));
          }
        }
        ASSERT_EQ(static_cast<int>(seen.size()), shape.world());
      }
      for (int rank = 0; rank < shape.world(); ++rank) {
        ASSERT_EQ(rank_of(shape, coordinates_of(shape, rank)), rank);
      }
    }
    shape.ep = 1;
  }
}

TEST(RankGroups, WhatCannotBeIsRefused) {
  EXPECT_THROW(groups(MeshShape{.ep = 2, .dp = 2}, Axis::ep, Axis::dp), InvalidArgument);
  EXPECT_THROW(groups(MeshShape{.cp = 2, .ep = 2}, Axis::cp, Axis::ep), InvalidArgument);
  EXPECT_THROW(groups(MeshShape{.ep = 3, .dp = 2}, Axis::ep), InvalidArgument);
  EXPECT_THROW(groups(MeshShape{.tp = 0}, Axis::tp), InvalidArgument);
  EXPECT_THROW(coordinates_of(MeshShape{.tp = 2}, 2), InvalidArgument);
  EXPECT_THROW(coordinates_of(MeshShape{.tp = 2}, -1), InvalidArgument);
  EXPECT_THROW(rank_of(MeshShape{.tp = 2}, {.tp = 2}), InvalidArgument);
}

/// The world's ranks of a communicator's members, as its members tell each other.
std::vector<int> members(Communicator& group, int world_rank) {
  const ExecCtx ctx = ExecCtx::cpu(1, 1);
  const Tensor own = tensor_of(ctx, DType::i32, {static_cast<double>(world_rank)});
  const Tensor all = Tensor::empty(ctx, {group.size()}, DType::i32);
  group.all_gather(ctx, own, all).wait(ctx);
  return {all.data<std::int32_t>(), all.data<std::int32_t>() + group.size()};
}

std::vector<int> group_with(const Groups& all, int rank) {
  for (const auto& group : all) {
    if (std::find(group.begin(), group.end(), rank) != group.end()) return group;
  }
  return {};
}

TEST(ProcessMesh, EveryAxisIsItsGroup) {
  for (const MeshShape& shape :
       {MeshShape{.tp = 2, .cp = 2, .ep = 2, .dp = 2, .pp = 2}, MeshShape{.tp = 3, .dp = 2},
        MeshShape{.ep = 3, .dp = 3, .pp = 3}, MeshShape{.pp = 4}, MeshShape{.cp = 2, .ep = 4, .dp = 2}}) {
    run_local(shape.world(), [&](const auto& world) {
      const ProcessMesh mesh(world, shape);
      const int rank = world->rank();
      EXPECT_EQ(mesh.rank(), rank);
      for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
        EXPECT_EQ(members(mesh[axis], rank), group_with(groups(shape, axis), rank)) << name_of(axis);
        EXPECT_EQ(mesh[axis].rank(), mesh.coordinates().along(axis));
        EXPECT_EQ(mesh[axis].name(), name_of(axis));
      }
      const std::vector<int> stages = group_with(groups(shape, Axis::pp), rank);
      const bool end = rank == stages.front() || rank == stages.back();
      std::vector<int> tied{rank};
      if (end && stages.size() > 1) tied = {stages.front(), stages.back()};
      EXPECT_EQ(members(mesh.embedding(), rank), tied);
    });
  }
}

TEST(ProcessMesh, BlocksOfNeighboursAlongTp) {
  const MeshShape shape{.tp = 6, .dp = 2};
  run_local(shape.world(), [&](const auto& world) {
    ProcessMesh mesh(world, shape);
    const int rank = world->rank();
    EXPECT_EQ(members(mesh.tp_block(1), rank), std::vector<int>{rank});
    EXPECT_EQ(&mesh.tp_block(6), &mesh[Axis::tp]);
    for (const int copies : {3, 2}) {
      std::vector<int> block;
      for (int i = 0; i < copies; ++i) block.push_back(rank / copies * copies + i);
      EXPECT_EQ(members(mesh.tp_block(copies), rank), block);
      EXPECT_EQ(&mesh.tp_block(copies), &mesh.tp_block(copies));
    }
    EXPECT_THROW(mesh.tp_block(4), InvalidArgument);
    EXPECT_THROW(mesh.tp_block(0), InvalidArgument);
  });
}

TEST(ProcessMesh, GroupsAlongSeveralAxes) {
  const MeshShape shape{.tp = 2, .cp = 2, .dp = 2, .pp = 2};
  run_local(shape.world(), [&](const auto& world) {
    ProcessMesh mesh(world, shape);
    const int rank = world->rank();
    for (const std::vector<Axis>& axes : {std::vector{Axis::dp, Axis::cp}, std::vector{Axis::tp, Axis::dp},
                                          std::vector{Axis::tp, Axis::cp, Axis::dp, Axis::pp}}) {
      EXPECT_EQ(members(mesh.group(axes), rank), group_with(rank_groups(shape, axes), rank));
      EXPECT_EQ(&mesh.group(axes), &mesh.group(axes));
    }
    EXPECT_EQ(&mesh.group({Axis::cp, Axis::dp}), &mesh.group({Axis::dp, Axis::cp, Axis::ep}));
    EXPECT_EQ(&mesh.group({Axis::tp, Axis::ep}), &mesh[Axis::tp]);
    EXPECT_EQ(&mesh.group({Axis::ep}), &mesh[Axis::ep]);
    EXPECT_THROW(mesh.group({}), InvalidArgument);
  });
  const auto alone = ProcessMesh::alone(shape, 5);
  EXPECT_EQ(alone->group({Axis::dp, Axis::cp}).size(), 4);
  EXPECT_EQ(alone->group({Axis::dp, Axis::cp}).rank(), 2);
}

TEST(ProcessMesh, DataRanksShareOutInTheSameGroupsUntilAskedForOthers) {
  run_local(4, [](const auto& world) {
    ProcessMesh mesh(world, {.dp = 4});
    const Communicator* shard = mesh.share_data(2, true).shard.get();
    EXPECT_EQ(shard->size(), 2);
    EXPECT_EQ(mesh.share_data(2, true).shard.get(), shard);
    EXPECT_EQ(mesh.share_data(2, true).gather->size(), 2);
    const ProcessMesh::DataGroups& all = mesh.share_data(4, true);
    EXPECT_TRUE(all.shard == nullptr && all.copy == nullptr);
    EXPECT_EQ(all.gather->size(), 4);
  });
}

TEST(ProcessMesh, OneRankNeedsNobody) {
  const auto mesh = ProcessMesh::self();
  EXPECT_EQ(mesh->shape(), MeshShape{});
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp})
    EXPECT_EQ((*mesh)[axis].size(), 1);
  EXPECT_EQ(mesh->embedding().size(), 1);
  EXPECT_EQ(mesh->tp_block(1).size(), 1);
}

TEST(ProcessMesh, WorldOfAnotherSizeIsRefused) {
  const auto mesh = [](const MeshShape& shape) { ProcessMesh(make_self_communicator(), shape); };
  const std::string message = message_of<InvalidArgument>([&] { mesh({.tp = 2, .pp = 2}); });
  EXPECT_NE(message.find("4 ranks"), std::string::npos) << message;
  EXPECT_THROW(mesh({.dp = 0}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
