#include <chrono>
#include <latch>
#include <map>
#include <thread>

#include "tessera/comm/heartbeat.hpp"
#include "tests/comm/conformance.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {

INSTANTIATE_TEST_SUITE_P(Local, ConformanceFaults,
                         testing::Values(Backend{"local", 5,
                                                 [](int n, const CommOptions& options,
                                                    const RankFunction& f) { run_local(n, options, f); }}),
                         backend_name);

namespace {

using Clock = std::chrono::steady_clock;
using Call = std::function<void(Communicator&, const ExecCtx&)>;

Tensor ones(const ExecCtx& ctx, std::int64_t count, DType dtype = DType::f32) {
  return tensor_of(ctx, dtype, std::vector<double>(static_cast<std::size_t>(count), 1.0));
}

/// The last of `size` ranks never makes the call; returns what the others were told.
std::map<int, std::string> without_last_rank(const Backend& backend, int size, const Call& call) {
  std::map<int, std::string> messages;
  std::mutex mutex;
  std::latch failed(size - 1);
  backend.run(size, {.timeout_s = 0.5}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    if (comm->rank() == size - 1) return failed.wait();
    const std::string message = message_of<CommunicationError>([&] { call(*comm, ctx); });
    {
      const std::lock_guard lock(mutex);
      messages[comm->rank()] = message;
    }
    failed.arrive_and_wait();
  });
  return messages;
}

TEST_P(ConformanceFaults, DeadlineNamesOperationGroupAndWhoIsMissing) {
  const auto begin = Clock::now();
  const std::map<std::string, Call> calls{
      {"all_reduce", [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 3)), ctx); }},
      {"all_gather",
       [](auto& comm, auto& ctx) { finish(comm.all_gather(ctx, ones(ctx, 1), ones(ctx, 3)), ctx); }},
      {"barrier", [](auto& comm, auto& ctx) { comm.barrier(ctx); }},
      {"split", [](auto& comm, auto&) { comm.split(0, 0, "part"); }},
      {"exchange", [](auto& comm, auto& ctx) { finish(comm.recv(ctx, ones(ctx, 1), 2), ctx); }}};
  for (const auto& [operation, call] : calls) {
    const auto messages = without_last_rank(GetParam(), 3, call);
    ASSERT_EQ(messages.size(), 2u);
    for (const auto& [rank, message] : messages) {
      EXPECT_TRUE(contains(message, operation)) << message;
      EXPECT_TRUE(contains(message, "world")) << message;
      EXPECT_TRUE(contains(message, "rank 2")) << message;
      EXPECT_FALSE(contains(message, "rank 1 did")) << message;
    }
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
}

/// A rank at work renews the deadlines of those that wait for it or for who waits for it, in whatever group.
TEST_P(ConformanceFaults, HeartbeatsRenewDeadlinesInEveryGroup) {
  GetParam().run(3, {.timeout_s = 1.5}, [&](const auto& comm) {
    const ExecCtx host = ExecCtx::cpu(1, 1);
    const auto pair = comm->split(comm->rank() == 2 ? 1 : 0, comm->rank(), "pair");
    for (int i = 0; comm->rank() == 0 && i < 30; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      heartbeat(*comm);
    }
    pair->barrier(host);
    comm->barrier(host);
  });
}

/// The deadline counts from the last sign of work, not from the beginning of the wait.
TEST_P(ConformanceFaults, WorkThatHangsRenewsNothing) {
  std::string message;
  double waited_s = 0;
  std::latch failed(2);
  GetParam().run(2, {.timeout_s = 1}, [&](const auto& comm) {
    const ExecCtx host = ExecCtx::cpu(1, 1);
    const auto begin = Clock::now();
    for (int i = 0; comm->rank() == 0 && i < 10; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      heartbeat(*comm);
    }
    if (comm->rank() == 1) {
      message = message_of<CommunicationError>([&] { comm->barrier(host); });
      waited_s = std::chrono::duration<double>(Clock::now() - begin).count();
    }
    failed.arrive_and_wait();
  });
  EXPECT_TRUE(contains(message, "barrier") && contains(message, "rank 0")) << message;
  EXPECT_GE(waited_s, 1.5);
}

