/// What communicators tell a rank's flight recorder.

#include "tessera/device/flight.hpp"

#include <gtest/gtest.h>

#include "../support/ranks.hpp"

namespace tessera {
namespace {

using State = FlightRecord::State;

const ExecCtx& host() {
  static const ExecCtx ctx = ExecCtx::cpu(1);
  return ctx;
}

TEST(CommunicatorFlight, NotesEveryOperationOfEveryGroup) {
  test::run_local(4, [](const std::shared_ptr<Communicator>& world) {
    const auto flight = std::make_shared<FlightRecorder>();
    world->set_flight(flight);
    const auto pair = world->split(world->rank() % 2, 0, "tp");
    const Tensor x = Tensor::from(host(), std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
    world->all_reduce(host(), x).wait(host());
    pair->broadcast(host(), x, 0).wait(host());
    const int other = 1 - pair->rank();
    pair->rank() == 0 ? pair->send(host(), x, other).wait(host()) : pair->recv(host(), x, other).wait(host());

    const FlightSnapshot seen = flight->snapshot();
    ASSERT_EQ(seen.records.size(), 4u);
    ASSERT_EQ(seen.groups.size(), 2u);
    EXPECT_EQ(seen.groups[0].name, "world");
    EXPECT_EQ(seen.groups[0].ranks, (std::vector<int>{0, 1, 2, 3}));
    EXPECT_EQ(seen.groups[1].name, "tp");
    EXPECT_EQ(seen.groups[1].ranks, (std::vector<int>{world->rank() % 2, world->rank() % 2 + 2}));
    const char* const names[] = {"split", "all_reduce", "broadcast", pair->rank() == 0 ? "send" : "recv"};
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_STREQ(seen.records[i].what.name, names[i]);
      EXPECT_EQ(seen.records[i].state, State::done) << names[i];
      EXPECT_EQ(seen.records[i].what.group, i < 2 ? 0 : 1);
    }
    EXPECT_EQ(seen.records[1].what.sequence, 1u);
    EXPECT_EQ(seen.records[2].what.sequence, 0u);
    EXPECT_STREQ(seen.records[1].what.dtype, "float32");
    EXPECT_EQ(seen.records[1].what.dims, 2);
    EXPECT_EQ(seen.records[1].what.shape[1], 3);
    EXPECT_EQ(seen.records[1].what.peer, -1);
    EXPECT_EQ(seen.records[3].what.peer, other);
    EXPECT_EQ(flight->pulse().waits, 0);
  });
}

TEST(CommunicatorFlight, WhatNeverEndsIsNotDone) {
  const auto ranks = make_local_communicators(2, "world", {.timeout_s = 0.05});
  const auto flight = std::make_shared<FlightRecorder>();
  ranks[0]->set_flight(flight);
  const Tensor x = Tensor::from(host(), std::vector<float>{1, 2}, {2});
  EXPECT_THROW(ranks[0]->all_reduce(host(), x).wait(host()), CommunicationError);
  const FlightSnapshot seen = flight->snapshot();
  ASSERT_EQ(seen.records.size(), 1u);
  EXPECT_NE(seen.records[0].state, State::done);
  EXPECT_TRUE(seen.records[0].waited);
}

}  // namespace
}  // namespace tessera
