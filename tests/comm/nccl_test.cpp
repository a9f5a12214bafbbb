#include <atomic>
#include <deque>
#include <map>

#include "tessera/comm/heartbeat.hpp"
#include "tests/comm/nccl_support.hpp"

namespace tessera::test {

INSTANTIATE_TEST_SUITE_P(Nccl, Conformance, testing::Values(nccl_backend()), backend_name);
INSTANTIATE_TEST_SUITE_P(Nccl, ConformanceFaults, testing::Values(nccl_backend()), backend_name);

namespace {

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    const Backend backend = nccl_backend();
    if (!backend.why_not.empty()) GTEST_SKIP() << backend.why_not;
    if (backend.max_ranks < 3) GTEST_SKIP() << "needs three ranks, a GPU each";
  }
};

/// Each rank posts more receives from the left than it has sent to the right, in both directions of a ring of
/// chains: on one stream the sends would stand behind receives that need them.
TEST_F(Nccl, ReceivesPostedAheadDoNotHoldUpSends) {
  run_nccl(3, {.timeout_s = 30}, [](const auto& comm) {
    const ExecCtx ctx = context();
    constexpr int kMessages = 8, kAhead = 3;
    const int rank = comm->rank(), last = comm->size() - 1;
    std::deque<std::pair<Tensor, Pending>> arriving;
    int posted = 0;
    const auto post = [&] {
      while (rank > 0 && posted < kMessages && static_cast<int>(arriving.size()) < kAhead) {
        const Tensor x = Tensor::empty(ctx, {1000}, DType::f32);
        arriving.emplace_back(x, comm->recv(ctx, x, rank - 1, static_cast<std::uint32_t>(posted++)));
      }
    };
    for (int i = 0; i < kMessages; ++i) {
      post();
      Tensor x = rank == 0 ? tensor_of(ctx, DType::f32, marks(0, i, 1000)) : Tensor();
      if (rank > 0) {
        arriving.front().second.wait(ctx);
        x = arriving.front().first;
        arriving.pop_front();
      }
      if (rank < last) comm->send(ctx, x, rank + 1, static_cast<std::uint32_t>(i));
      // What comes back needs all of this message's way; nobody else waits for it.
      const Tensor back = Tensor::empty(ctx, {1000}, DType::f32);
      if (rank < last) comm->recv(ctx, back, rank + 1, 77).wait(ctx);
      if (rank > 0) comm->send(ctx, rank == last ? x : back, rank - 1, 77);
      if (rank == 0) {
        EXPECT_EQ(read_values(back), marks(0, i, 1000));
      }
    }
  });
}

/// A batch counts as sorted by tag, so that two ranks may list the same messages in different orders.
TEST_F(Nccl, BatchesAreSortedByTag) {
  run_nccl(2, {.timeout_s = 30, .check = true}, [](const auto& comm) {
    const ExecCtx ctx = context();
    std::vector<Transfer> transfers;
    for (std::uint32_t tag = 0; tag < 4; ++tag) {
      const std::uint32_t t = comm->rank() == 0 ? tag : 3 - tag;
      const auto kind = comm->rank() == 0 ? Transfer::Kind::send : Transfer::Kind::recv;
      transfers.push_back(
          {kind, tensor_of(ctx, DType::i32, {1.0 * t * (1 - comm->rank())}), 1 - comm->rank(), t});
    }
    finish(comm->exchange(ctx, transfers), ctx);
    for (const Transfer& transfer : transfers) EXPECT_EQ(read_values(transfer.tensor)[0], transfer.tag);
  });
}

TEST_F(Nccl, CheckingFindsReceivesInAnotherOrder) {
  std::atomic<int> told{0};
  run_nccl(2, {.timeout_s = 20, .check = true}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor a = tensor_of(ctx, DType::f32, {1.0}), b = tensor_of(ctx, DType::f32, {2.0});
    const std::string message = message_of<CommunicationError>([&] {
      if (comm->rank() == 0) {
        comm->send(ctx, a, 1, 5);
        comm->send(ctx, b, 1, 6);
        ++told;
        while (comm->failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        comm->barrier(ctx);
      } else {
        const Pending second = comm->recv(ctx, b, 0, 6), first = comm->recv(ctx, a, 0, 5);
        second.wait(ctx);
      }
    });
    EXPECT_NE(message.find("tag 5"), std::string::npos) << message;
    EXPECT_NE(message.find("tag 6"), std::string::npos) << message;
    EXPECT_NE(message.find("nccl_test.cpp"), std::string::npos) << message;
  });
}

