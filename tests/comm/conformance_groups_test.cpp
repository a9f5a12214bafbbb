#include <atomic>

#include "tests/comm/conformance.hpp"
#include "tests/support/timeline.hpp"

// Messages, overlap, groups, counters, refusals.

namespace tessera::test {
namespace {

TEST_P(Conformance, ExchangeBothWaysAtOnce) {
  on_each_size(2, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    const int right = (rank + 1) % n, left = (rank + n - 1) % n;
    for (const DType dtype : all_dtypes()) {
      for (const std::int64_t length : {0, 1, 33, dtype == DType::f32 ? 70001 : 501}) {
        const Tensor to_right = tensor_of(ctx, dtype, marks(rank, 0, length));
        const Tensor to_left = tensor_of(ctx, dtype, marks(rank, 5, length));
        const Tensor from_right = Tensor::empty(ctx, {length}, dtype);
        const Tensor from_left = Tensor::empty(ctx, {length}, dtype);
        comm->exchange(ctx, {{Transfer::Kind::send, to_right, right, 1},
                             {Transfer::Kind::send, to_left, left, 2},
                             {Transfer::Kind::recv, from_right, right, 2},
                             {Transfer::Kind::recv, from_left, left, 1}})
            .wait(ctx);
        EXPECT_EQ(read_values(from_left), marks(left, 0, length)) << dtype;
        EXPECT_EQ(read_values(from_right), marks(right, 5, length)) << dtype;
      }
    }
  });
}

TEST_P(Conformance, MessagesMatchByTagThenByOrder) {
  if (!GetParam().tags) GTEST_SKIP() << "messages carry no tags";
  on_each_size(2, 3, [](const auto& comm) {
    const ExecCtx ctx = context();
    constexpr int kTags = 20, kEach = 3;
    std::vector<Pending> pending;
    if (comm->rank() == 0) {
      for (int i = 0; i < kEach; ++i) {
        for (int tag = 0; tag < kTags; ++tag) {
          const Tensor x = tensor_of(ctx, DType::i64, {static_cast<double>(100 * tag + i)});
          pending.push_back(comm->send(ctx, x, 1, static_cast<std::uint32_t>(tag)));
        }
      }
    } else if (comm->rank() == 1) {
      std::vector<Tensor> received;
      for (int tag = kTags - 1; tag >= 0; --tag) {
        for (int i = 0; i < kEach; ++i) {
          received.push_back(Tensor::empty(ctx, {1}, DType::i64));
          pending.push_back(comm->recv(ctx, received.back(), 0, static_cast<std::uint32_t>(tag)));
        }
      }
      for (auto p = pending.rbegin(); p != pending.rend(); ++p) p->wait(ctx);
      std::size_t next = 0;
      for (int tag = kTags - 1; tag >= 0; --tag) {
        for (int i = 0; i < kEach; ++i) EXPECT_EQ(read_values(received[next++])[0], 100 * tag + i);
      }
    }
    for (const Pending& p : pending) p.wait(ctx);
    comm->barrier(ctx);
  });
}

/// The order of a pipeline's ends: everybody sends first and receives later.
TEST_P(Conformance, SendsDoNotWaitForTheirReceiver) {
  on_each_size(2, 4, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), peer = (comm->rank() + 1) % n, other = (comm->rank() + n - 1) % n;
    std::vector<Pending> sends;
    for (int i = 0; i < 4; ++i) {
      sends.push_back(comm->send(ctx, tensor_of(ctx, DType::f32, marks(comm->rank(), i, 5000)), peer, 9));
    }
    for (int i = 0; i < 4; ++i) {
      const Tensor x = Tensor::empty(ctx, {5000}, DType::f32);
      comm->recv(ctx, x, other, 9).wait(ctx);
      EXPECT_EQ(read_values(x), marks(other, i, 5000));
    }
    for (const Pending& send : sends) send.wait(ctx);
  });
}

TEST_P(Conformance, ManyOperationsInFlightWaitedBackwards) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    std::vector<Tensor> sums, gathered;
    std::vector<Pending> pending;
    for (int i = 0; i < 12; ++i) {
      sums.push_back(tensor_of(ctx, DType::f32, marks(rank, i, 100 + i)));
      pending.push_back(comm->all_reduce(ctx, sums.back()));
      gathered.push_back(Tensor::empty(ctx, {3 * n}, DType::bf16));
      const Tensor own = tensor_of(ctx, DType::bf16, marks(rank, i, 3));  // only the operation holds it
      pending.push_back(comm->all_gather(ctx, own, gathered.back()));
    }
    for (auto p = pending.rbegin(); p != pending.rend(); ++p) p->wait(ctx);
    ctx.stream->synchronize();
    for (int i = 0; i < 12; ++i) {
      const auto k = static_cast<std::size_t>(i);
      EXPECT_TRUE(pending[2 * k].done());
      EXPECT_EQ(read_values(sums[k]), reduced_marks(n, ReduceOp::sum, i, 100 + i, DType::f32));
      for (int r = 0; r < n; ++r) EXPECT_EQ(read_values(gathered[k].narrow(0, 3 * r, 3)), marks(r, i, 3));
    }
    pending.front().wait(ctx);  // again: nothing happens
    Pending().wait(ctx);
  });
}

