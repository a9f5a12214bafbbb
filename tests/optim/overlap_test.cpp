// When reductions and gathers start, who waits for them, and what they send.

#include <chrono>
#include <thread>

#include "tests/optim/distributed_support.hpp"
#include "tests/support/timeline.hpp"

namespace tessera {
namespace {

using namespace test;

ParamStoreOptions one_parameter_per_bucket(DType compute, int zero_stage) {
  return {.compute = compute, .zero_stage = zero_stage, .bucket_elements = 1};
}

TEST(Overlap, ABucketIsReducedBeforeTheRestOfBackward) {
  for (const int stage : {0, 1}) {
    Timeline timeline;
    run_local(2, {.timeout_s = 60}, [&](auto world) {
      Rank rank(world, {.dp = 2}, one_parameter_per_bucket(DType::f32, stage), {});
      rank.ctx.stream->set_trace(timeline.start(world->rank(), *rank.ctx.stream));
      world->barrier(rank.ctx);
      rank.store->gradient().begin_call([](const Parameter&) { return 1; });
      const auto give = [&](std::size_t slot) {
        Parameter& p = *rank.store->slots()[slot].parameter;
        write_gradient(p, Contributions{}.of(p, 0, rank.at.dp, 0));
        rank.store->gradient().ready(p);
      };
      give(0);
      // On both ranks the first bucket is done while all other gradients are still to come.
      for (const int each : {0, 1}) {
        for (int i = 0; i < 20'000 && timeline.of(each, "dp").empty(); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_FALSE(timeline.of(each, "dp").empty());
      }
      for (std::size_t i = 1; i < rank.store->slots().size(); ++i) give(i);
      rank.store->gradient().finish_call();
      world->barrier(rank.ctx);
    });
    for (const int each : {0, 1}) {
      EXPECT_EQ(timeline.of(each, "dp", stage == 0 ? "all_reduce" : "reduce_scatter").size(), 16u);
      EXPECT_EQ(timeline.of(each, "dp").size(), 16u);
    }
  }
}

TEST(Overlap, ReductionsStartInTheOrderOfTheBucketsWhateverIsReadyFirst) {
  run_local(2, {.timeout_s = 60, .check = true}, [&](auto world) {
    Rank rank(world, {.dp = 2}, one_parameter_per_bucket(DType::f32, 1), {});
    rank.store->gradient().begin_call([](const Parameter& p) { return p.name() == "layer1.scale" ? 2 : 1; });
    const auto started = [&] { return rank.mesh[Axis::dp].stats().operations; };
    const auto& slots = rank.store->slots();
    std::vector<Parameter*> order;
    for (const ParamSlot& slot : slots) order.push_back(slot.parameter);
    EXPECT_EQ(order[0]->name(), "head");
    EXPECT_EQ(order[2]->name(), "layer1.scale");
    rank.mesh[Axis::dp].reset_stats();
    // The ranks finish in different orders; neither starts anything before its turn.
    const std::vector<std::size_t> arrival = world->rank() == 0 ? std::vector<std::size_t>{3, 2, 0, 1, 2, 4}
                                                                : std::vector<std::size_t>{2, 2, 1, 3, 0, 4};
    const std::vector<std::uint64_t> expected = world->rank() == 0
                                                    ? std::vector<std::uint64_t>{0, 0, 1, 2, 4, 5}
                                                    : std::vector<std::uint64_t>{0, 0, 0, 0, 4, 5};
    for (std::size_t i = 0; i < arrival.size(); ++i) {
      rank.store->gradient().ready(*order[arrival[i]]);
      EXPECT_EQ(started(), expected[i]) << "rank " << world->rank() << " after " << i;
    }
    EXPECT_THROW(rank.store->gradient().ready(*order[0]), InvalidArgument);
    rank.store->gradient().finish_call();
    EXPECT_EQ(started(), slots.size());
  });
}

TEST(Overlap, AnAbandonedCallLeavesTheRanksInStep) {
  const Grid grid{.dp = 3};
  Serial serial(grid, {}, {.clip_grad = 0});
  serial.call({});
  serial.step();
  Collected found;
  run_local(3, {.timeout_s = 60, .check = true}, [&](auto world) {
    Rank rank(world, grid, {.zero_stage = 1, .bucket_elements = 200}, {.clip_grad = 0});
    for (const bool by_discard : {false, true}) {
      rank.store->gradient().begin_call([](const Parameter&) { return 1; });
      // Each rank stops somewhere else.
      for (int i = 0; i < 4 * world->rank(); ++i) {
        Parameter& p = *rank.store->slots()[static_cast<std::size_t>(i)].parameter;
        write_gradient(p, Contributions{.call = 9}.of(p, 0, rank.at.dp, 0));
        rank.store->gradient().ready(p);
      }
      if (by_discard) rank.store->gradient().discard();
    }
    rank.call({});
    rank.optimizer->step(0.05, 0.1);
    found.add_weights(rank);
  });
  EXPECT_EQ(found.whole(), serial.weights());
}

/// Ways to read weights right after an update, each of which must give the new ones. `buffer`: what kernels
/// read, got before the update.
using Reader = std::function<Whole(Rank&, const Tensor& buffer)>;
const std::vector<Reader> kReaders = {
    [](Rank& r, const Tensor&) {
      Whole w;
      for (const Parameter* p : r.declared.parameters) w[p->name()] = p->value().to_floats();
      return w;
    },
    [](Rank& r, const Tensor&) {
      Whole w;
      for (const Parameter* p : r.declared.parameters) {
        if (p->traits().reads_main) w[p->name()] = p->main().to_floats();
      }
      return w;
    },
    [](Rank& r, const Tensor&) {
      Whole w;
      for (const Parameter* p : r.declared.parameters) {
        if (p->traits().reads_main) w[p->name()] = r.store->weights().main(*p).to_floats();
      }
      return w;
    },
    [](Rank& r, const Tensor&) {
      const bool copy = r.store->options().compute == DType::bf16;
      return Whole{{"buffer", copy ? r.store->weights().model_buffer().to_floats()
                                   : r.store->weights().main_buffer().to_floats()}};
    },
    [](Rank& r, const Tensor& buffer) {
      return Whole{{"view", r.store->view(buffer, r.declared["word"]).to_floats()}};
    },
    [](Rank& r, const Tensor&) {
      r.store->weights().refresh_copy();
      Whole w;
      for (const Parameter* p : r.declared.parameters) w[p->name()] = p->value().to_floats();
      return w;
    },
    [](Rank& r, const Tensor&) {
      r.store->weights().gather();
      Whole w;
      for (const Parameter* p : r.declared.parameters)
        w[p->name()] = r.store->weights().whole(*p).to_floats();
      return w;
    },
};

TEST(Gates, WhateverReadsAWeightAfterAnUpdateGetsTheNewOne) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    const auto read = [&](int stage, double delay, const Reader& reader) {
      Collected unused;
      std::vector<Whole> found(2);
      run_local(2, {.timeout_s = 60, .delay_s = delay}, [&](auto world) {
        Rank rank(world, {.dp = 2}, {.compute = compute, .zero_stage = stage, .bucket_elements = 2000}, {});
        const Tensor buffer = compute == DType::bf16 ? rank.store->weights().model_buffer()
                                                     : rank.store->weights().main_buffer();
        for (int step = 0; step < 2; ++step) {  // the second update meets gathers that nobody waited for
          rank.call({.step = step});
          rank.optimizer->step(0.05, 0.1);
        }
        found[static_cast<std::size_t>(world->rank())] = reader(rank, buffer);
      });
      EXPECT_EQ(found[0], found[1]);
      return found[0];
    };
    for (std::size_t i = 0; i < kReaders.size(); ++i) {
      EXPECT_EQ(read(1, 0.02, kReaders[i]), read(0, 0, kReaders[i])) << "reader " << i;
    }
  }
}

TEST(Gates, AnUpdateDoesNotWaitForTheWeightsItSendsOut) {
  run_local(2, {.timeout_s = 60, .delay_s = 0.05}, [&](auto world) {
    Rank rank(world, {.dp = 2}, one_parameter_per_bucket(DType::f32, 1), {});
    rank.call({}, 1.0, false);
    Communicator& data = rank.mesh[Axis::dp];
    data.reset_stats();
    rank.optimizer->step(0.05, 0.1);
    EXPECT_EQ(data.stats().operations, 16u);  // all are under way
    EXPECT_EQ(data.stats().wait_s, 0.0);      // and nobody waited
    rank.declared["word"].value();
    const double waited = data.stats().wait_s;
    rank.declared["word"].value();
    EXPECT_EQ(data.stats().wait_s, waited);
    rank.store->weights().wait();
  });
}

TEST(Gates, AParameterOutlivesItsStore) {
  run_local(2, {.timeout_s = 60, .delay_s = 0.01}, [&](auto world) {
    Rank rank(world, {.dp = 2}, {.zero_stage = 1}, {});
    rank.call({});
    rank.optimizer->step(0.05, 0.1);
    rank.optimizer.reset();
    rank.store.reset();
    EXPECT_EQ(rank.declared["word"].value().numel(), kVocabulary * kWidth);
  });
}

/// Elements of one rank's buffers by what is gathered of them, padding included.
struct Elements {
  std::uint64_t all = 0, gathered_bf16 = 0, gathered_f32 = 0;
};

TEST(Traffic, BytesOfAStepAreTheFormulas) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    for (const std::uint64_t d : {2u, 3u, 4u}) {
      for (const int stage : {0, 1}) {
        run_local(static_cast<int>(d), [&](auto world) {
          Rank rank(world, {.dp = static_cast<int>(d)},
                    {.compute = compute, .zero_stage = stage, .bucket_elements = 500}, {});
          Elements n;
          for (const Bucket& b : rank.store->layout().buckets()) {
            const auto count = static_cast<std::uint64_t>(b.count);
            ASSERT_EQ(count % (64 * d), 0u);
            n.all += count;
            (compute == DType::bf16 && !b.reads_main ? n.gathered_bf16 : n.gathered_f32) += count;
          }
          for (Communicator* comm : {&rank.mesh.world(), &rank.mesh[Axis::dp]}) comm->reset_stats();
          for (int call = 0; call < 2; ++call) rank.call({.call = call});
          rank.optimizer->step(0.05, 0.1);
          rank.store->weights().wait();
          const std::uint64_t reduced = (stage == 0 ? 2 : 1) * 4 * n.all * (d - 1) / d;
          const std::uint64_t gathered =
              stage == 0 ? 0 : (2 * n.gathered_bf16 + 4 * n.gathered_f32) * (d - 1) / d;
          EXPECT_EQ(rank.mesh[Axis::dp].stats().bytes_sent, 2 * reduced + gathered);
          // One double: the rank that sums it sends it to all, the others send theirs to it.
          EXPECT_EQ(rank.mesh.world().stats().operations, 1u);
          EXPECT_EQ(rank.mesh.world().stats().bytes_sent, world->rank() == 0 ? 8 * (d - 1) : 8);
        });
      }
    }
  }
}

