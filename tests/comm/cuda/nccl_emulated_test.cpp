/// What can be seen of NCCL, and done to it, on the emulator only.

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/comm/gloo_support.hpp"
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

/// Passes everything on, and keeps what this rank says to others.
class Overheard : public Communicator {
 public:
  struct Words {
    std::mutex mutex;
    std::vector<std::string> said;
  };
  Overheard(std::shared_ptr<Communicator> under, std::shared_ptr<Words> words)
      : Communicator(under->rank(), under->size(), under->name(), under->options()),
        under_(std::move(under)),
        words_(std::move(words)) {}
  void abort(const std::string& reason) override { under_->abort(reason); }
  std::string failure() const override { return under_->failure(); }

 protected:
  Pending start(const ExecCtx& ctx, Request request) override {
    if (request.operation == Operation::all_gather) keep(request.in);
    for (const Transfer& transfer : request.transfers) {
      if (transfer.kind == Transfer::Kind::send) keep(transfer.tensor);
    }
    return start_on(*under_, ctx, std::move(request));
  }
  std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name, std::uint64_t sequence,
                                         const Where& where) override {
    return std::make_shared<Overheard>(split_on(*under_, color, key, name, sequence, where), words_);
  }

 private:
  void keep(const Tensor& x) {
    const std::lock_guard lock(words_->mutex);
    words_->said.emplace_back(static_cast<const char*>(x.raw()), x.nbytes());
  }
  std::shared_ptr<Communicator> under_;
  std::shared_ptr<Words> words_;
};

/// NCCL meets by these alone, so whoever has one can come as a rank: every one goes over connections whose
/// ends have proved that they belong to the job.
TEST(CudaNccl, IdentifiersTravelOverTheRanksConnectionsOnly) {
  const auto words = std::make_shared<Overheard::Words>();
  const tessera_emulator::NcclCounts before = tessera_emulator::nccl_counts();
  run_gloo(2, {.timeout_s = 30}, [&](const auto& gloo) {
    with_nccl(
        std::make_shared<Overheard>(gloo, words), gloo->rank() % cuda_devices().count, [](const auto& comm) {
          const ExecCtx ctx = context();
          const Tensor x = tensor_of(ctx, DType::f32, {1.0}), y = tensor_of(ctx, DType::f32, {0.0});
          const int other = 1 - comm->rank();
          finish(comm->all_reduce(ctx, x), ctx);
          finish(
              comm->exchange(ctx, {{Transfer::Kind::send, x, other, 0}, {Transfer::Kind::recv, y, other, 0}}),
              ctx);
          EXPECT_EQ(read_values(y), std::vector<double>{2.0});
        });
  });
  const tessera_emulator::NcclCounts after = tessera_emulator::nccl_counts();
  std::set<std::string> ids;
  for (const std::string& said : words->said) {
    for (std::size_t at = 0; at + sizeof(ncclUniqueId) <= said.size(); at += sizeof(ncclUniqueId)) {
      const std::string id = said.substr(at, sizeof(ncclUniqueId));
      if (id.find_first_not_of('\0') != std::string::npos) ids.insert(id);
    }
  }
  EXPECT_EQ(after.made_by_id - before.made_by_id, 2u * 3u)
      << "the world's, and one for each direction of messages";
  EXPECT_EQ(ids.size(), 3u) << "each of them was said to the other rank";
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
