#include "tessera/engine/watchdog.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "engine/flight_dump.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

using Kind = FlightOperation::Kind;
using State = FlightRecord::State;
using namespace std::chrono_literals;
using test::message_of;

class WatchdogTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) /
              (std::string("watchdog_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path dump_of(int rank) const {
    return folder_ / ("rank-" + std::to_string(rank) + ".json");
  }

  std::filesystem::path folder_;
};

TEST_F(WatchdogTest, AKernelThatNeverEndsIsToldToTheProgram) {
  const auto world = make_self_communicator("world");
  std::promise<std::string> told;
  const Watchdog watchdog(world, {.timeout_s = 0.5,
                                  .grace_s = 0.2,
                                  .folder = folder_,
                                  .on_hang = [&](const std::string& message) { told.set_value(message); }});
  const FlightCall call(world->flight(), "Engine::step()");
  world->flight()->add({.name = "gemm", .shape = {8, 4, 2}, .dims = 3}, State::running);
  auto message = told.get_future();
  ASSERT_EQ(message.wait_for(60s), std::future_status::ready);
  const std::string said = message.get();
  EXPECT_TRUE(test::contains(said, "rank 0 hangs in Engine::step(): no operation began or ended for 0.5 s"))
      << said;
  EXPECT_TRUE(test::contains(said, "gemm 8x4x2 is running")) << said;
  const FlightDump dump = read_flight(dump_of(0));
  EXPECT_EQ(dump.call, "Engine::step()");
  ASSERT_EQ(dump.operations.size(), 1u);
  EXPECT_EQ(dump.operations[0].state, "running");
  const std::string report = compare_flights(folder_);
  EXPECT_TRUE(test::contains(report, "behind: rank 0")) << report;
  EXPECT_TRUE(test::contains(report, "runs gemm [8, 4, 2]")) << report;
}

/// Whoever waits for others is told by the communicator, so the program needs not end.
TEST_F(WatchdogTest, ACallThatReturnsIsNoHang) {
  const auto ranks = make_local_communicators(2);
  std::atomic<bool> hung = false;
  const Watchdog watchdog(
      ranks[0], {.timeout_s = 0.3, .grace_s = 60, .folder = folder_, .on_hang = [&](const std::string&) {
                   hung = true;
                 }});
  const std::string message = message_of<CommunicationError>([&] {
    const FlightCall call(ranks[0]->flight(), "Engine::step()");
    while (ranks[0]->failure().empty()) std::this_thread::sleep_for(1ms);
    ranks[0]->barrier(ExecCtx::cpu(1));
  });
  EXPECT_TRUE(test::contains(message, "hangs in Engine::step()")) << message;
  EXPECT_FALSE(ranks[1]->failure().empty());
  EXPECT_FALSE(hung);
}

TEST_F(WatchdogTest, TimeBetweenCallsDoesNotCount) {
  const auto world = make_self_communicator("world");
  std::atomic<bool> hung = false;
  const Watchdog watchdog(
      world, {.timeout_s = 0.2, .grace_s = 0, .folder = folder_, .on_hang = [&](const std::string&) {
                hung = true;
              }});
  { const FlightCall call(world->flight(), "Engine::step()"); }
  std::this_thread::sleep_for(700ms);
  EXPECT_FALSE(hung);
}

TEST_F(WatchdogTest, WorkThatGetsOnIsLeftAlone) {
  const auto world = make_self_communicator("world");
  std::atomic<bool> hung = false;
  const Watchdog watchdog(
      world,
      {.timeout_s = 1, .grace_s = 0, .folder = folder_, .on_hang = [&](const std::string&) { hung = true; }});
  const FlightCall call(world->flight(), "save_engine()");
  for (int i = 0; i < 100; ++i) {
    std::this_thread::sleep_for(15ms);
    world->flight()->note_progress();
  }
  EXPECT_FALSE(hung);
}

TEST_F(WatchdogTest, ADumpIsWrittenWhenAskedFor) {
  const auto world = make_self_communicator("world");
  std::atomic<bool> asked = true;
  std::promise<std::string> told;
  Watchdog watchdog(world, {.folder = folder_ / "first",
                            .dump_asked = [&] { return asked.exchange(false); },
                            .on_dump = [&](const std::string& text) { told.set_value(text); }});
  const std::string said = told.get_future().get();
  EXPECT_TRUE(test::contains(said, (folder_ / "first" / "rank-0.json").string())) << said;
  watchdog.set_folder(folder_);
  EXPECT_EQ(watchdog.dump("a test"), dump_of(0));
  EXPECT_EQ(read_flight(dump_of(0)).why, "a test");
  EXPECT_TRUE(world->failure().empty());
}

