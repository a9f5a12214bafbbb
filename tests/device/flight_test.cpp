#include "tessera/device/flight.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "tessera/base/clock.hpp"

namespace tessera {
namespace {

using Kind = FlightOperation::Kind;
using State = FlightRecord::State;

FlightOperation kernel(const char* name) { return {.name = name, .shape = {2, 3}, .dims = 2}; }
FlightOperation message(std::uint64_t sequence) {
  return {.kind = Kind::communication, .name = "all_reduce", .group = 0, .sequence = sequence};
}

TEST(FlightRecorder, KeepsStatesAndTimes) {
  FlightRecorder recorder;
  const double before = now_s();
  const std::uint64_t sum = recorder.add(message(7), State::queued);
  const std::uint64_t gemm = recorder.add(kernel("gemm"), State::running);
  recorder.end(gemm, Kind::kernel);
  recorder.begin(sum, Kind::communication);
  FlightSnapshot seen = recorder.snapshot();
  ASSERT_EQ(seen.records.size(), 2u);
  EXPECT_STREQ(seen.records[0].what.name, "all_reduce");
  EXPECT_EQ(seen.records[0].what.sequence, 7u);
  EXPECT_EQ(seen.records[0].state, State::running);
  EXPECT_GE(seen.records[0].begin_s, seen.records[0].queued_s);
  EXPECT_EQ(seen.records[0].end_s, 0);
  EXPECT_EQ(seen.records[1].state, State::done);
  EXPECT_EQ(seen.records[1].what.shape[1], 3);
  EXPECT_GE(seen.records[1].end_s, seen.records[1].begin_s);
  EXPECT_GE(seen.records[1].begin_s, before);
  recorder.end(sum, Kind::communication);
  seen = recorder.snapshot();
  EXPECT_EQ(seen.records[0].state, State::done);
}

/// Kernels are many: they must not push out the communication that a rank waits for.
TEST(FlightRecorder, KeepsTheLastOfEachKind) {
  FlightRecorder recorder;
  const std::uint64_t sum = recorder.add(message(0), State::queued);
  for (int i = 0; i < 2500; ++i) recorder.end(recorder.add(kernel("norm"), State::running), Kind::kernel);
  const FlightSnapshot seen = recorder.snapshot();
  ASSERT_EQ(seen.records.size(), FlightRecorder::kKept + 1);
  EXPECT_EQ(seen.records.front().number, sum);
  EXPECT_EQ(seen.records.back().number, 2500u);
  EXPECT_EQ(seen.records[1].number, 2500u - FlightRecorder::kKept + 1);
  recorder.end(sum, Kind::communication);
  recorder.end(3, Kind::kernel);  // long gone
  EXPECT_EQ(recorder.snapshot().records.front().state, State::done);
}

TEST(FlightRecorder, FindsWhatEndsOutOfOrder) {
  FlightRecorder recorder;
  std::vector<std::uint64_t> messages;
  for (std::uint64_t i = 0; i < 1500; ++i) {
    messages.push_back(recorder.add(message(i), State::queued));
    recorder.end(recorder.add(kernel("add"), State::running), Kind::kernel);
  }
  for (std::size_t i = 0; i < messages.size(); i += 2) recorder.end(messages[i], Kind::communication);
  for (const FlightRecord& record : recorder.snapshot().records) {
    if (record.what.kind == Kind::communication) {
      EXPECT_EQ(record.state, record.what.sequence % 2 == 0 ? State::done : State::queued);
    }
  }
}

TEST(FlightRecorder, CallsNestAndEverythingIsAnEvent) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.pulse().calls, 0);
  std::uint64_t events = recorder.pulse().events;
  const auto moved = [&] { return std::exchange(events, recorder.pulse().events) != events; };
  recorder.open_call("Engine::step()");
  EXPECT_TRUE(moved());
  recorder.open_call("Engine::update()");
  EXPECT_EQ(recorder.snapshot().call, "Engine::step()");
  recorder.close_call();
  EXPECT_EQ(recorder.pulse().calls, 1);
  EXPECT_TRUE(moved());
  EXPECT_FALSE(moved());
  recorder.note_progress();
  EXPECT_TRUE(moved());
  {
    const FlightWait waits(&recorder, recorder.add(message(0), State::queued));
    EXPECT_EQ(recorder.pulse().waits, 1);
    EXPECT_TRUE(recorder.snapshot().records.front().waited);
  }
  EXPECT_EQ(recorder.pulse().waits, 0);
  recorder.close_call();
  EXPECT_TRUE(recorder.snapshot().call.empty());
}

TEST(FlightRecorder, RemembersTheCallThatEndedByAnException) {
  const auto recorder = std::make_shared<FlightRecorder>();
  try {
    const FlightCall call(recorder, "Engine::step()");
    throw std::runtime_error("lost");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(recorder->pulse().calls, 0);
  }
  EXPECT_EQ(recorder->snapshot().call, "Engine::step()");
  { const FlightCall call(recorder, "Engine::update()"); }
  EXPECT_TRUE(recorder->snapshot().call.empty());
}

TEST(FlightRecorder, WhatADeviceRunsLaterIsQueuedUntilItWasReached) {
  FlightRecorder recorder;
  const std::uint64_t first = recorder.add(kernel("a"), State::queued);
  const std::uint64_t mark = recorder.next();
  recorder.add(kernel("b"), State::queued);
  EXPECT_EQ(first + 1, mark);
  recorder.reached(mark);
  const FlightSnapshot seen = recorder.snapshot();
  EXPECT_EQ(seen.records[0].state, State::done);
  EXPECT_EQ(seen.records[1].state, State::queued);
}

TEST(FlightRecorder, GroupsOfOneNameAreNumbered) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.add_group("dp", {0, 1}), 0);
  EXPECT_EQ(recorder.add_group("dp", {0, 2}), 1);
  EXPECT_EQ(recorder.add_group("dp", {0, 1}), 2);
  const auto groups = recorder.snapshot().groups;
  EXPECT_EQ(groups[1].instance, 0);
  EXPECT_EQ(groups[2].instance, 1);
}

TEST(FlightSpan, TellsTheStreamsRecorder) {
  Stream stream(1);
  const auto recorder = std::make_shared<FlightRecorder>();
  {
    const FlightSpan nobody(stream, [] { return kernel("unseen"); });
  }
  stream.set_flight(recorder);
  {
    const FlightSpan span(stream, [] { return kernel("seen"); });
    EXPECT_EQ(recorder->snapshot().records.back().state, State::running);
  }
  ASSERT_EQ(recorder->snapshot().records.size(), 1u);
  EXPECT_EQ(recorder->snapshot().records.back().state, State::done);
}

TEST(FlightRecorder, ThreadsMayShareIt) {
  FlightRecorder recorder;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < 500; ++i) {
        const std::uint64_t number = recorder.add(message(i), State::queued);
        recorder.begin(number, Kind::communication);
        recorder.end(number, Kind::communication);
      }
    });
  }
  for (int i = 0; i < 20; ++i) EXPECT_LE(recorder.snapshot().records.size(), FlightRecorder::kKept);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(recorder.next(), 2000u);
}

}  // namespace
}  // namespace tessera
