/// What only the local communicator promises: delays, and starting that never waits.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <latch>
#include <map>

#include "tests/comm/conformance.hpp"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

TEST(LocalCommunicator, DelayIsHiddenByWorkAndPaidByWaits) {
  run_local(2, {.timeout_s = 60, .delay_s = 0.15}, [](const auto& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const Tensor x = tensor_of(ctx, DType::f32, {1.0}), y = tensor_of(ctx, DType::f32, {1.0});
    comm->barrier(ctx);
    comm->reset_stats();
    const auto begin = Clock::now();
    const Pending first = comm->all_reduce(ctx, x), second = comm->all_reduce(ctx, y);
    EXPECT_LT(seconds_since(begin), 0.12);  // starting does not wait
    EXPECT_FALSE(first.done());
    std::this_thread::sleep_for(std::chrono::milliseconds(220));
    EXPECT_TRUE(first.done());
    first.wait(ctx);
    second.wait(ctx);
    EXPECT_LT(comm->stats().wait_s, 0.05);  // hidden, and the two ran side by side

    const auto again = Clock::now();
    comm->all_reduce(ctx, x).wait(ctx);
    EXPECT_GE(seconds_since(again), 0.14);
    EXPECT_GE(comm->stats().wait_s, 0.14);
    EXPECT_EQ(read_values(x)[0], 4.0);
  });
}

TEST(LocalCommunicator, DelayOfMessages) {
  run_local(2, {.timeout_s = 60, .delay_s = 0.05}, [](const auto& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const Tensor x = tensor_of(ctx, DType::f32, {static_cast<double>(comm->rank())});
    const Tensor y = Tensor::empty(ctx, {1}, DType::f32);
    const auto begin = Clock::now();
    const Pending both = comm->exchange(ctx, {{Transfer::Kind::send, x, 1 - comm->rank(), 0},
                                              {Transfer::Kind::recv, y, 1 - comm->rank(), 0}});
    both.wait(ctx);
    EXPECT_GE(seconds_since(begin), 0.045);
    EXPECT_EQ(read_values(y)[0], 1.0 - comm->rank());
  });
}

TEST(LocalCommunicator, OneThreadMayStartForTheOthers) {
  const auto world = make_local_communicators(3);
  const ExecCtx ctx = ExecCtx::cpu(1, 1);
  std::vector<Tensor> tensors;
  std::vector<Pending> pending;
  for (const auto& comm : world) {
    tensors.push_back(tensor_of(ctx, DType::i32, {1.0 + comm->rank()}));
    pending.push_back(comm->all_reduce(ctx, tensors.back()));
  }
  for (const Pending& p : pending) p.wait(ctx);
  for (const Tensor& x : tensors) EXPECT_EQ(read_values(x)[0], 6.0);
}

/// Work launched on a stream with a thread of its own comes before the operation.
TEST(LocalCommunicator, FollowsTheWorkOfAQueuedStream) {
  run_local(3, [](const auto& comm) {
    ExecCtx ctx = ExecCtx::cpu(1, 1);
    ctx.stream = std::make_shared<Stream>(1, Stream::Mode::queued);
    const Tensor x = tensor_of(ctx, DType::f32, {0.0}), y = tensor_of(ctx, DType::f32, {0.0});
    std::promise<void> started;
    ctx.stream->launch([x, y, &started] {
      started.get_future().wait_for(std::chrono::seconds(10));
      write_values(x, {2.0});
      write_values(y, {5.0});
    });
    const Pending sum = comm->all_reduce(ctx, x);
    const int right = (comm->rank() + 1) % 3, left = (comm->rank() + 2) % 3;
    const Tensor z = Tensor::empty(ctx, {1}, DType::f32);
    const Pending ring =
        comm->exchange(ctx, {{Transfer::Kind::send, y, right, 0}, {Transfer::Kind::recv, z, left, 0}});
    EXPECT_FALSE(sum.done());
    EXPECT_FALSE(ring.done());
    started.set_value();
    ring.wait(ctx);
    sum.wait(ctx);
    EXPECT_EQ(read_values(x)[0], 6.0);
    EXPECT_EQ(read_values(z)[0], 5.0);
    ctx.stream->synchronize();
  });
}

