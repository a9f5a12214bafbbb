/// What can be seen of NCCL, and done to it, on the emulator only.

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tessera/device/graph.hpp"
#include "tests/comm/gloo_support.hpp"
#include "tests/comm/nccl_support.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include <ctime>

#include "emulator.hpp"
#include "kernels/api/elementwise.hpp"
#include "nccl.h"
#include "tessera/comm/mesh.hpp"

namespace {
thread_local std::uint64_t naps = 0;  ///< sleeps of this thread
}

/// In place of the C library's.
extern "C" int nanosleep(const timespec* duration, timespec* left) {
  ++naps;
  return clock_nanosleep(CLOCK_REALTIME, 0, duration, left);
}

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

/// The emulator knows what NCCL asks of graphs: a call comes out of one that all its ranks recorded together,
/// or plainly on all of them.
TEST(CudaNccl, RanksThatRecordedApartAreFound) {
  for (const bool plain : {false, true}) {
    run_nccl(2, {.timeout_s = 600}, [&](const auto& comm) {
      const ExecCtx ctx = context();
      const Tensor x = tensor_of(ctx, DType::f32, {1.0});
      StreamGraph graph(ctx.stream);
      const auto work = [&] { comm->all_reduce(ctx, x).wait(ctx); };
      const std::string message = message_of<CommunicationError>([&] {
        for (int i = 0; i < 3; ++i) graph.run("sum", work, {.lasting = true});
        if (comm->rank() == 1) {
          graph.run("sum", work, {.lasting = true, .plain = plain});
        } else {
          EXPECT_TRUE(graph.replay("sum"));
        }
        while (comm->failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        comm->barrier(ctx);
      });
      EXPECT_NE(message.find("invalid usage"), std::string::npos) << message;
      ctx.stream->synchronize();
    });
  }
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

/// What NCCL does in the background is waited for awake: a sleep would take longer than the launch.
TEST(CudaNccl, NobodySleepsWhileAnOperationIsLaunched) {
  run_nccl(2, {.timeout_s = 60}, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    finish(comm->all_reduce(ctx, x), ctx);
    // Of many rounds, as a thread that a busy machine has no core for sleeps in the end.
    constexpr int kRounds = 100;
    int without_naps = 0;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t before = naps;
      comm->all_reduce(ctx, x).wait(ctx);
      without_naps += naps == before ? 1 : 0;
    }
    EXPECT_GT(without_naps, kRounds / 10);
    ctx.stream->synchronize();
  });
}

/// Each group costs the host a thread of NCCL's: messages of one call share one.
TEST(CudaNccl, MessagesOfOneCallAreOneGroup) {
  tessera_emulator::NcclCounts before, after;
  run_nccl(3, {.timeout_s = 60}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const std::vector<int> others{(comm->rank() + 1) % 3, (comm->rank() + 2) % 3};
    comm->connect_to(others);
    comm->barrier(ctx);
    if (comm->rank() == 0) before = tessera_emulator::nccl_counts();
    comm->barrier(ctx);
    for (int i = 0; i < 10; ++i) {
      std::vector<Transfer> transfers;
      for (const int other : others) {
        transfers.push_back(
            {Transfer::Kind::send, tensor_of(ctx, DType::f32, {1.0 * comm->rank()}), other, 0});
        transfers.push_back({Transfer::Kind::recv, tensor_of(ctx, DType::f32, {-1.0}), other, 0});
      }
      comm->exchange(ctx, transfers).wait(ctx);
      EXPECT_EQ(read_values(transfers[1].tensor).front(), others[0]);
      EXPECT_EQ(read_values(transfers[3].tensor).front(), others[1]);
    }
    comm->barrier(ctx);
    if (comm->rank() == 0) after = tessera_emulator::nccl_counts();
    comm->barrier(ctx);
  });
  EXPECT_EQ(after.groups - before.groups, 3u * 10u);
}

