#include "tessera/device/trace.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "tessera/base/clock.hpp"

namespace tessera {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class Traced : public testing::TestWithParam<Stream::Mode> {};
INSTANTIATE_TEST_SUITE_P(Modes, Traced, testing::Values(Stream::Mode::immediate, Stream::Mode::queued),
                         [](const auto& info) {
                           return info.param == Stream::Mode::immediate ? "immediate" : "queued";
                         });

TEST_P(Traced, WithoutATraceNothingIsDescribed) {
  Stream stream(1, GetParam());
  const TraceSpan span(stream, []() -> Work {
    ADD_FAILURE() << "asked";
    return {};
  });
}

TEST_P(Traced, WorkIsTimedWhereItRuns) {
  Stream stream(1, GetParam());
  const auto trace = std::make_shared<Trace>(stream);
  stream.set_trace(trace);
  const double before = now_s();
  {
    const TraceSpan outer(stream, [] { return Work{WorkKind::scope, "outer"}; });
    for (const char* name : {"first", "second"}) {
      const TraceSpan inner(stream, [&] { return Work{WorkKind::gemm, name, 8, 4}; });
      stream.launch([] { sleep_ms(5); });
    }
  }
  stream.set_trace(nullptr);
  const auto lanes = trace->lanes();
  const double after = now_s();

  const bool queued = GetParam() == Stream::Mode::queued;
  ASSERT_EQ(lanes.size(), queued ? 2u : 1u);
  EXPECT_EQ(lanes[0].name, queued ? "stream" : "host");
  for (const TraceLane& lane : lanes) {
    ASSERT_EQ(lane.work.size(), 3u);
    EXPECT_EQ(lane.work[0].work.name, "outer");
    EXPECT_EQ(lane.work[1].work.name, "first");
    EXPECT_EQ(lane.work[2].work.name, "second");
    EXPECT_EQ(lane.work[1].work.flops, 8);
    EXPECT_GE(lane.work[0].begin_s, before - 1e-3);  // a stream's clock is known to the time a wait takes
    EXPECT_LE(lane.work[0].end_s, after + 1e-3);
    for (int i : {1, 2}) {
      const TimedWork &inner = lane.work[static_cast<std::size_t>(i)], &outer = lane.work[0];
      EXPECT_GE(inner.begin_s, outer.begin_s);
      EXPECT_LE(inner.end_s, outer.end_s);
    }
    EXPECT_LE(lane.work[1].end_s, lane.work[2].begin_s);
  }
  EXPECT_GE(lanes[0].work[1].end_s - lanes[0].work[1].begin_s, 5e-3);
  if (queued) {
    EXPECT_LT(lanes[1].work[1].end_s, lanes[0].work[1].end_s);  // the host went on
  }
}

TEST(Trace, AWaitOfTheStreamForTheHostIsSeenOnTheStream) {
  Stream stream(1, Stream::Mode::queued);
  const auto trace = std::make_shared<Trace>(stream);
  stream.set_trace(trace);
  {
    const TraceSpan span(stream, [] { return Work{WorkKind::data, "read"}; });
    stream.synchronize();  // it has come to the span's beginning, however busy the machine is
    sleep_ms(5);           // the host's
  }
  const auto lanes = trace->lanes();
  EXPECT_GE(lanes[0].work.at(0).end_s - lanes[0].work[0].begin_s, 4e-3);
}

TEST(Trace, OtherThreadsAddWhatGoesOnBeside) {
  Stream stream(1);
  const auto trace = std::make_shared<Trace>(stream);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i)
        trace->add(t % 2 == 0 ? "dp" : "tp", {{WorkKind::communication, "all_reduce"}, i * 1.0, i + 0.5});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto lanes = trace->lanes();
  ASSERT_EQ(lanes.size(), 3u);
  EXPECT_EQ(lanes[0].name, "host");
  EXPECT_FALSE(lanes[0].overlaps);
  for (std::size_t i : {1u, 2u}) {
    EXPECT_TRUE(lanes[i].overlaps);
    EXPECT_EQ(lanes[i].work.size(), 200u);
    for (std::size_t j = 1; j < 200; ++j) EXPECT_LE(lanes[i].work[j - 1].begin_s, lanes[i].work[j].begin_s);
  }
}

}  // namespace
}  // namespace tessera
