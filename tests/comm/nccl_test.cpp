#include <atomic>
#include <deque>
#include <map>
#include <thread>

#include "tessera/comm/heartbeat.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/device/graph.hpp"
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

/// Operations of a graph that is launched again are operations like others: counted, numbered, told to the
/// flight recorder, watched.
TEST_F(Nccl, AGraphCallsThemAgain) {
  run_nccl(3, {.timeout_s = 30}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const auto flight = std::make_shared<FlightRecorder>();
    comm->set_flight(flight);
    const int rank = comm->rank(), next = (rank + 1) % 3, before = (rank + 2) % 3;
    const Tensor x = Tensor::empty(ctx, {64}, DType::f32), from = Tensor::empty(ctx, {64}, DType::f32),
                 sum = Tensor::empty(ctx, {64}, DType::f32), none = Tensor::empty(ctx, {0}, DType::f32);
    std::vector<Tensor> given;
    for (int i = 0; i < 6; ++i) given.push_back(tensor_of(ctx, DType::f32, marks(rank, i, 64)));
    auto token = std::make_shared<int>();
    const std::weak_ptr<int> kept = token;  // by recordings
    const auto work = [&] {
      ctx.stream->when_relaunched([token](const Event&) {});
      ctx.stream->copy(sum.raw(), x.raw(), x.nbytes());
      comm->all_reduce(ctx, sum).wait(ctx);
      comm->exchange(ctx, {{Transfer::Kind::send, x, next, 1},
                           {Transfer::Kind::recv, from, before, 1},
                           {Transfer::Kind::send, none, next, 2},
                           {Transfer::Kind::recv, none, before, 2}})
          .wait(ctx);
      comm->exchange(ctx, {{Transfer::Kind::send, none, next, 3}, {Transfer::Kind::recv, none, before, 3}})
          .wait(ctx);
    };
    auto graph = std::make_unique<StreamGraph>(ctx.stream);
    const CommStats first = comm->stats();
    for (int i = 0; i < 6; ++i) {
      ctx.stream->copy(x.raw(), given[static_cast<std::size_t>(i)].raw(), x.nbytes());
      if (i < 3) {
        graph->run("step", work, {.lasting = true});
      } else {
        ASSERT_TRUE(graph->replay("step"));
      }
      std::vector<double> expected(64);
      for (int r = 0; r < 3; ++r) {
        const auto of = marks(r, i, 64);
        for (std::size_t k = 0; k < 64; ++k) expected[k] += of[k];
      }
      EXPECT_EQ(read_values(sum), expected) << i;
      EXPECT_EQ(read_values(from), marks(before, i, 64)) << i;
      const CommStats now = comm->stats();
      EXPECT_EQ(now.operations - first.operations, 3u * static_cast<std::uint64_t>(i + 1));
      EXPECT_EQ(now.bytes_sent % static_cast<std::uint64_t>(i + 1), 0u);
    }
    EXPECT_EQ(graph->stats().replayed, 3u);
    ctx.stream->synchronize();
    std::vector<std::uint64_t> sums, exchanges;
    const auto all_done = [&] {
      sums.clear();
      exchanges.clear();
      bool done = true;
      for (const FlightRecord& record : flight->snapshot().records) {
        if (record.what.kind != FlightOperation::Kind::communication) continue;
        const bool reduces = std::string(record.what.name) == "all_reduce";
        (reduces ? sums : exchanges).push_back(record.what.sequence);
        done = done && record.state == FlightRecord::State::done;
      }
      return done;
    };
    while (!all_done()) std::this_thread::yield();  // the watchdog comes by
    ASSERT_EQ(sums.size(), 6u);
    ASSERT_EQ(exchanges.size(), 12u);
    for (std::size_t i = 1; i < 6; ++i) EXPECT_EQ(sums[i], sums[0] + i);
    for (std::size_t i = 1; i < 12; ++i) EXPECT_EQ(exchanges[i], exchanges[0] + i);
    comm->set_flight(nullptr);
    graph.reset();
    token.reset();
    for (int i = 0; i < 2000 && !kept.expired(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(kept.expired()) << "what was recorded lasts longer than the graph";
  });
}

/// A deadline holds for what is in a graph too, the first launch and later ones.
TEST_F(Nccl, AGraphHasADeadline) {
  for (const int launches : {1, 3}) {
    std::atomic<int> told{0};
    run_nccl(2, {.timeout_s = 1}, [&](const auto& comm) {
      const ExecCtx ctx = context();
      const Tensor x = tensor_of(ctx, DType::f32, {1.0, 2.0});
      {
        StreamGraph graph(ctx.stream);
        const auto work = [&] { comm->all_reduce(ctx, x).wait(ctx); };
        graph.run("step", work);
        for (int i = 0; i < launches; ++i) {
          if (comm->rank() == 1 && i + 1 == launches) break;  // one launch fewer
          if (i == 0) {
            graph.run("step", work, {.lasting = true});
          } else {
            ASSERT_TRUE(graph.replay("step"));
          }
        }
        while (comm->failure().empty()) std::this_thread::yield();
      }
      const std::string message = comm->failure();
      EXPECT_NE(message.find(detail::concat("all_reduce ", launches)), std::string::npos) << message;
      EXPECT_NE(message.find("in a CUDA graph, did not end within 1 s"), std::string::npos) << message;
      ++told;
    });
    EXPECT_EQ(told, 2);
  }
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
