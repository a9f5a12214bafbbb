#include <atomic>
#include <chrono>
#include <thread>

#include "tests/comm/conformance.hpp"
#include "tests/comm/gloo_support.hpp"

namespace tessera::test {

INSTANTIATE_TEST_SUITE_P(Gloo, Conformance, testing::Values(Backend{"gloo", 3, run_gloo}), backend_name);
INSTANTIATE_TEST_SUITE_P(Gloo, ConformanceFaults, testing::Values(Backend{"gloo", 4, run_gloo}),
                         backend_name);

TEST(Gloo, ARankThatLeavesFinishesWhatItCalledAndCallsNothingMore) {
  run_gloo(3, {.timeout_s = 30}, [](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    const auto pair = comm->split(comm->rank() == 0 ? -1 : 0, comm->rank(), "pair");
    const Tensor x = tensor_of(ctx, DType::f32, std::vector<double>(100'000, 1.0));
    const Pending sum = comm->all_reduce(ctx, x);
    if (comm->rank() == 0) {
      comm->leave();
      EXPECT_TRUE(sum.done());
      comm->leave();
      const std::string message = message_of<CommunicationError>([&] { comm->barrier(ctx); });
      EXPECT_TRUE(message.find("rank 0") != std::string::npos) << message;
      EXPECT_TRUE(message.find("has left the job") != std::string::npos) << message;
      EXPECT_EQ(read_values(x)[99'999], 3.0);
      return;
    }
    sum.wait(ctx);
    EXPECT_EQ(read_values(x)[99'999], 3.0);
    for (int i = 0; i < 5; ++i) pair->barrier(ctx);
    const std::string message = message_of<CommunicationError>([&] { comm->barrier(ctx); });
    EXPECT_TRUE(message.find("has ended its part in the job") != std::string::npos) << message;
  });
}

/// As Ctrl-C does in a Python script: in a collective, and in a message that does not come.
TEST(Gloo, WhoWaitsMayBeInterruptedAndTheOthersAreTold) {
  struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (const bool collective : {true, false}) {
    std::atomic<bool> asked = false;
    std::atomic<int> looks = 0;
    const auto look = [&] {
      if (++looks; asked.exchange(false)) throw Interrupted("KeyboardInterrupt\nwith details");
    };
    const auto rank = [&](const std::shared_ptr<Communicator>& comm) {
      const ExecCtx ctx = ExecCtx::cpu(1, 1);
      const Tensor x = tensor_of(ctx, DType::f32, std::vector<double>(10, 1.0));
      const auto until = [&](const auto& condition) {
        for (int i = 0; i < 6000 && !condition(); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
      };
      if (comm->rank() == 0) {
        const auto wait = [&] {
          if (collective) return comm->all_reduce(ctx, x).wait(ctx);
          comm->recv(ctx, x, 1).wait(ctx);
        };
        EXPECT_EQ(message_of<Interrupted>(wait), "KeyboardInterrupt\nwith details");
        EXPECT_TRUE(message_of<CommunicationError>(wait).starts_with("rank 0 failed: KeyboardInterrupt ["));
        return;
      }
      const int before = looks;
      until([&] { return looks > before + 2; });
      asked = true;
      until([&] { return !comm->failure().empty(); });
      const std::string message = message_of<CommunicationError>([&] { comm->barrier(ctx); });
      EXPECT_TRUE(message.starts_with("rank 0 failed: KeyboardInterrupt")) << message;
    };
    run_gloo_watched(2, {.timeout_s = 120}, rank, look);
  }
}

/// A wait that is looked after is still a wait: slow messages arrive whole.
TEST(Gloo, LookingAroundLosesNoMessage) {
  const auto rank = [](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    for (int i = 0; i < 4; ++i) {
      const Tensor x = tensor_of(ctx, DType::f32, std::vector<double>(1000, i + 1.0));
      if (comm->rank() == 1) {
        std::this_thread::sleep_for(std::chrono::duration<double>(kWhileWaiting * (0.9 + 0.1 * i)));
        comm->send(ctx, x, 0).wait(ctx);
      } else {
        const Tensor y = tensor_of(ctx, DType::f32, std::vector<double>(1000, 0.0));
        comm->recv(ctx, y, 1).wait(ctx);
        EXPECT_EQ(read_values(y), read_values(x));
      }
    }
  };
  run_gloo_watched(2, {.timeout_s = 120}, rank, [] {});
}

}  // namespace tessera::test