/// NCCL cannot see that ranks call different things; the deadline's report does.
TEST_F(Nccl, DeadlineNamesCallsThatDoNotFit) {
  run_nccl(3, {.timeout_s = 1}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor x = tensor_of(ctx, DType::f32, marks(0, 0, 6));
    const std::string message = message_of<CommunicationError>(
        [&] { finish(comm->rank() == 1 ? comm->broadcast(ctx, x, 0) : comm->all_reduce(ctx, x), ctx); });
    EXPECT_NE(message.find("broadcast"), std::string::npos) << message;
    EXPECT_NE(message.find("all_reduce"), std::string::npos) << message;
    EXPECT_EQ(comm->failure().find("connection"), std::string::npos) << comm->failure();
  });
}

/// What nobody waits for keeps its memory until it is over.
TEST_F(Nccl, DroppedOperationsKeepTheirTensors) {
  run_nccl(3, {.timeout_s = 30}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor gathered = Tensor::empty(ctx, {3 * 1000}, DType::f32);
    if (comm->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const void* used = nullptr;
    {
      const Tensor own = tensor_of(ctx, DType::f32, marks(comm->rank(), 0, 1000));
      used = own.raw();
      comm->all_gather(ctx, own, gathered);
    }
    const Tensor other = tensor_of(ctx, DType::f32, std::vector<double>(1000, -1.0));
    if (comm->rank() > 0) {
      EXPECT_NE(other.raw(), used);
    }
    const Tensor last = tensor_of(ctx, DType::f32, {1.0});
    comm->all_reduce(ctx, last).wait(ctx);  // later on the same lane
    for (int r = 0; r < 3; ++r) EXPECT_EQ(read_values(gathered.narrow(0, 1000 * r, 1000)), marks(r, 0, 1000));
  });
}

TEST_F(Nccl, TensorsOfTheHostGoOverTheHost) {
  run_nccl(3, {.timeout_s = 30, .check = true}, [](const auto& comm) {
    const ExecCtx gpu = context(), cpu = ExecCtx::cpu(1);
    const Tensor x = tensor_of(cpu, DType::f32, {1.0}), y = tensor_of(gpu, DType::f32, {2.0});
    comm->all_reduce(gpu, x).wait(gpu);
    comm->all_reduce(gpu, y).wait(gpu);
    EXPECT_EQ(read_values(x)[0], 3.0);
    EXPECT_EQ(read_values(y)[0], 6.0);
    const std::string mixed =
        message_of<InvalidArgument>([&] { comm->all_gather(gpu, y, Tensor::empty(cpu, {3}, DType::f32)); });
    EXPECT_NE(mixed.find("a tensor is on cpu"), std::string::npos) << mixed;
    const std::string stream = message_of<InvalidArgument>([&] { comm->all_reduce(cpu, y); });
    EXPECT_NE(stream.find("the stream on cpu"), std::string::npos) << stream;
  });
}

/// The order of a stream holds for what is communicated: no host waits anywhere.
TEST_F(Nccl, LongChainsWithoutWaitingOnTheHost) {
  run_nccl(3, {.timeout_s = 30}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const auto pair = comm->split(comm->rank() == 2 ? -1 : 0, 0, "pair");
    const Tensor x = tensor_of(ctx, DType::f64, {1.0}), y = Tensor::empty(ctx, {1}, DType::f64);
    for (int i = 0; i < 20; ++i) {
      comm->all_reduce(ctx, x).wait(ctx);
      ctx.stream->copy(y.raw(), x.raw(), x.nbytes());
      if (pair) pair->all_reduce(ctx, y).wait(ctx);
      comm->broadcast(ctx, y, 0).wait(ctx);
      ctx.stream->copy(x.raw(), y.raw(), x.nbytes());
    }
    EXPECT_EQ(read_values(x)[0], std::pow(6.0, 20));
  });
}

