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

}  // namespace tessera::test