TEST_P(Conformance, OperationsLetGoOfTheirTensors) {
  on_each_size(1, 3, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor x = tensor_of(ctx, DType::f32, marks(0, 0, 5));
    const Pending pending = comm->all_reduce(ctx, x);
    pending.wait(ctx);
    EXPECT_TRUE(x.is_unique());
  });
}

TEST_P(Conformance, SplitByColorInOrderOfKeys) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    const auto parity = comm->split(rank % 2, -rank, "parity");
    ASSERT_TRUE(parity);
    EXPECT_EQ(parity->name(), "parity");
    const int members = rank % 2 == 0 ? (n + 1) / 2 : n / 2;
    ASSERT_EQ(parity->size(), members);
    EXPECT_EQ(parity->rank(), members - 1 - rank / 2);  // keys fall as ranks rise
    const Tensor ranks = Tensor::empty(ctx, {members}, DType::i32);
    parity->all_gather(ctx, tensor_of(ctx, DType::i32, {static_cast<double>(rank)}), ranks).wait(ctx);
    const std::vector<double> gathered = read_values(ranks);
    for (int i = 0; i < members; ++i) {
      EXPECT_EQ(gathered[static_cast<std::size_t>(i)], rank % 2 + 2 * (members - 1 - i));
    }

    const auto without_last = comm->split(rank == n - 1 ? -1 : 7, 0, "without last");
    EXPECT_EQ(without_last == nullptr, rank == n - 1);
    if (without_last) {
      EXPECT_EQ(without_last->rank(), rank);  // equal keys: in order of ranks
    }

    const auto pair = parity->split(parity->rank() / 2, parity->rank(), "pair");
    ASSERT_TRUE(pair);
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    pair->all_reduce(ctx, x).wait(ctx);
    EXPECT_EQ(read_values(x)[0], pair->size());
    const Tensor y = tensor_of(ctx, DType::f32, {1.0});  // the first group is as it was
    comm->all_reduce(ctx, y).wait(ctx);
    EXPECT_EQ(read_values(y)[0], n);
  });
}

TEST_P(Conformance, BarrierHoldsUntilAllAreThere) {
  std::atomic<int> arrived{0};
  on_each_size(1, 5, [&](const auto& comm) {
    const ExecCtx ctx = context();
    for (int round = 1; round <= 5; ++round) {
      if (comm->rank() == round % comm->size()) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      ++arrived;
      comm->barrier(ctx);
      EXPECT_EQ(arrived.load(), round * comm->size());
      comm->barrier(ctx);
    }
    comm->barrier(ctx);
    if (comm->rank() == 0) arrived = 0;
  });
}

TEST_P(Conformance, BytesSentFollowTheFormula) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const auto n = static_cast<std::uint64_t>(comm->size()), rank = static_cast<std::uint64_t>(comm->rank());
    const auto spent = [&](const auto& call) {
      comm->reset_stats();
      call();
      EXPECT_EQ(comm->stats().operations, 1u);
      return comm->stats().bytes_sent;
    };
    const auto empty = [&](std::int64_t count, DType dtype) {
      const Tensor x = Tensor::empty(ctx, {count}, dtype);
      write_values(x, marks(0, 0, count));
      return x;
    };
    for (const std::uint64_t length : {0u, 1u, 60u, 61u, 1003u}) {
      const Tensor x = empty(static_cast<std::int64_t>(length), DType::f32);
      const std::uint64_t block = length / n + (rank < length % n ? 1 : 0);
      EXPECT_EQ(spent([&] { comm->all_reduce(ctx, x).wait(ctx); }), 4 * (length - block + (n - 1) * block));
      EXPECT_EQ(spent([&] { comm->broadcast(ctx, x, 0).wait(ctx); }), rank == 0 ? 4 * (n - 1) * length : 0);
    }
    const Tensor whole = empty(6 * comm->size(), DType::bf16), own = empty(6, DType::bf16);
    EXPECT_EQ(spent([&] { comm->reduce_scatter(ctx, whole, own).wait(ctx); }), 2 * 6 * (n - 1));
    EXPECT_EQ(spent([&] { comm->all_gather(ctx, own, whole).wait(ctx); }), 2 * 6 * (n - 1));
    const Counts counts = uneven(comm->size(), 2);
    const Tensor all = empty(sum_of(counts, comm->size()), DType::f64);
    const Tensor mine = empty(counts[rank], DType::f64);
    const auto own_bytes = 8 * static_cast<std::uint64_t>(counts[rank]);
    EXPECT_EQ(spent([&] { comm->reduce_scatter(ctx, all, mine, counts).wait(ctx); }),
              all.nbytes() - own_bytes);
    EXPECT_EQ(spent([&] { comm->all_gather(ctx, mine, all, counts).wait(ctx); }), (n - 1) * own_bytes);
    const Counts each(n, 6);
    const Tensor received = empty(6 * comm->size(), DType::bf16);
    EXPECT_EQ(spent([&] { comm->all_to_all(ctx, whole, received, each, each).wait(ctx); }), 2 * 6 * (n - 1));
    EXPECT_EQ(spent([&] { comm->barrier(ctx); }), 0u);
    if (n > 1) {
      const int right = static_cast<int>((rank + 1) % n), left = static_cast<int>((rank + n - 1) % n);
      EXPECT_EQ(spent([&] {
                  comm->exchange(ctx, {{Transfer::Kind::send, whole, right, 0},
                                       {Transfer::Kind::recv, received, left, 0}})
                      .wait(ctx);
                }),
                whole.nbytes());
    }
  });
}