/// Groups are cut out of their parent, whatever is under way there: members in the order of their keys,
/// groups of one, ranks in no group, groups of groups.
TEST_F(Nccl, GroupsAreSplitOffTheirParent) {
  run_nccl(3, {.timeout_s = 30}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int rank = comm->rank();
    const Tensor busy = tensor_of(ctx, DType::f32, marks(rank, 0, 100000));
    comm->all_reduce(ctx, busy);
    const auto backwards = comm->split(7, -rank, "backwards");
    EXPECT_EQ(backwards->rank(), 2 - rank);
    const Tensor x = tensor_of(ctx, DType::f32, {10.0 + rank});
    backwards->broadcast(ctx, x, 0).wait(ctx);
    EXPECT_EQ(read_values(x)[0], 12.0);
    const auto mine = comm->split(rank == 1 ? 1 : 0, 0, "outer or middle");  // ranks 0 and 2; rank 1 alone
    EXPECT_EQ(mine->size(), rank == 1 ? 1 : 2);
    const auto inner = backwards->split(rank == 0 ? -1 : 0, 0, "inner");  // ranks 2 and 1
    EXPECT_EQ(inner == nullptr, rank == 0);
    for (const auto& group : {mine, inner}) {
      if (!group) continue;
      const Tensor one = tensor_of(ctx, DType::f32, {1.0});
      group->all_reduce(ctx, one).wait(ctx);
      EXPECT_EQ(read_values(one)[0], group->size()) << group->name();
    }
  });
}

/// Rank 1 waits for rank 2 to connect with it, in a group of a group, which never happens.
TEST_F(Nccl, AnAbortEndsTheWaitForAConnection) {
  const auto begin = std::chrono::steady_clock::now();
  run_nccl(3, {.timeout_s = 60}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const auto deeper = comm->split(comm->rank() == 0 ? 0 : 1, 0, "part")->split(0, 0, "deeper");
    comm->barrier(ctx);  // nobody is in split any more
    if (comm->rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      return comm->abort("rank 0 gave up");
    }
    const std::string message = message_of<CommunicationError>([&] {
      if (comm->rank() == 1) finish(deeper->recv(ctx, tensor_of(ctx, DType::f32, {0.0}), 1, 1), ctx);
      while (comm->failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      comm->barrier(ctx);
    });
    EXPECT_EQ(message.find("rank 0 gave up"), 0u) << message;
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "waited for the deadline";
}

/// A rank at work comes late to a collective and to a message that the others' streams wait for already.
TEST_F(Nccl, HeartbeatsRenewWhatStreamsWaitFor) {
  run_nccl(3, {.timeout_s = 1.5}, [](const auto& comm) {
    const ExecCtx ctx = context();
    if (comm->rank() < 2) comm->connect_to(std::vector{1 - comm->rank()});
    for (int i = 0; comm->rank() == 0 && i < 30; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      heartbeat(*comm);
    }
    const Tensor x = tensor_of(ctx, DType::f32, {1.0}), y = tensor_of(ctx, DType::f32, {0.0});
    if (comm->rank() == 1) comm->recv(ctx, y, 0, 0).wait(ctx);
    if (comm->rank() == 0) comm->send(ctx, x, 1, 0).wait(ctx);
    const Tensor sum = tensor_of(ctx, DType::f32, {1.0});
    finish(comm->all_reduce(ctx, sum), ctx);
    EXPECT_EQ(read_values(sum)[0], 3);
    if (comm->rank() == 1) {
      EXPECT_EQ(read_values(y)[0], 1);
    }
  });
}

TEST_F(Nccl, AGroupThatFailedCannotBeSplit) {
  run_nccl(3, {.timeout_s = 20}, [](const auto& comm) {
    if (comm->rank() == 0) comm->abort("somebody pulled a plug");
    while (comm->failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string message = message_of<CommunicationError>([&] { comm->split(0, 0, "half"); });
    EXPECT_EQ(message.find("somebody pulled a plug"), 0u) << message;
    EXPECT_NE(message.find("split"), std::string::npos) << message;
  });
}

TEST(NcclGroupOfOne, Copies) {
  if (cuda_devices().count == 0) GTEST_SKIP() << cuda_devices().why_none;
  const auto comm = make_nccl_communicator(make_self_communicator(), {DeviceType::cuda, 0});
  const ExecCtx ctx = ExecCtx::cuda(0, 1);
  const Tensor x = tensor_of(ctx, DType::f32, marks(0, 0, 9)), y = Tensor::empty(ctx, {9}, DType::f32);
  comm->all_gather(ctx, x, y).wait(ctx);
  EXPECT_EQ(read_values(y), marks(0, 0, 9));
  EXPECT_EQ(comm->split(0, 0, "again")->name(), "again");
  comm->barrier(ctx);
}

TEST(NcclAbsent, IsRefusedByName) {
  if (cuda_devices().count > 0) GTEST_SKIP() << "this build has CUDA";
  EXPECT_THROW(make_nccl_communicator(make_self_communicator(), {DeviceType::cuda, 0}), Error);
}

}  // namespace
}  // namespace tessera::test
