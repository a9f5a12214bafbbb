#include "tessera/device/graph.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/device/trace.hpp"

namespace tessera {
namespace {

using Numbers = std::vector<int>;

TEST(StreamGraph, OnTheCpuWorkIsJustDone) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  StreamGraph graph(ctx.stream);
  int ran = 0;
  for (int turn = 0; turn < 3; ++turn) graph.run("step", [&] { ++ran; });
  EXPECT_EQ(ran, 3);
  EXPECT_EQ(graph.stats().plain, 3u);
  EXPECT_EQ(graph.stats().launched, 0u);
}

/// Device memory, and copies of numbers through it.
class StreamGraphOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const CudaDevices devices = cuda_devices(); devices.count == 0) GTEST_SKIP() << devices.why_none;
    ctx_ = ExecCtx::cuda();
    other_ = std::make_unique<Stream>(ctx_.device());
    graph_ = std::make_unique<StreamGraph>(ctx_.stream);
  }

  std::shared_ptr<void> device_memory(std::size_t count) {
    const auto allocator = ctx_.allocator;
    return {allocator->allocate(count * sizeof(int)),
            [allocator](void* memory) { allocator->release(memory); }};
  }
  std::shared_ptr<void> host_memory(std::size_t count) {
    return ctx_.allocator->host_memory(count * sizeof(int));
  }
  void upload(void* target, const Numbers& values) {
    ctx_.allocator->copy_from_host(target, values.data(), values.size() * sizeof(int));
  }
  Numbers download(const void* source, std::size_t count) {
    Numbers values(count);
    ctx_.allocator->copy_to_host(values.data(), source, count * sizeof(int));
    return values;
  }
  /// Keeps a stream at work for a while, so that who should wait for it and does not comes first.
  void delay(Stream& stream) {
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    const auto memory = device_memory(2 * kBytes / sizeof(int));
    auto* const half = static_cast<std::byte*>(memory.get());
    for (int i = 0; i < 50; ++i) stream.copy(half + kBytes, half, kBytes);
    delays_.push_back(memory);
  }
  static Numbers numbers(std::size_t count, int first) {
    Numbers values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
  }
  static Numbers read(const std::shared_ptr<void>& memory, std::size_t count) {
    const int* begin = static_cast<const int*>(memory.get());
    return {begin, begin + count};
  }

  ExecCtx ctx_;
  std::unique_ptr<Stream> other_;
  std::unique_ptr<StreamGraph> graph_;
  std::vector<std::shared_ptr<void>> delays_;
};

/// What changes lies on the device: the same copies give other numbers.
TEST_F(StreamGraphOnCuda, ReplaysWhatItRecorded) {
  const auto from = device_memory(4), to = device_memory(4);
  int ran = 0;
  const auto work = [&] {
    ++ran;
    ctx_.stream->copy(to.get(), from.get(), 4 * sizeof(int));
  };
  EXPECT_FALSE(graph_->replay("copy"));
  graph_->run("copy", work);
  EXPECT_FALSE(graph_->replay("copy"));  // its first turn was none of a graph
  graph_->run("copy", work);
  for (int turn = 0; turn < 5; ++turn) {
    upload(from.get(), numbers(4, 10 * turn));
    ASSERT_TRUE(graph_->replay("copy"));
    EXPECT_EQ(download(to.get(), 4), numbers(4, 10 * turn));
  }
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(graph_->stats().replayed, 5u);
  EXPECT_EQ(graph_->stats().launched, 6u);
  // Recorded anew after that, it is replayed as it was last.
  graph_->run("copy", [&] { ctx_.stream->copy(from.get(), to.get(), 2 * sizeof(int)); });
  upload(to.get(), numbers(4, 70));
  ASSERT_TRUE(graph_->replay("copy"));
  EXPECT_EQ(download(from.get(), 2), numbers(2, 70));
}

/// The host's memory is another turn's by then.
TEST_F(StreamGraphOnCuda, DoesNotReplayCopiesFromTheHost) {
  const auto to = device_memory(4);
  for (int turn = 0; turn < 3; ++turn) graph_->run("upload", [&] { upload(to.get(), numbers(4, turn)); });
  EXPECT_FALSE(graph_->replay("upload"));
  EXPECT_EQ(download(to.get(), 4), numbers(4, 2));
}