TEST(LocalCommunicator, PendingOutlivesItsCommunicator) {
  const ExecCtx ctx = ExecCtx::cpu(1, 1);
  auto world = make_local_communicators(2);
  const Tensor x = tensor_of(ctx, DType::f32, {1.0}), y = tensor_of(ctx, DType::f32, {2.0});
  const Pending first = world[0]->all_reduce(ctx, x);
  world[0].reset();
  const Pending second = world[1]->all_reduce(ctx, y);
  world.clear();
  first.wait(ctx);
  second.wait(ctx);
  EXPECT_EQ(read_values(x)[0], 3.0);
  EXPECT_EQ(read_values(y)[0], 3.0);
}

TEST(LocalCommunicator, MessageThatDoesNotFitNamesBothEnds) {
  const auto begin = Clock::now();
  for (const bool receiver_first : {false, true}) {
    std::map<int, std::string> messages;
    std::mutex mutex;
    std::latch posted(1), ended(2);
    int send_line = 0, recv_line = 0;
    run_local(2, {.timeout_s = 20}, [&](const auto& comm) {
      const ExecCtx ctx = ExecCtx::cpu(1, 1);
      const bool first = (comm->rank() == 1) == receiver_first;
      if (!first) posted.wait();
      const std::string message = message_of<CommunicationError>([&] {
        Pending pending;
        if (comm->rank() == 0) {
          send_line = __LINE__ + 1;
          pending = comm->send(ctx, Tensor::empty(ctx, {3}, DType::f32), 1, 8);
        } else {
          recv_line = __LINE__ + 1;
          pending = comm->recv(ctx, Tensor::empty(ctx, {4}, DType::f32), 0, 8);
        }
        if (first) posted.count_down();
        pending.wait(ctx);
        ended.arrive_and_wait();  // a buffered send is over before anybody can see that it does not fit
        comm->barrier(ctx);
      });
      if (ended.try_wait() == false) ended.count_down();
      const std::lock_guard lock(mutex);
      messages[comm->rank()] = message;
    });
    for (const auto& [rank, message] : messages) {
      EXPECT_NE(message.find("local_test.cpp:" + std::to_string(send_line)), std::string::npos) << message;
      EXPECT_NE(message.find("local_test.cpp:" + std::to_string(recv_line)), std::string::npos) << message;
      EXPECT_NE(message.find("tag 8"), std::string::npos) << message;
    }
  }
  EXPECT_LT(seconds_since(begin), 10.0);  // nobody waited for the deadline
}

TEST(LocalCommunicator, LateRankLearnsThatItWasGivenUp) {
  std::latch gave_up(1);
  run_local(2, {.timeout_s = 0.1}, [&](const auto& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    if (comm->rank() == 1) gave_up.wait();
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    const std::string message = message_of<CommunicationError>([&] { comm->all_reduce(ctx, x).wait(ctx); });
    EXPECT_NE(message.find("rank 1 did not come within 0.1 s"), std::string::npos) << message;
    if (comm->rank() == 0) gave_up.count_down();
  });
}

/// Many groups, collectives and messages at once: something for a thread checker to look at.
TEST(LocalCommunicator, ManyGroupsAtOnce) {
  run_local(4, [](const auto& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const int rank = comm->rank();
    const auto row = comm->split(rank / 2, rank, "row"), column = comm->split(rank % 2, rank, "column");
    for (int step = 0; step < 100; ++step) {
      const Tensor a = tensor_of(ctx, DType::f32, std::vector<double>(50, rank));
      const Tensor b = tensor_of(ctx, DType::bf16, std::vector<double>(50, rank));
      const Tensor c = Tensor::empty(ctx, {50}, DType::f32);
      const Pending p = row->all_reduce(ctx, a), q = column->all_reduce(ctx, b);
      const Tensor sent = tensor_of(ctx, DType::f32, std::vector<double>(50, rank + step));
      const Pending r = comm->exchange(ctx, {{Transfer::Kind::recv, c, (rank + 3) % 4, 5},
                                             {Transfer::Kind::send, sent, (rank + 1) % 4, 5}});
      r.wait(ctx);
      q.wait(ctx);
      p.wait(ctx);
      ASSERT_EQ(read_values(a)[49], rank / 2 * 4 + 1);
      ASSERT_EQ(read_values(b)[0], rank % 2 * 2 + 2);
      ASSERT_EQ(read_values(c)[7], (rank + 3) % 4 + step);
    }
  });
}

}  // namespace
}  // namespace tessera::test
