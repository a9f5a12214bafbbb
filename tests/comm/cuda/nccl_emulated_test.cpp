/// What can be seen of NCCL, and done to it, on the emulator only.

#include "tests/comm/nccl_support.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include "emulator.hpp"
#include "nccl.h"

namespace tessera::test {
namespace {

TEST(CudaNccl, GroupsAreSplitOffAndTakeNoIdOfTheirOwn) {
  const tessera_emulator::NcclCounts before = tessera_emulator::nccl_counts();
  run_nccl(4, {.timeout_s = 30}, [](const auto& comm) {
    const auto half = comm->split(comm->rank() / 2, 0, "half");
    const auto three = comm->split(comm->rank() == 3 ? -1 : 5, 0, "three");
    const auto alone = half->split(comm->rank(), 0, "alone");
    EXPECT_EQ(alone->size(), 1);
  });
  const tessera_emulator::NcclCounts after = tessera_emulator::nccl_counts();
  EXPECT_EQ(after.made_by_id - before.made_by_id, 4u) << "the world's";
  EXPECT_EQ(after.made_by_split - before.made_by_split, 4u + 3u);
}

/// An error that NCCL reports by the way ends the operation on every rank, long before the deadline.
TEST(CudaNccl, AnAsynchronousErrorEndsTheJob) {
  constexpr int kFaulty = 1;
  run_nccl(3, {.timeout_s = 600}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    const std::string message = message_of<CommunicationError>([&] {
      if (comm->rank() == 2) {  // never comes
        while (comm->failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        comm->barrier(ctx);
      }
      const Pending sum = comm->all_reduce(ctx, x);
      if (comm->rank() == kFaulty) tessera_emulator::plant_nccl_error(kFaulty, ncclRemoteError);
      finish(sum, ctx);
    });
    if (comm->rank() == kFaulty) tessera_emulator::plant_nccl_error(kFaulty, ncclSuccess);
    for (const char* part : {"all_reduce", "on group world (ranks 0, 1, 2) at ", "nccl_emulated_test.cpp",
                             "NCCL on rank 1 reports remote process exited or there was a network error"})
      EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
    EXPECT_EQ(message.find("did not end within"), std::string::npos) << message;
    ctx.stream->synchronize();  // the kernels were ended
  });
}

/// The same while a group is being split off: nobody waits for ever for a group that does not come.
TEST(CudaNccl, AnErrorDuringASplitEndsTheJob) {
  constexpr int kFaulty = 1;
  run_nccl(3, {.timeout_s = 600}, [](const auto& comm) {
    if (comm->rank() == kFaulty) tessera_emulator::plant_nccl_error(kFaulty, ncclInternalError);
    const std::string message = message_of<CommunicationError>([&] { comm->split(0, 0, "part"); });
    if (comm->rank() == kFaulty) {
      tessera_emulator::plant_nccl_error(kFaulty, ncclSuccess);
      EXPECT_NE(message.find("ncclCommSplit failed: internal error"), std::string::npos) << message;
      EXPECT_NE(message.find("group world (ranks 0, 1, 2)"), std::string::npos) << message;
    }
    EXPECT_FALSE(comm->failure().empty());
  });
}

}  // namespace
}  // namespace tessera::test
#endif