/// What is waited for outside, and what is told outside, is one turn's.
TEST_F(StreamGraphOnCuda, DoesNotReplayWaitsForWorkOutside) {
  const auto a = device_memory(4), b = device_memory(4);
  Event outside, inside;
  for (int turn = 0; turn < 2; ++turn) {
    other_->record(outside);
    graph_->run("waits", [&] {
      ctx_.stream->wait(outside);
      ctx_.stream->copy(b.get(), a.get(), 4 * sizeof(int));
    });
    graph_->run("tells", [&] {
      ctx_.stream->copy(b.get(), a.get(), 4 * sizeof(int));
      ctx_.stream->record_time(inside);
    });
    graph_->run("neither", [&] { ctx_.stream->copy(b.get(), a.get(), 4 * sizeof(int)); });
  }
  EXPECT_FALSE(graph_->can_replay("waits"));
  EXPECT_FALSE(graph_->replay("tells"));
  EXPECT_TRUE(graph_->can_replay("neither"));
  EXPECT_FALSE(graph_->can_replay("unknown"));
  ctx_.stream->synchronize();
}

TEST_F(StreamGraphOnCuda, NewNumbersAddressesAndSizesReplaceParameters) {
  std::vector<std::shared_ptr<void>> held;  // every turn has memory of its own
  for (int turn = 0; turn < 6; ++turn) {
    const std::size_t count = 100 + static_cast<std::size_t>(turn);
    const auto a = device_memory(count), b = device_memory(count), back = host_memory(count);
    Event arrived;
    graph_->run("copies", [&] {
      upload(a.get(), numbers(count, turn));
      ctx_.stream->copy(b.get(), a.get(), count * sizeof(int));
      ctx_.stream->copy(back.get(), b.get(), count * sizeof(int));
      ctx_.stream->record(arrived);
    });
    arrived.synchronize();
    EXPECT_TRUE(arrived.done());
    EXPECT_EQ(read(back, count), numbers(count, turn)) << "turn " << turn;
    held.insert(held.end(), {a, b, back});
  }
  EXPECT_EQ(graph_->stats().plain, 1u);
  EXPECT_EQ(graph_->stats().launched, 5u);
  EXPECT_EQ(graph_->stats().made, 1u);
}

TEST_F(StreamGraphOnCuda, AnotherShapeIsMadeAnew) {
  const auto a = device_memory(64), b = device_memory(64);
  for (int turn = 0; turn < 8; ++turn) {
    graph_->run("step", [&] {
      upload(a.get(), numbers(64, turn));
      for (int again = 0; again <= turn / 4; ++again) ctx_.stream->copy(b.get(), a.get(), 64 * sizeof(int));
    });
    EXPECT_EQ(download(b.get(), 64), numbers(64, turn));
  }
  EXPECT_EQ(graph_->stats().launched, 7u);
  EXPECT_EQ(graph_->stats().made, 2u);
}

TEST_F(StreamGraphOnCuda, KeysHaveGraphsOfTheirOwn) {
  constexpr int kKept = static_cast<int>(StreamGraph::kMostGraphs), kKeys = kKept + 2;
  const auto a = device_memory(8);
  for (int turn = 0; turn < 3; ++turn) {
    for (int key = 0; key < kKeys; ++key) {
      graph_->run(std::to_string(key), [&] { upload(a.get(), numbers(8, 100 * turn + key)); });
      EXPECT_EQ(download(a.get(), 8), numbers(8, 100 * turn + key));
    }
    for (int key : {kKept, kKept + 1})
      graph_->run(std::to_string(key), [&] { upload(a.get(), numbers(8, key)); });
  }
  EXPECT_EQ(graph_->stats().plain, 3u * kKeys);  // each was forgotten before it came again
  EXPECT_EQ(graph_->stats().launched, 6u);
}