/// Stages meet their neighbours when the mesh is made, not in the middle of a step.
TEST(CudaNccl, AMeshConnectsStagesWithTheirNeighbours) {
  std::atomic<std::uint64_t> made_by_messages = 0;
  run_nccl(4, {.timeout_s = 60}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const ProcessMesh mesh(comm, {.pp = 4});
    comm->barrier(ctx);
    const std::uint64_t before = tessera_emulator::nccl_counts().made_by_id;
    comm->barrier(ctx);
    Communicator& stages = mesh[Axis::pp];
    const Tensor x = tensor_of(ctx, DType::f32, {1.0}), y = tensor_of(ctx, DType::f32, {0.0});
    finish(stages.exchange(ctx, {{Transfer::Kind::send, x, (stages.rank() + 1) % 4, 0},
                                 {Transfer::Kind::recv, y, (stages.rank() + 3) % 4, 0}}),
           ctx);
    comm->barrier(ctx);
    made_by_messages += tessera_emulator::nccl_counts().made_by_id - before;
    comm->barrier(ctx);
  });
  EXPECT_EQ(made_by_messages, 0u);
}

/// Two stages of a pipeline with receives posted ahead, where a message may stand in the queue of another
/// stream: that ends with an error, and what warns of it is said before.
TEST(CudaNccl, StreamsThatShareAQueueStopEachOther) {
  for (const int queues : {1, 32}) {
    tessera_emulator::set_connections(queues);
    EXPECT_EQ(note_on_connections(queues, {.pp = 2}).empty(), queues == 32);
    std::atomic<int> failed = 0;
    const double timeout_s = queues == 1 ? 3 : 60;
    run_nccl(2, {.timeout_s = timeout_s, .cuda_connections = queues}, [&](const auto& comm) {
      const ExecCtx ctx = context();
      const int other = 1 - comm->rank();
      comm->connect_to(std::vector<int>{other});
      const auto steps = [&] {
        const Tensor x = tensor_of(ctx, DType::f32, {0.0}),
                     y = tensor_of(ctx, DType::f32, {1.0 + comm->rank()});
        const Pending arriving = comm->recv(ctx, x, other), ahead = comm->recv(ctx, y, other);
        comm->barrier(ctx);  // both stand on their lane before anything is sent
        const Tensor z = tensor_of(ctx, DType::f32, {1.0 + comm->rank()});
        const Pending first = comm->send(ctx, z, other), second = comm->send(ctx, z, other);
        for (const Pending& each : {arriving, ahead, first, second}) finish(each, ctx);
        EXPECT_EQ(read_values(x).front(), 1.0 + other);
      };
      if (queues == 32) return steps();
      const std::string message = message_of<CommunicationError>(steps);
      failed += message.find("did not come within") != std::string::npos;
      ctx.stream->synchronize();
    });
    EXPECT_EQ(failed > 0, queues == 1);
  }
  tessera_emulator::set_connections(32);
}

/// A kernel whose code is loaded at its first launch waits for everything on the device, here for a message
/// whose sender waits for this rank.
TEST(CudaNccl, KernelsAreLoadedBeforeTheFirstCollective) {
  tessera_emulator::set_lazy_loading(true);  // as in a process that begins
  std::atomic<std::uint64_t> stops = 0;
  run_nccl(2, {.timeout_s = 20}, [&](const auto& comm) {
    const ExecCtx ctx = context();
    const std::uint64_t before = tessera_emulator::loading_stops();
    const Tensor x = tensor_of(ctx, DType::f32, {0.0, 0.0});
    comm->connect_to(std::vector<int>{1 - comm->rank()});
    Pending arriving;
    if (comm->rank() == 0) arriving = comm->recv(ctx, x, 1);
    const Tensor y = Tensor::empty(ctx, {1000}, DType::f32);
    kernels::cuda::fill_constant({.n = 1000, .value = 2.0f, .x = y.data<float>()},
                                 {.stream = ctx.stream->native()});
    ctx.stream->synchronize();
    comm->barrier(ctx);  // only now does rank 1 send
    if (comm->rank() == 1) arriving = comm->send(ctx, x, 0);
    finish(arriving, ctx);
    stops += tessera_emulator::loading_stops() - before;
  });
  EXPECT_EQ(stops, 0u);
  tessera_emulator::set_lazy_loading(false);
}

}  // namespace
}  // namespace tessera::test
#endif
