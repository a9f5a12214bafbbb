// What ranks save covers the model once; what they load makes any layout go on as another would have.

#include <array>
#include <atomic>

#include "tests/optim/distributed_support.hpp"

namespace tessera {
namespace {

using namespace test;

const OptimizerConfig kConfig{.eps = 1e-5, .clip_grad = 0};

ParamStoreOptions options(DType compute, int zero_stage, bool split = false) {
  return {.compute = compute, .split_main = split, .zero_stage = zero_stage, .bucket_elements = 500};
}

std::vector<StatePiece> all_pieces(Rank& rank, PieceSet set) {
  auto pieces = rank.store->pieces(set);
  for (StatePiece& piece : rank.optimizer->pieces(set)) pieces.push_back(std::move(piece));
  return pieces;
}

/// What all ranks save together, by name; counts how often each element was saved.
struct Saved {
  std::mutex mutex;
  Whole values, times;

  void add(Rank& rank) {
    for (const StatePiece& piece : all_pieces(rank, PieceSet::owned)) {
      const auto elements = global_indices(*piece.parameter);
      const auto found = piece.values.read(rank.ctx).to_floats();
      ASSERT_EQ(static_cast<std::int64_t>(found.size()), piece.end - piece.begin);
      const std::lock_guard lock(mutex);
      auto& whole = values[piece.name()];
      auto& count = times[piece.name()];
      whole.resize(static_cast<std::size_t>(piece.parameter->placement().global().numel()));
      count.resize(whole.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto at = static_cast<std::size_t>(elements[static_cast<std::size_t>(piece.begin) + i]);
        whole[at] = found[i];
        count[at] += 1;
      }
    }
  }
  void load(Rank& rank) const {
    for (const StatePiece& piece : all_pieces(rank, PieceSet::held)) {
      const auto elements = global_indices(*piece.parameter);
      const auto& whole = values.at(piece.name());
      std::vector<float> target;
      for (std::int64_t i = piece.begin; i < piece.end; ++i)
        target.push_back(whole[static_cast<std::size_t>(elements[static_cast<std::size_t>(i)])]);
      piece.values.write(rank.ctx, target.data());
    }
    rank.store->weights().gather();
  }
};

void train(Rank& rank, const Grid& gradients_of, int from, int to) {
  for (int step = from; step < to; ++step) {
    // The whole gradient, from this rank's place: data rank 0 and part 0 of each sum give all of it.
    const Whole whole = whole_gradient(gradients_of, {.step = step});
    rank.store->gradient().begin_call();
    for (Parameter* p : rank.declared.parameters) {
      const auto elements = global_indices(*p);
      const bool first_part = !p->traits().partial_over_tensor || rank.at.tp == 0;
      const bool first_stage = !p->traits().tied || rank.at.pp == 0;
      std::vector<float> values(elements.size(), 0.0f);
      if (rank.at.dp == 0 && first_part && first_stage) {
        for (std::size_t i = 0; i < elements.size(); ++i)
          values[i] = whole.at(p->name())[static_cast<std::size_t>(elements[i])];
      }
      for (const Segment& s : p->placement().segments()) {
        if (s.copy > 0) std::fill_n(values.begin() + s.local * kWidth, s.count * kWidth, 0.0f);
      }
      write_gradient(*p, values);
    }
    rank.store->gradient().finish_call();
    rank.optimizer->step(0.05, 0.1);
  }
}

class Resharding : public testing::TestWithParam<std::tuple<Grid, int, DType, bool>> {};

/// In bf16 half of the readers split their main weights: what is saved is fp32 either way.
TEST_P(Resharding, SavedUnderOneLayoutEveryOtherGoesOnFromIt) {
  const auto [grid, stage, compute, split] = GetParam();
  const Grid source{2, 2, 1};
  Serial serial(source, {.compute = compute}, kConfig);
  for (int step = 0; step < 5; ++step) {
    serial.call({.step = step});
    serial.step();
  }
  Saved saved;
  run_local(grid.tp * grid.dp * grid.pp,
            [&, grid = grid, stage = stage, compute = compute, split = split](auto world) {
              Rank rank(world, grid, options(compute, stage, split), kConfig);
              train(rank, source, 0, 3);
              saved.add(rank);
            });
  EXPECT_EQ(saved.values.size(), 3u * 16u);
  for (const auto& [name, times] : saved.times) {
    EXPECT_EQ(times, std::vector<float>(times.size(), 1.0f)) << name;
  }
  for (const Grid& target : {Grid{1, 1, 1}, Grid{1, 3, 1}, Grid{4, 1, 1}, Grid{2, 2, 2}}) {
    for (const int target_stage : {0, 1}) {
      Collected found;
      run_local(target.tp * target.dp * target.pp, [&, compute = compute](auto world) {
        const bool splits = compute == DType::bf16 && (target.tp + target_stage) % 2 == 0;
        Rank rank(world, target, options(compute, target_stage, splits), kConfig);
        saved.load(rank);
        rank.optimizer->set_update_state({.updates = 3});
        train(rank, source, 3, 5);
        found.add_weights(rank);
      });
      EXPECT_EQ(found.whole(), serial.weights());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Resharding,
                         testing::Values(std::tuple{Grid{1, 1, 1}, 0, DType::f32, false},
                                         std::tuple{Grid{1, 4, 1}, 0, DType::bf16, false},
                                         std::tuple{Grid{1, 3, 1}, 1, DType::f32, false},
                                         std::tuple{Grid{4, 2, 2}, 1, DType::bf16, false},
                                         std::tuple{Grid{4, 2, 2}, 1, DType::bf16, true},
                                         std::tuple{Grid{1, 4, 1}, 0, DType::bf16, true},
                                         std::tuple{Grid{4, 2, 2}, 0, DType::f32, false},
                                         std::tuple{Grid{2, 2, 2}, 1, DType::f32, false}));

/// Elements that each rank saves: weights, or one kind of state.
std::vector<std::int64_t> saved_by_rank(const Grid& grid, const ParamStoreOptions& options, bool state) {
  std::vector<std::int64_t> saved(static_cast<std::size_t>(grid.tp * grid.dp * grid.pp));
  std::mutex mutex;
  run_local(grid.tp * grid.dp * grid.pp, [&](auto world) {
    Rank rank(world, grid, options, kConfig);
    const std::lock_guard lock(mutex);
    for (const StatePiece& piece :
         state ? rank.optimizer->pieces(PieceSet::owned, "adam_m") : rank.store->pieces(PieceSet::owned))
      saved[static_cast<std::size_t>((rank.at.pp * grid.tp + rank.at.tp) * grid.dp + rank.at.dp)] +=
          piece.end - piece.begin;
  });
  return saved;
}

TEST(Pieces, WhatDataRanksHoldInCommonIsSavedInEqualParts) {
  const Grid grid{2, 3, 2};
  const auto expect_equal = [&](const std::vector<std::int64_t>& saved) {
    for (std::size_t first = 0; first < saved.size(); first += 3) {
      const auto [least, most] = std::minmax({saved[first], saved[first + 1], saved[first + 2]});
      EXPECT_GT(least, 0);
      EXPECT_LE(most - least, 1) << "tensor and pipeline rank " << first / 3;
    }
  };
  expect_equal(saved_by_rank(grid, options(DType::f32, 0), false));
  expect_equal(saved_by_rank(grid, options(DType::f32, 0), true));
  expect_equal(saved_by_rank(grid, options(DType::f32, 1), false));
  expect_equal(saved_by_rank(grid, options(DType::bf16, 0, true), false));
  // Shares are saved by those who have them.
  for (const std::int64_t part : saved_by_rank({.dp = 4}, options(DType::bf16, 1), false))
    EXPECT_GT(part, 200);
}

TEST(Pieces, CopiesOfSharesAreSavedInEqualParts) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    std::array<std::int64_t, 4> weights{}, state{};
    std::atomic<std::int64_t> numel = 0;
    run_local(4, [&](auto world) {
      ProcessMesh mesh(world, {.dp = 4});
      const auto& [shard, copy, gather, expert_gather] = mesh.share_data(2, false);
      Declared declared = declare({}, 0, 0);
      ParamStoreOptions shares = options(compute, 1);
      shares.groups = {.data = shard.get(), .copies = copy.get(), .world = world.get()};
      const ExecCtx ctx = ExecCtx::cpu(1);
      ParamStore store(ctx, declared.parameters, shares);
      Optimizer optimizer(ctx, store, kConfig);
      const auto at = static_cast<std::size_t>(world->rank());
      for (const StatePiece& piece : store.pieces(PieceSet::owned)) weights[at] += piece.end - piece.begin;
      for (const StatePiece& piece : optimizer.pieces(PieceSet::owned, "adam_m"))
        state[at] += piece.end - piece.begin;
      std::int64_t all = 0;
      for (const Parameter* p : declared.parameters) all += p->shape().numel();
      numel = all;
    });
    for (const auto& saved : {weights, state}) {
      EXPECT_EQ(saved[0] + saved[1] + saved[2] + saved[3], numel);
      // Ranks 0 and 2 have the same share, and so have 1 and 3.
      EXPECT_LE(std::abs(saved[0] - saved[2]), 2);
      EXPECT_LE(std::abs(saved[1] - saved[3]), 2);
      EXPECT_GT(saved[3], numel / 5);
    }
  }
}

TEST(Pieces, OneRankHoldsEverythingWhole) {
  Rank rank(make_self_communicator(), {}, {}, kConfig);
  const auto owned = rank.store->pieces(PieceSet::owned), held = rank.store->pieces(PieceSet::held);
  ASSERT_EQ(owned.size(), rank.declared.parameters.size());
  ASSERT_EQ(held.size(), owned.size());
  for (std::size_t i = 0; i < owned.size(); ++i) {
    EXPECT_EQ(owned[i].parameter, rank.declared.parameters[i]);
    EXPECT_EQ(owned[i].end - owned[i].begin, owned[i].parameter->shape().numel());
    EXPECT_EQ(owned[i].values.values.raw(), rank.store->weights().main(*owned[i].parameter).raw());
    EXPECT_EQ(held[i].values.values.raw(), owned[i].values.values.raw());
  }
  EXPECT_EQ(owned[0].name(), "param.word");
  EXPECT_EQ(rank.optimizer->pieces(PieceSet::held)[0].name(), "adam_m.word");
  EXPECT_EQ(rank.optimizer->pieces(PieceSet::held)[16].name(), "adam_v.word");
}

TEST(Pieces, AShareIsNotPassedOffAsTheWhole) {
  run_local(2, [&](auto world) {
    Rank rank(world, {.dp = 2}, {.compute = DType::bf16, .zero_stage = 1}, kConfig);
    const Parameter &weight = rank.declared["layer0.fc1"], &norm = rank.declared["layer0.norm"];
    EXPECT_TRUE(rank.store->shards().sharded());
    EXPECT_FALSE(rank.store->weights().main_buffer());
    EXPECT_THROW(rank.store->weights().main(weight), InvalidArgument);
    EXPECT_THROW(weight.main(), InvalidArgument);
    EXPECT_EQ(norm.main().to_floats(), std::vector<float>(kWidth, 1.0f));
    EXPECT_THROW(rank.optimizer->state(), InvalidArgument);
    rank.call({});
    EXPECT_THROW(rank.store->gradient().sum(), InvalidArgument);
    EXPECT_THROW(
        rank.store->pieces(PieceSet::held, "adam_m", {rank.store->gradient().latest_call().on_device()}),
        InvalidArgument);
  });
}

TEST(Pieces, ImpossibleOptionsAreRefused) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  Parameter a("a", {2}, Init::ones());
  EXPECT_THROW(ParamStore(ctx, {&a}, {.zero_stage = 4}), InvalidArgument);
  EXPECT_THROW(ParamStore(ctx, {&a}, {.bucket_elements = -1}), InvalidArgument);
  for (const DType compute : {DType::f32, DType::f16})
    EXPECT_THROW(ParamStore(ctx, {&a}, {.compute = compute, .split_main = true}), InvalidArgument);
  run_local(2, [&](auto world) {
    Parameter own("a", {2}, Init::ones());
    EXPECT_THROW(ParamStore(ExecCtx::cpu(1), {&own}, {.groups = {.data = world.get()}}), InvalidArgument);
  });
}

/// Bytes per parameter of store and optimizer, and how much more was in use at any time.
TEST(PersistentBytes, EqualTheFormula) {
  for (const auto& [compute, split] :
       {std::pair(DType::f32, false), std::pair(DType::bf16, false), std::pair(DType::bf16, true)}) {
    for (const int stage : {0, 1}) {
      for (const int d : {1, 2, 4}) {
        run_local(d, [&, compute = compute, split = split](auto world) {
          const ExecCtx ctx = ExecCtx::cpu(1);
          Parameter table("table", {301, 211}, Init::normal(1), {.reads_main = true});
          Parameter a("a", {499, 503}, Init::normal(1)), b("b", {607, 401}, Init::normal(1)),
              c("c", {997}, Init::ones());
          const double read = 301 * 211, other = 499 * 503 + 607 * 401 + 997;
          ParamStore store(ctx, {&table, &a, &b, &c},
                           {.compute = compute,
                            .split_main = split,
                            .groups = {.data = world.get(), .world = world.get()},
                            .zero_stage = stage,
                            .bucket_elements = 100'000});
          Optimizer optimizer(ctx, store, kConfig);
          for (int step = 0; step < 2; ++step) {
            store.gradient().begin_call();
            store.gradient().finish_call();
            optimizer.step(1e-3, 0.1);
          }
          store.weights().wait();
          const double share = stage == 1 ? 1.0 / d : 1.0;
          const double main = split ? 2 : 4;
          const double expected = compute == DType::f32
                                      ? (8 + 8 * share) * (read + other)
                                      : (6 + (8 + main) * share) * other + (10 + 8 * share) * read;
          const auto bytes = static_cast<double>(store.persistent_bytes() + optimizer.persistent_bytes());
          EXPECT_NEAR(bytes / expected, 1.0, 0.005) << compute << " stage " << stage << " ranks " << d;
          EXPECT_GE(bytes, expected);
          // What the allocator handed out at any time, with what initialising and updating took.
          EXPECT_NEAR(static_cast<double>(ctx.allocator->stats().peak_used_bytes) / bytes, 1.0, 0.01);
        });
      }
    }
  }
}

TEST(PersistentBytes, TheSumOfSeveralCallsIsAsLongAsTheShare) {
  for (const int stage : {0, 1}) {
    run_local(2, [&](auto world) {
      Rank rank(world, {.dp = 2}, options(DType::f32, stage), kConfig);
      const std::size_t before = rank.store->persistent_bytes();
      rank.call({});
      EXPECT_EQ(rank.store->persistent_bytes(), before);
      rank.call({});
      const auto elements = static_cast<std::size_t>(rank.store->numel()) / (stage == 1 ? 2 : 1);
      EXPECT_EQ(rank.store->persistent_bytes(), before + 4 * elements);
    });
  }
}

}  // namespace
}  // namespace tessera