/// Work on another stream before, in and after the graph, ordered by events alone.
TEST_F(StreamGraphOnCuda, OtherStreamsTakePart) {
  constexpr std::size_t kCount = 1 << 18, kBytes = kCount * sizeof(int);
  const auto a = device_memory(kCount), b = device_memory(kCount), c = device_memory(kCount),
             d = device_memory(kCount), e = device_memory(kCount);
  const auto source = host_memory(kCount), back = host_memory(kCount);
  for (int turn = 0; turn < 5; ++turn) {
    const Numbers values = numbers(kCount, turn);
    std::copy(values.begin(), values.end(), static_cast<int*>(source.get()));
    Event there, made, taken, sent;
    delay(*other_);
    other_->copy(a.get(), source.get(), kBytes);
    other_->record(there);
    graph_->run("step", [&] {
      ctx_.stream->wait(there);  // from outside
      ctx_.stream->copy(b.get(), a.get(), kBytes);
      ctx_.stream->record(made);
      other_->wait(made);  // joins
      other_->copy(c.get(), b.get(), kBytes);
      other_->record(taken);
      ctx_.stream->wait(taken);
      ctx_.stream->copy(d.get(), c.get(), kBytes);
    });
    other_->copy(e.get(), c.get(), kBytes);  // after what it did in the graph
    other_->copy(back.get(), e.get(), kBytes);
    other_->record(sent);
    sent.synchronize();
    EXPECT_EQ(read(back, kCount), values) << "turn " << turn;
    EXPECT_EQ(download(d.get(), kCount), values) << "turn " << turn;
  }
  EXPECT_EQ(graph_->stats().made, 1u);
}

/// A stream that joined a lasting graph does its part of each launch, after what it had to do before and
/// before what comes later. Whoever asked for it is told of further launches, whose events are their own.
TEST_F(StreamGraphOnCuda, StreamsThatJoinedTakePartInEveryLaunch) {
  constexpr std::size_t kCount = 1 << 20, kBytes = kCount * sizeof(int);
  const auto a = device_memory(kCount), b = device_memory(kCount), c = device_memory(kCount);
  const auto source = host_memory(kCount), back = host_memory(kCount);
  std::vector<Event> told;
  Event in_graph;
  const auto work = [&] {
    ctx_.stream->record(in_graph);
    other_->wait(in_graph);
    other_->when_relaunched([&](const Event& launch) {
      EXPECT_FALSE(launch.has_begun());
      told.push_back(launch);
    });
    other_->copy(b.get(), a.get(), kBytes);
    Event end;
    other_->record(end);
    ctx_.stream->wait(end);
    ctx_.stream->copy(c.get(), b.get(), kBytes);
  };
  for (int turn = 0; turn < 6; ++turn) {
    const Numbers values = numbers(kCount, turn);
    std::copy(values.begin(), values.end(), static_cast<int*>(source.get()));
    delay(*other_);
    other_->copy(a.get(), source.get(), kBytes);
    if (turn == 2) {
      EXPECT_FALSE(graph_->can_replay("step")) << "joined streams are waited for inside";
    }
    if (turn < 4) {
      graph_->run("step", work, {.lasting = turn >= 2});
    } else {
      ASSERT_TRUE(graph_->replay("step"));
      EXPECT_FALSE(told.back().done());
    }
    other_->copy(back.get(), b.get(), kBytes);
    Event sent;
    other_->record(sent);
    sent.synchronize();
    EXPECT_EQ(read(back, kCount), values) << "turn " << turn;
    EXPECT_EQ(download(c.get(), kCount), values) << "turn " << turn;
    EXPECT_TRUE(in_graph.done() && in_graph.has_begun());
    for (const Event& each : told) EXPECT_TRUE(each.done() && each.has_begun());
  }
  EXPECT_EQ(told.size(), 2u);
  EXPECT_EQ(graph_->stats().replayed, 2u);
}

/// Who was asked first and refuses keeps the graph from being launched.
TEST_F(StreamGraphOnCuda, WhoIsToldMayRefuseALaunch) {
  const auto from = device_memory(4), to = device_memory(4);
  bool refuses = false;
  Event seen;
  const auto work = [&] {
    ctx_.stream->when_relaunched([&](const Event& launch) {
      seen = launch;
      if (refuses) throw std::runtime_error("not now");
    });
    ctx_.stream->copy(to.get(), from.get(), 4 * sizeof(int));
  };
  for (int turn = 0; turn < 2; ++turn) graph_->run("copy", work);
  upload(from.get(), numbers(4, 7));
  refuses = true;
  EXPECT_THROW(graph_->replay("copy"), std::runtime_error);
  EXPECT_TRUE(seen.done()) << "nobody waits for what never comes";
  EXPECT_NE(download(to.get(), 4), numbers(4, 7));
  refuses = false;
  EXPECT_TRUE(graph_->replay("copy"));
  EXPECT_EQ(download(to.get(), 4), numbers(4, 7));
  EXPECT_EQ(graph_->stats().replayed, 1u);
}

