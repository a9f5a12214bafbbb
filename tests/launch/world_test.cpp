#include "tessera/launch/world.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "launch/host_secret.hpp"
#include "launch_test_support.hpp"
#include "tessera/comm/gloo.hpp"
#include "tessera/comm/store.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::contains;

using Variables = std::vector<std::string>;

/// A port that was free a moment ago, like the one after it.
std::string free_port() { return std::to_string(StoreServer("127.0.0.1", 0, "x").port()); }

Environment environment_of(int rank, int size, Variables variables) {
  variables.push_back("RANK=" + std::to_string(rank));
  variables.push_back("WORLD_SIZE=" + std::to_string(size));
  return read_environment(variables);
}

/// Every rank adds its number; returns what they were told instead, by rank.
std::vector<std::string> sum_ranks(int size, const Variables& variables) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto world = connect_world(environment_of(rank, size, variables), 20);
        EXPECT_EQ(world->rank(), rank);
        EXPECT_EQ(world->size(), size);
        EXPECT_EQ(world->name(), "world");
        const ExecCtx ctx = ExecCtx::cpu(1, 0);
        const Tensor x = Tensor::from(ctx, std::vector<std::int32_t>{rank}, {1});
        world->all_reduce(ctx, x).wait(ctx);
        EXPECT_EQ(x.to_vector<std::int32_t>()[0], size * (size - 1) / 2);
        const auto pair = world->split(rank / 2, rank, "pair");
        pair->barrier(ctx);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_sum(int size, const Variables& variables) {
  for (const std::string& error : sum_ranks(size, variables)) EXPECT_EQ(error, "");
}

TEST(World, AloneWithoutALauncher) {
  EXPECT_EQ(connect_world(read_environment(Variables{}), 1)->size(), 1);
  const auto world = connect_world(environment_of(0, 1, {}), 1);
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(world->name(), "world");
}

TEST(World, RankZeroServes) {
  expect_sum(3, {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + free_port()});
  expect_sum(2, {"LOCAL_WORLD_SIZE=2", "MASTER_PORT=" + free_port(), "TESSERA_JOB_SECRET=s",
                 "TESSERA_CHECK_COLLECTIVES=1", "TESSERA_COMM_ADDRESS=127.0.0.1"});
}

/// Nobody on this machine can know by what they found each other, and nothing of it is left.
TEST(World, OnOneMachineTheSecretIsInAFile) {
  const std::string port = free_port();
  const std::string here = "MASTER_PORT=" + port;
  const std::string path = launching::host_secret_path("job-4999694984129765468-" + port);
  std::string secret;
  std::atomic<bool> over{false};
  std::thread looks([&] {
    while (!over && secret.empty()) secret = launching::read_host_secret(path);
  });
  expect_sum(3, {"MASTER_ADDR=127.0.0.1", here, "PMIX_NAMESPACE=job"});
  over = true;
  looks.join();
  EXPECT_EQ(launching::read_host_secret(path), "");
  EXPECT_TRUE(secret.empty() || secret.size() == 64) << secret;
}