TEST(Traffic, ReplicatedSumsSendTheirSharesOnly) {
  run_local(8, [&](auto world) {
    const Grid grid{4, 2, 1};
    Rank rank(world, grid, {.zero_stage = 1, .bucket_elements = 500}, {});
    // Elements of this rank's shares that belong to sums over tensor ranks and over pairs of them.
    std::uint64_t partial = 0, copied = 0;
    for (const ParamSlot& slot : rank.store->slots()) {
      const Range share = rank.store->shards().share(slot.bucket);
      if (slot.parameter->traits().partial_over_tensor)
        partial += static_cast<std::uint64_t>(overlap({slot.offset, slot.numel}, share).count);
      for (const Segment& s : slot.parameter->placement().segments()) {
        if (s.copies > 1)
          copied += static_cast<std::uint64_t>(
              overlap({slot.offset + s.local * kWidth, s.count * kWidth}, share).count);
      }
    }
    Communicator &tensor = rank.mesh[Axis::tp], &block = rank.mesh.tp_block(2);
    tensor.reset_stats();
    block.reset_stats();
    rank.call({});
    const auto part = [](std::uint64_t n, int index, int size) {
      return static_cast<std::uint64_t>(part_of(static_cast<std::int64_t>(n), index, size).count);
    };
    const std::uint64_t own = part(partial, tensor.rank(), 4), pair = part(copied, block.rank(), 2);
    EXPECT_EQ(tensor.stats().bytes_sent, partial > 0 ? 4 * (partial - own + 3 * own) : 0);
    EXPECT_EQ(tensor.stats().operations, partial > 0 ? 1u : 0u);
    EXPECT_EQ(block.stats().bytes_sent, copied > 0 ? 4 * (copied - pair + pair) : 0);
  });
}

}  // namespace
}  // namespace tessera