TEST_P(Conformance, BlockedTimeIsCounted) {
  on_each_size(2, 3, [](const auto& comm) {
    const ExecCtx ctx = context();
    comm->barrier(ctx);
    comm->reset_stats();
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    if (comm->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    finish(comm->all_reduce(ctx, x), ctx);
    if (comm->rank() == 0) {
      EXPECT_LT(comm->stats().wait_s, 0.06);
    } else {
      // On CUDA it is found out a little later.
      for (int i = 0; i < 1000 && comm->stats().wait_s <= 0.06; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_GT(comm->stats().wait_s, 0.06);
    }
  });
}

TEST_P(Conformance, TracesTellWhatFinished) {
  Timeline timeline;
  on_each_size(2, 2, [&](const auto& comm) {
    const ExecCtx ctx = context();
    ctx.stream->set_trace(timeline.start(comm->rank(), *ctx.stream));
    const Tensor x = tensor_of(ctx, DType::f32, {1.0});
    comm->all_reduce(ctx, x).wait(ctx);
    comm->broadcast(ctx, x, 0).wait(ctx);
    (comm->rank() == 0 ? comm->send(ctx, x, 1) : comm->recv(ctx, x, 0)).wait(ctx);
    comm->barrier(ctx);
  });
  if (GetParam().max_ranks < 2) GTEST_SKIP() << "a group of one has no operations";
  for (const int rank : {0, 1}) {
    std::vector<std::string> names;
    for (const TimedWork& each : timeline.of(rank, "world")) {
      names.push_back(each.work.name);
      EXPECT_LE(each.begin_s, each.end_s);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"all_reduce world", "broadcast world", "exchange world",
                                               "barrier world"}));
  }
}

TEST_P(Conformance, BadArgumentsNameOperationAndGroup) {
  on_each_size(1, 3, [](const auto& comm) {
    const ExecCtx ctx = context();
    const Tensor six = tensor_of(ctx, DType::f32, marks(0, 0, 6));
    const Tensor wide = Tensor::empty(ctx, {2, 3}, DType::f32);
    const int n = comm->size();
    const auto refused = [&](const char* operation, const auto& call) {
      const std::string message = message_of<InvalidArgument>(call);
      EXPECT_NE(message.find(operation), std::string::npos) << message;
      EXPECT_NE(message.find("world"), std::string::npos) << message;
      EXPECT_NE(message.find("conformance_groups_test.cpp"), std::string::npos) << message;
    };
    refused("all_reduce", [&] { comm->all_reduce(ctx, wide.transpose(0, 1)); });
    refused("all_reduce", [&] { comm->all_reduce(ctx, Tensor()); });
    refused("all_reduce", [&] { comm->all_reduce(ctx, Tensor::empty(ctx, {2}, DType::u8)); });
    refused("reduce_scatter", [&] { comm->reduce_scatter(ctx, six, six.narrow(0, 0, 1), Counts{1}); });
    refused("reduce_scatter",
            [&] { comm->reduce_scatter(ctx, six, Tensor::empty(ctx, {6 / n + 1}, DType::f32)); });
    refused("all_gather", [&] { comm->all_gather(ctx, six, Tensor::empty(ctx, {6 * n}, DType::f64)); });
    refused("all_gather", [&] { comm->all_gather(ctx, six, Tensor::empty(ctx, {6 * n + 1}, DType::f32)); });
    refused("broadcast", [&] { comm->broadcast(ctx, six, n); });
    refused("all_to_all", [&] { comm->all_to_all(ctx, six, six, Counts{6}, Counts{6}); });
    refused("exchange", [&] { comm->send(ctx, six, comm->rank()); });
    refused("exchange", [&] { comm->recv(ctx, six, n); });
    if (n == 3) {
      refused("reduce_scatter", [&] { comm->reduce_scatter(ctx, six, six.narrow(0, 1, 2)); });
      refused("reduce_scatter", [&] { comm->reduce_scatter(ctx, six, wide, Counts{7, -1, 0}); });
      refused("all_gather",
              [&] { comm->all_gather(ctx, six.narrow(0, (comm->rank() * 2 + 1) % 5, 2), six); });
    }
    comm->barrier(ctx);  // what was refused was never started
  });
}

}  // namespace
}  // namespace tessera::test