TEST_F(WatchdogTest, AWaitThatCameToNothingLeavesADump) {
  std::string report;
  try {
    test::run_local(3, CommOptions{.timeout_s = 1}, [&](const std::shared_ptr<Communicator>& comm) {
      const Watchdog watchdog(comm, {.timeout_s = 30, .folder = folder_});
      const auto pairs = comm->split(comm->rank() == 2 ? 1 : 0, 0, "tp");
      const Tensor x = Tensor::from(ExecCtx::cpu(1), std::vector<float>{1, 2}, {2});
      comm->all_reduce(ExecCtx::cpu(1), x).wait(ExecCtx::cpu(1));
      if (comm->rank() == 1) {  // does something else for too long
        const FlightCall call(comm->flight(), "Engine::step()");
        while (comm->failure().empty()) std::this_thread::sleep_for(1ms);
        return;
      }
      comm->barrier(ExecCtx::cpu(1));
    });
    FAIL();
  } catch (const CommunicationError&) {
    report = compare_flights(folder_);
  }
  EXPECT_TRUE(test::contains(report, "dumps of 3 of 3 ranks")) << report;
  EXPECT_TRUE(test::contains(report, "behind: rank 1")) << report;
  EXPECT_TRUE(test::contains(report, "waits for barrier 2 on group world (ranks 0, 1 and 2)")) << report;
  EXPECT_TRUE(test::contains(report, "which rank 1 did not call")) << report;
}

TEST_F(WatchdogTest, OldDumpsAreSetAside) {
  const auto world = make_self_communicator("world");
  { Watchdog(world, {.folder = folder_}).dump("before"); }
  const Watchdog watchdog(world, {.folder = folder_});
  EXPECT_FALSE(std::filesystem::exists(dump_of(0)));
  EXPECT_EQ(read_flight(folder_ / "before" / "rank-0.json").why, "before");
}

/// Dumps as ranks write them, of calls that the test makes up.
class FlightReportTest : public WatchdogTest {
 protected:
  struct Call {
    const char* name;
    const char* dtype;
    std::int64_t size;
    State state;
  };
  void write(int rank, int world_size, const std::vector<Call>& calls, const std::string& why = "a test") {
    FlightRecorder recorder;
    recorder.open_call("Engine::step()");
    std::vector<int> ranks;
    for (int r = 0; r < world_size; ++r) ranks.push_back(r);
    recorder.add_group("dp", ranks);
    std::uint64_t sequence = 0;
    for (const Call& call : calls) {
      const std::uint64_t number = recorder.add({.kind = Kind::communication,
                                                 .name = call.name,
                                                 .dtype = call.dtype,
                                                 .shape = {call.size},
                                                 .dims = 1,
                                                 .group = 0,
                                                 .sequence = sequence++},
                                                State::queued);
      if (call.state == State::done) recorder.end(number, Kind::communication);
      if (call.state != State::done) recorder.begin_wait(number);
    }
    std::filesystem::create_directories(folder_);
    std::ofstream(dump_of(rank)) << flight_json(recorder.snapshot(), rank, world_size, why);
  }
};

TEST_F(FlightReportTest, NamesTheRankWithoutADump) {
  write(0, 3, {{"all_reduce", "float32", 4, State::done}, {"all_reduce", "float32", 9, State::running}});
  write(2, 3, {{"all_reduce", "float32", 4, State::done}, {"all_reduce", "float32", 9, State::running}});
  const std::string report = compare_flights(folder_);
  EXPECT_TRUE(test::contains(report, "dumps of 2 of 3 ranks")) << report;
  EXPECT_TRUE(test::contains(report, "waits for all_reduce 1 on group dp (ranks 0, 1 and 2), float32 [9]"))
      << report;
  EXPECT_TRUE(test::contains(report, "behind: rank 1\n  rank 1 left no dump: it was stopped or killed"))
      << report;
}

TEST_F(FlightReportTest, NamesTheFirstOperationThatDiffers) {
  write(0, 2, {{"all_reduce", "float32", 4, State::done}, {"all_gather", "float32", 9, State::running}});
  write(1, 2, {{"all_reduce", "float32", 4, State::done}, {"broadcast", "int64", 9, State::running}});
  const std::string report = compare_flights(folder_);
  EXPECT_TRUE(
      test::contains(report,
                     "first difference: all_gather 1 on group dp (ranks 0 and 1), float32 [9] on rank 0 is "
                     "broadcast 1 on group dp (ranks 0 and 1), int64 [9] on rank 1\n"
                     "nobody is behind: they called different things"))
      << report;
}

TEST_F(FlightReportTest, RefusesWhatIsMissingOrDamaged) {
  EXPECT_TRUE(
      test::contains(message_of<DataError>([&] { compare_flights(folder_); }), "there is no such folder"));
  std::filesystem::create_directories(folder_ / "flight");
  EXPECT_TRUE(test::contains(message_of<DataError>([&] { compare_flights(folder_); }), "there is no dump"));
  write(0, 2, {{"all_reduce", "float32", 4, State::done}});
  std::filesystem::remove(folder_ / "flight");
  for (const char* text : {"", "{\"format\": \"tessera", "{\"format\":\"other\"}", "[1, 2]"}) {
    std::ofstream(dump_of(1)) << text;
    const std::string message = message_of<DataError>([&] { compare_flights(folder_); });
    EXPECT_TRUE(test::contains(message, dump_of(1).string())) << message;
  }
  std::ofstream(dump_of(1)) << flight_json({}, 1, 8, "of another job");
  EXPECT_TRUE(test::contains(message_of<DataError>([&] { compare_flights(folder_); }), "of jobs of"));
}

}  // namespace
}  // namespace tessera