/// In a group made by split, ranks are named as in the world.
TEST_P(ConformanceFaults, DeadlineInASplitGroup) {
  std::latch failed(1);
  std::string message;
  GetParam().run(4, {.timeout_s = 0.5}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const auto pair = comm->split(comm->rank() % 2, comm->rank(), "odd ones");
    if (comm->rank() == 1) {
      message = message_of<CommunicationError>([&] { finish(pair->all_reduce(ctx, ones(ctx, 2)), ctx); });
      failed.count_down();
    }
    failed.wait();
  });
  EXPECT_TRUE(contains(message, "odd ones")) << message;
  EXPECT_TRUE(contains(message, "rank 3")) << message;
}

struct Mismatch {
  const char* what;
  int line_of_first, line_of_others;
  Call first, others;
};

std::vector<Mismatch> mismatches() {
  // Each call stands on a line of its own, given beside it.
  std::vector<Mismatch> all;
  const auto add = [&](const char* what, int line_a, Call a, int line_b, Call b) {
    all.push_back({what, line_a, line_b, std::move(a), std::move(b)});
  };
  // clang-format off
  add("operation",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4)), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.broadcast(ctx, ones(ctx, 4), 0), ctx); });
  add("count",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4)), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 5)), ctx); });
  add("dtype",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4)), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4, DType::i32)), ctx); });
  add("reduction",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4)), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4), ReduceOp::max), ctx); });
  add("root",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.broadcast(ctx, ones(ctx, 4), 0), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.broadcast(ctx, ones(ctx, 4), 1), ctx); });
  add("blocks",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_gather(ctx, ones(ctx, 2), ones(ctx, 6), Counts{2, 2, 2}), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_gather(ctx, ones(ctx, 2), ones(ctx, 5), Counts{1, 2, 2}), ctx); });
  add("blocks of reduce_scatter",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.reduce_scatter(ctx, ones(ctx, 6), ones(ctx, 2), Counts{2, 2, 2}), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.reduce_scatter(ctx, ones(ctx, 5), ones(ctx, 2), Counts{1, 2, 2}), ctx); });
  add("all_to_all",
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_to_all(ctx, ones(ctx, 3), ones(ctx, 3), Counts{1, 1, 1}, Counts{1, 1, 1}), ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_to_all(ctx, ones(ctx, 4), ones(ctx, 3), Counts{2, 1, 1}, Counts{1, 1, 1}), ctx); });
  add("barrier",
      __LINE__, [](auto& comm, auto& ctx) { comm.barrier(ctx); },
      __LINE__, [](auto& comm, auto& ctx) { finish(comm.all_reduce(ctx, ones(ctx, 4)), ctx); });
  // clang-format on
  return all;
}

