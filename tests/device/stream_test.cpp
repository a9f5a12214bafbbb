#include "tessera/device/stream.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {
namespace {

/// Work that runs only once `open` was called, so that a test decides what is finished when.
class Gate {
 public:
  void open() { promise_.set_value(); }
  auto work() const {
    return [future = future_] { future.wait(); };
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

class EachMode : public testing::TestWithParam<Stream::Mode> {};
INSTANTIATE_TEST_SUITE_P(Modes, EachMode, testing::Values(Stream::Mode::immediate, Stream::Mode::queued));

TEST_P(EachMode, RunsWorkInOrder) {
  Stream stream(1, GetParam());
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) stream.launch([&order, i] { order.push_back(i); });
  stream.synchronize();
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST_P(EachMode, AnEventIsDoneAfterTheWorkBeforeIt) {
  Stream stream(1, GetParam());
  std::atomic<int> ran = 0;
  Event event;
  EXPECT_TRUE(event.done());  // never recorded
  event.synchronize();
  stream.launch([&] { ran = 1; });
  stream.record(event);
  event.synchronize();
  EXPECT_TRUE(event.done());
  EXPECT_EQ(ran, 1);
}

TEST_P(EachMode, SynchronizeWithoutWorkReturns) {
  Stream stream(3, GetParam());
  stream.synchronize();
  EXPECT_EQ(stream.threads(), 3);
  EXPECT_TRUE(stream.device().is_cpu());
}

TEST_P(EachMode, ErrorsReachTheCallerAndTheStreamGoesOn) {
  Stream stream(1, GetParam());
  EXPECT_THROW(
      {
        stream.launch([] { throw std::runtime_error("first"); });
        stream.synchronize();
      },
      std::runtime_error);
  int ran = 0;
  stream.launch([&] { ran = 1; });
  stream.synchronize();
  EXPECT_EQ(ran, 1);
}

TEST(Stream, NeedsAThread) {
  EXPECT_THROW(Stream(0), InvalidArgument);
  EXPECT_THROW(Stream(-2, Stream::Mode::queued), InvalidArgument);
}

TEST(Stream, ImmediateWorkRunsInTheCallersThread) {
  Stream stream(1);
  std::thread::id where;
  stream.launch([&] { where = std::this_thread::get_id(); });
  EXPECT_EQ(where, std::this_thread::get_id());
}

TEST(Stream, QueuedWorkRunsBesideTheCaller) {
  Stream stream(1, Stream::Mode::queued);
  Gate gate;
  Event event;
  stream.launch(gate.work());
  stream.record(event);
  EXPECT_FALSE(event.done());
  gate.open();
  event.synchronize();
  EXPECT_TRUE(event.done());
}

TEST(Stream, LaterWorkIsSkippedAfterAnErrorUntilItIsReported) {
  Stream stream(1, Stream::Mode::queued);
  std::atomic<int> ran = 0;
  stream.launch([] { throw InvalidArgument("broken"); });
  stream.launch([&] { ++ran; });
  stream.launch([] { throw std::runtime_error("second"); });
  EXPECT_THROW(stream.synchronize(), InvalidArgument);  // the first error, with its type
  EXPECT_EQ(ran, 0);
  stream.synchronize();  // reported once
  stream.launch([&] { ++ran; });
  stream.synchronize();
  EXPECT_EQ(ran, 1);
}

TEST(Stream, NobodyWaitsForeverOnAStreamThatFailed) {
  Stream failing(1, Stream::Mode::queued), waiting(1, Stream::Mode::queued);
  Event event;
  failing.launch([] { throw std::runtime_error("broken"); });
  failing.record(event);
  std::atomic<bool> ran = false;
  waiting.wait(event);
  waiting.launch([&] { ran = true; });
  event.synchronize();
  waiting.synchronize();
  EXPECT_TRUE(ran);
  EXPECT_THROW(failing.synchronize(), std::runtime_error);
}

TEST(Stream, QueuedStreamsWaitForEachOther) {
  Stream first(1, Stream::Mode::queued), second(1, Stream::Mode::queued);
  std::vector<int> order;  // every access is ordered by the events
  Gate gate;
  first.launch(gate.work());
  Event ready, back;
  for (int i = 0; i < 20; ++i) {
    first.launch([&order, i] { order.push_back(2 * i); });
    first.record(ready);
    second.wait(ready);
    second.launch([&order, i] { order.push_back(2 * i + 1); });
    second.record(back);
    first.wait(back);
  }
  EXPECT_FALSE(back.done());
  gate.open();
  first.synchronize();
  second.synchronize();
  ASSERT_EQ(order.size(), 40u);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(Stream, AnImmediateStreamWaitsForAQueuedOne) {
  Stream compute(1), copy(1, Stream::Mode::queued);
  std::atomic<int> value = 0;
  Event event;
  copy.launch([&] {
    std::this_thread::yield();
    value = 7;
  });
  copy.record(event);
  compute.wait(event);
  int seen = 0;
  compute.launch([&] { seen = value; });
  EXPECT_EQ(seen, 7);
}

TEST(Event, RecordingAgainMovesThePoint) {
  Stream queued(1, Stream::Mode::queued), immediate(1);
  Gate gate;
  Event event;
  queued.launch(gate.work());
  queued.record(event);
  const Event copy = event;
  EXPECT_FALSE(event.done());
  immediate.record(event);  // everything before this point has run
  EXPECT_TRUE(event.done());
  EXPECT_FALSE(copy.done());  // the copy still means the earlier point
  gate.open();
  copy.synchronize();
  EXPECT_TRUE(copy.done());
}

TEST(Stream, FinishesItsWorkBeforeItGoesAway) {
  std::atomic<int> ran = 0;
  Event event;
  {
    Stream stream(1, Stream::Mode::queued);
    for (int i = 0; i < 50; ++i) stream.launch([&] { ++ran; });
    stream.record(event);
  }
  EXPECT_EQ(ran, 50);
  EXPECT_TRUE(event.done());
}

TEST(Stream, WorkIsLetGoWhenItHasRun) {
  Stream stream(1, Stream::Mode::queued);
  auto held = std::make_shared<int>(1);
  stream.launch([held] {});
  stream.synchronize();
  EXPECT_EQ(held.use_count(), 1);
}

TEST(ExecCtx, TakesThreadsAndSeed) {
  const ExecCtx ctx = ExecCtx::cpu(2, 99);
  EXPECT_EQ(ctx.stream->threads(), 2);
  EXPECT_EQ(ctx.seed, 99u);
  EXPECT_TRUE(ctx.device().is_cpu());
  EXPECT_GE(ExecCtx::cpu().stream->threads(), 1);
}

TEST(ExecCtx, ContextsShareNothing) {
  const ExecCtx a = ExecCtx::cpu(1), b = ExecCtx::cpu(1);
  void* memory = a.allocator->allocate(100);
  EXPECT_GT(a.allocator->stats().used_bytes, 0u);
  EXPECT_EQ(b.allocator->stats().used_bytes, 0u);
  EXPECT_NE(a.stream, b.stream);
  a.allocator->release(memory);
}

}  // namespace
}  // namespace tessera