/// What was put on another stream before it joins comes first, without an event that says so.
TEST_F(StreamGraphOnCuda, AStreamThatJoinsKeepsItsOrder) {
  constexpr std::size_t kCount = 1 << 20, kBytes = kCount * sizeof(int);
  const auto a = device_memory(kCount), b = device_memory(kCount);
  const auto source = host_memory(kCount), back = host_memory(kCount);
  for (int turn = 0; turn < 4; ++turn) {
    const Numbers values = numbers(kCount, turn);
    std::copy(values.begin(), values.end(), static_cast<int*>(source.get()));
    delay(*other_);
    other_->copy(a.get(), source.get(), kBytes);
    Event begin, end;
    graph_->run("step", [&] {
      ctx_.stream->record(begin);
      other_->wait(begin);
      other_->copy(b.get(), a.get(), kBytes);
      other_->record(end);
      ctx_.stream->wait(end);
      ctx_.stream->copy(back.get(), b.get(), kBytes);
    });
    ctx_.stream->synchronize();
    EXPECT_EQ(read(back, kCount), values) << "turn " << turn;
  }
}

TEST_F(StreamGraphOnCuda, WhatThrowsLeavesNothingBehind) {
  const auto a = device_memory(16);
  Event lost;
  const auto turn = [&](int first, bool throws) {
    graph_->run("step", [&] {
      upload(a.get(), numbers(16, first));
      ctx_.stream->record(lost);
      other_->wait(lost);  // joined when it throws
      if (throws) throw std::runtime_error("in the middle");
    });
  };
  turn(0, false);
  turn(1, false);
  EXPECT_THROW(turn(2, true), std::runtime_error);
  EXPECT_TRUE(lost.done());
  lost.synchronize();
  other_->wait(lost);
  EXPECT_FALSE(ctx_.stream->is_recorded());
  EXPECT_EQ(download(a.get(), 16), numbers(16, 1));
  turn(3, false);
  EXPECT_EQ(download(a.get(), 16), numbers(16, 3));
}

TEST_F(StreamGraphOnCuda, TheHostCannotWaitForWhatIsBeingRecorded) {
  const auto a = device_memory(16);
  const auto step = [&](bool waits) {
    graph_->run("step", [&] {
      upload(a.get(), numbers(16, 0));
      Event event;
      ctx_.stream->record(event);
      if (!waits) return;
      EXPECT_FALSE(event.done());
      event.synchronize();
    });
  };
  step(false);
  EXPECT_THROW(step(true), InternalError);
  graph_->run("other", [] {});
  EXPECT_THROW(graph_->run("other", [&] { ctx_.stream->synchronize(); }), DeviceError);
  step(false);
  ctx_.stream->synchronize();
}

TEST_F(StreamGraphOnCuda, TimesAreThoseOfTheGraph) {
  constexpr std::size_t kCount = 1 << 20;
  const auto a = device_memory(kCount), b = device_memory(kCount);
  for (int turn = 0; turn < 4; ++turn) {
    Event begin, middle, end;
    graph_->run("step", [&] {
      ctx_.stream->record_time(begin);
      for (int i = 0; i < 4; ++i) ctx_.stream->copy(b.get(), a.get(), kCount * sizeof(int));
      ctx_.stream->record_time(middle);
      ctx_.stream->record_time(end);
    });
    ctx_.stream->synchronize();
    EXPECT_GT(Event::seconds_between(begin, middle), 0) << "turn " << turn;
    EXPECT_LT(Event::seconds_between(middle, end), Event::seconds_between(begin, middle));
  }
}

TEST_F(StreamGraphOnCuda, ATraceSeesPieceByPiece) {
  const auto a = device_memory(16);
  for (int turn = 0; turn < 2; ++turn) graph_->run("step", [&] { upload(a.get(), numbers(16, 0)); });
  const auto trace = std::make_shared<Trace>(*ctx_.stream);
  ctx_.stream->set_trace(trace);
  graph_->run("step", [&] { upload(a.get(), numbers(16, 1)); });
  ctx_.stream->set_trace(nullptr);
  EXPECT_EQ(trace->lanes().front().work.size(), 1u);
  EXPECT_EQ(graph_->stats().launched, 1u);
}

}  // namespace
}  // namespace tessera