TEST_P(ConformanceFaults, MismatchNamesBothCallers) {
  for (const Mismatch& mismatch : mismatches()) {
    std::atomic<int> told{0};
    GetParam().run(3, {.timeout_s = 20, .check = true}, [&](const auto& comm) {
      const ExecCtx ctx = context();
      finish(comm->all_reduce(ctx, ones(ctx, 2)), ctx);
      const Call& call = comm->rank() == 0 ? mismatch.first : mismatch.others;
      const std::string message = message_of<CommunicationError>([&] { call(*comm, ctx); });
      const std::string file = "conformance_faults_test.cpp:";
      EXPECT_TRUE(contains(message, file + std::to_string(mismatch.line_of_first)))
          << mismatch.what << ": " << message;
      EXPECT_TRUE(contains(message, file + std::to_string(mismatch.line_of_others)))
          << mismatch.what << ": " << message;
      EXPECT_TRUE(contains(message, "world")) << message;
      ++told;
      while (told < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // nobody leaves early
    });
  }
}

TEST_P(ConformanceFaults, CheckingLetsRightCallsPass) {
  GetParam().run(3, {.timeout_s = 20, .check = true}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    Tensor x = ones(ctx, 7);
    finish(comm->all_reduce(ctx, x), ctx);
    EXPECT_EQ(read_values(x), std::vector<double>(7, 3.0));
    finish(comm->broadcast(ctx, x, 2), ctx);
    Counts sent, received;
    for (int r = 0; r < n; ++r) {
      sent.push_back(rank + 2 * r);
      received.push_back(r + 2 * rank);
    }
    const Tensor in = ones(ctx, 3 * rank + 6), out = ones(ctx, 3 + 6 * rank);
    finish(comm->all_to_all(ctx, in, out, sent, received), ctx);
    const auto part = comm->split(rank == 0 ? 0 : 1, -rank, "part");
    part->barrier(ctx);
    if (rank == 0) finish(comm->send(ctx, x, 1), ctx);
    if (rank == 1) finish(comm->recv(ctx, x, 0), ctx);
    comm->barrier(ctx);
  });
}

TEST_P(ConformanceFaults, AbortEndsWaitsAndLaterCalls) {
  const auto begin = Clock::now();
  std::latch ended(3);
  GetParam().run(3, {.timeout_s = 60}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const auto expect_reason = [&](const auto& call) {
      const std::string message = message_of<CommunicationError>(call);
      EXPECT_TRUE(contains(message, "disk full on rank 0")) << comm->rank() << ": " << message;
    };
    comm->barrier(ctx);
    if (comm->rank() == 0) {
      const Pending mine = comm->all_reduce(ctx, ones(ctx, 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      comm->abort("disk full on rank 0");
      expect_reason([&] { finish(mine, ctx); });
    } else if (comm->rank() == 1) {
      expect_reason([&] { finish(comm->all_reduce(ctx, ones(ctx, 1)), ctx); });
    } else {
      expect_reason([&] { finish(comm->recv(ctx, ones(ctx, 1), 0), ctx); });
    }
    expect_reason([&] { finish(comm->all_reduce(ctx, ones(ctx, 1)), ctx); });
    expect_reason([&] { finish(comm->send(ctx, ones(ctx, 1), (comm->rank() + 1) % 3), ctx); });
    expect_reason([&] { comm->barrier(ctx); });
    comm->abort("a later reason does not count");
    expect_reason([&] { comm->split(0, 0, "part"); });
    ended.arrive_and_wait();
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

TEST_P(ConformanceFaults, AbortReachesGroupsMadeBySplit) {
  const auto begin = Clock::now();
  GetParam().run(3, {.timeout_s = 60}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const auto part = comm->split(comm->rank() == 0 ? 0 : 1, comm->rank(), "part");
    const auto deeper = part->split(0, 0, "deeper");
    comm->barrier(ctx);  // nobody is in split any more
    if (comm->rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      return comm->abort("rank 0 gave up");
    }
    // Ranks 1 and 2 wait for each other, for different things.
    const std::string message = message_of<CommunicationError>([&] {
      if (comm->rank() == 1) finish(deeper->recv(ctx, ones(ctx, 1), 1, 1), ctx);
      if (comm->rank() == 2) finish(deeper->recv(ctx, ones(ctx, 1), 0, 2), ctx);
    });
    EXPECT_TRUE(contains(message, "rank 0 gave up")) << message;
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

TEST_P(ConformanceFaults, FirstExceptionEndsAllRanks) {
  const auto begin = Clock::now();
  const std::string message = message_of<DataError>([&] {
    GetParam().run(4, {.timeout_s = 60}, [](const auto& comm) {
      const ExecCtx ctx = context();
      comm->barrier(ctx);
      if (comm->rank() == 3) throw DataError("file is damaged");
      comm->barrier(ctx);
    });
  });
  EXPECT_EQ(message, "file is damaged");
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace tessera::test