/// A job that was killed has left its file, which says something else.
TEST(World, AnEarlierJobsFileIsNotInTheWay) {
  const std::string port = free_port();
  const std::string path = launching::host_secret_path("job-4999694984129765468-" + port);
  launching::HostSecret earlier(path);
  earlier.publish();
  std::thread late([&] {
    const auto world = connect_world(
        environment_of(1, 2, {"MASTER_PORT=" + port, "LOCAL_WORLD_SIZE=2", "PMIX_NAMESPACE=job"}), 20);
    EXPECT_EQ(world->rank(), 1);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has tried with the wrong one
  const auto world = connect_world(
      environment_of(0, 2, {"MASTER_PORT=" + port, "LOCAL_WORLD_SIZE=2", "PMIX_NAMESPACE=job"}), 20);
  late.join();
  EXPECT_EQ(launching::read_host_secret(path), "");
}

TEST(World, AStoreNeedsItsSecret) {
  const std::string message =
      message_of<ConfigError>([] { connect_world(environment_of(0, 2, {"TESSERA_STORE=127.0.0.1:1"}), 1); });
  EXPECT_TRUE(contains(message, "set TESSERA_JOB_SECRET to the one of that store")) << message;
}

/// torchrun's own store holds MASTER_PORT.
TEST(World, UnderTorchrun) {
  const StoreServer torchruns("127.0.0.1", 0, "not ours");
  expect_sum(2, {"MASTER_ADDR=localhost", "MASTER_PORT=" + std::to_string(torchruns.port()),
                 "TORCHELASTIC_RUN_ID=job"});
}

TEST(World, TheLauncherServes) {
  const StoreServer server("127.0.0.1", 0, "secret");
  const std::string store = "TESSERA_STORE=127.0.0.1:" + std::to_string(server.port());
  for (const char* restart : {"0", "1"}) {
    expect_sum(3, {store, "TESSERA_JOB_SECRET=secret", std::string("TESSERA_RESTART=") + restart});
  }
}

TEST(World, WithoutAPortTheJobsNameDecides) {
  expect_sum(2, {"LOCAL_WORLD_SIZE=2", "PMIX_NAMESPACE=" + free_port()});
}

TEST(World, AWrongSecretIsRefused) {
  const StoreServer server("127.0.0.1", 0, "secret");
  const std::string store = "TESSERA_STORE=127.0.0.1:" + std::to_string(server.port());
  const std::string message = message_of<CommunicationError>([&] {
    connect_world(environment_of(0, 2, {store, "TESSERA_JOB_SECRET=other"}), 5);
  });
  EXPECT_TRUE(contains(message, "does not know this job's secret")) << message;
  EXPECT_TRUE(contains(message, "the launcher serves it")) << message;
}

TEST(World, WithoutASecretOverTheNetworkMeetsAndWarns) {
  Variables variables{"MASTER_ADDR=10.1.2.3", "MASTER_PORT=29500", "SLURM_JOB_ID=7"};
  const std::string warning = warning_of_open_world(environment_of(1, 2, variables));
  for (const char* part : {"meet at 10.1.2.3:29500 without a secret", "open to whoever reaches that port",
                           "TESSERA_JOB_SECRET", "TESSERA_REQUIRE_SECRET=1"}) {
    EXPECT_TRUE(contains(warning, part)) << warning;
  }
  variables.push_back("TESSERA_REQUIRE_SECRET=1");
  const std::string message =
      message_of<ConfigError>([&] { connect_world(environment_of(1, 2, variables), 1); });
  EXPECT_TRUE(contains(message, "TESSERA_REQUIRE_SECRET is set, and the processes")) << message;
  EXPECT_TRUE(contains(message, "set TESSERA_JOB_SECRET")) << message;
  for (const char* closed : {"TESSERA_JOB_SECRET=s", "MASTER_ADDR=127.0.0.1", "WORLD_SIZE=1"}) {
    Variables others{"MASTER_PORT=29500", "RANK=0", closed};
    if (std::string_view(closed) != "WORLD_SIZE=1") others.push_back("WORLD_SIZE=2");
    if (std::string_view(closed) != "MASTER_ADDR=127.0.0.1") others.push_back("MASTER_ADDR=10.1.2.3");
    EXPECT_EQ(warning_of_open_world(read_environment(others)), "") << closed;
  }
  // An address that is not called local, and reaches this machine.
  expect_sum(2, {"MASTER_ADDR=0.0.0.0", "LOCAL_WORLD_SIZE=2", "MASTER_PORT=" + free_port()});
}

TEST(World, SomebodyMustSayWhereToMeet) {
  const std::string message = message_of<ConfigError>([] { connect_world(environment_of(1, 2, {}), 1); });
  EXPECT_TRUE(contains(message, "this is rank 1 of 2")) << message;
  EXPECT_TRUE(contains(message, "set MASTER_ADDR")) << message;
  EXPECT_TRUE(contains(message_of<ConfigError>([] {
                         connect_world(environment_of(0, 2, {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"}), 1);
                       }),
                       "MASTER_PORT"));
}

TEST(World, ARankThatNeverComesIsNamed) {
  const std::string port = "MASTER_PORT=" + free_port();
  const std::string without_two = message_of<CommunicationError>([&] {
    connect_world(environment_of(0, 3, {"MASTER_ADDR=127.0.0.1", port}), 0.3);
  });
  EXPECT_TRUE(contains(without_two, "these ranks have not come: 1, 2")) << without_two;
  const std::string without_zero = message_of<CommunicationError>([&] {
    connect_world(environment_of(1, 3, {"MASTER_ADDR=127.0.0.1", port}), 0.3);
  });
  EXPECT_TRUE(contains(without_zero, "rank 0 serves it")) << without_zero;
}

TEST(World, OneRanksErrorBecomesEverybodys) {
  const StoreServer server("127.0.0.1", 0, "secret");
  const Variables variables{"TESSERA_STORE=127.0.0.1:" + std::to_string(server.port()),
                            "TESSERA_JOB_SECRET=secret"};
  std::vector<std::string> messages(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto world = connect_world(environment_of(rank, 3, variables), 20);
      const ExecCtx ctx = ExecCtx::cpu(1, 0);
      try {
        world->barrier(ctx);  // which the others may still be in when rank 1 fails
        if (rank == 1) throw DataError("corpus.idx is damaged");
        world->broadcast(ctx, Tensor::empty(ctx, {1}, DType::f32), 1).wait(ctx);
      } catch (const std::exception& error) {
        messages[static_cast<std::size_t>(rank)] = error.what();
        tell_others(*world, error);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(messages[1], "corpus.idx is damaged");
  for (const int rank : {0, 2}) {
    const std::string& message = messages[static_cast<std::size_t>(rank)];
    EXPECT_EQ(message.rfind("rank 1 failed: corpus.idx is damaged", 0), 0u) << message;
    EXPECT_TRUE(contains(message, " on group world (ranks 0, 1, 2) at world_test.cpp")) << message;
  }
  Store store("127.0.0.1", server.port(), "secret", 5);
  EXPECT_EQ(store.get(error_key("world-0", 1), 1), "rank 1 failed: corpus.idx is damaged");
  std::string value;
  EXPECT_FALSE(store.try_get(error_key("world-0", 0), value)) << value;
}

}  // namespace
}  // namespace tessera
