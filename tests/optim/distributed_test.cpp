// Any layout updates as one process does that is given the sum of all gradients.

#include <cmath>
#include <limits>

#include "tests/optim/distributed_support.hpp"

namespace tessera {
namespace {

using namespace test;

constexpr int kSteps = 5;
const std::vector<double> kFactors = {0.5, 0.25, -1.0};

struct Outcome {
  Whole weights;
  std::vector<double> norms;
};

OptimizerConfig adamw(double clip) { return {.eps = 1e-5, .clip_grad = clip}; }

/// Small buckets: most shares begin or end inside a parameter.
ParamStoreOptions small_buckets(DType compute, int zero_stage, bool split = false) {
  return {.compute = compute, .split_main = split, .zero_stage = zero_stage, .bucket_elements = 500};
}

Outcome run(const Grid& grid, const ParamStoreOptions& options, const OptimizerConfig& config, bool exact,
            int calls = 1) {
  Collected weights;
  std::vector<double> norms;
  run_local(grid.tp * grid.dp * grid.pp, {.timeout_s = 60, .check = true}, [&](auto world) {
    Rank rank(world, grid, options, config);
    std::vector<double> own;
    for (int step = 0; step < kSteps; ++step) {
      for (int call = 0; call < calls; ++call) {
        rank.call({exact, step, call}, calls > 1 ? kFactors[static_cast<std::size_t>(call)] : 1.0,
                  step % 2 == 0);
      }
      own.push_back(rank.optimizer->step(0.05, 0.1).grad_norm);
    }
    weights.add_weights(rank);
    if (world->rank() == 0) norms = own;
    world->barrier(rank.ctx);
    EXPECT_EQ(own, norms) << "rank " << world->rank();
  });
  return {weights.whole(), norms};
}

Outcome run_serial(const Grid& grid, DType compute, const OptimizerConfig& config, bool exact,
                   int calls = 1) {
  Serial serial(grid, {.compute = compute}, config);
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    for (int call = 0; call < calls; ++call) {
      serial.call({exact, step, call}, calls > 1 ? kFactors[static_cast<std::size_t>(call)] : 1.0);
    }
    outcome.norms.push_back(serial.step().grad_norm);
  }
  outcome.weights = serial.weights();
  return outcome;
}

void expect_same_norms(const std::vector<double>& found, const std::vector<double>& expected,
                       double relative) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], relative * expected[i]) << "update " << i;
  }
}

std::string grid_name(const Grid& grid) {
  return detail::concat("tp", grid.tp, "_dp", grid.dp, "_pp", grid.pp);
}

class DataParallel : public testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(DataParallel, WithoutClippingBothStagesEqualOneProcessBitForBit) {
  const auto [d, compute] = GetParam();
  const Grid grid{.dp = d};
  const Outcome serial = run_serial(grid, compute, adamw(0), false);
  for (const int stage : {0, 1}) {
    const Outcome found = run(grid, small_buckets(compute, stage), adamw(0), false);
    EXPECT_EQ(found.weights, serial.weights) << "zero_stage " << stage;
    expect_same_norms(found.norms, serial.norms, 1e-12);
  }
}

TEST_P(DataParallel, ClippingAndSeveralCalls) {
  const auto [d, compute] = GetParam();
  const Grid grid{.dp = d};
  const Outcome serial = run_serial(grid, compute, adamw(0.7), false, 3);
  const Outcome plain = run(grid, small_buckets(compute, 0), adamw(0.7), false, 3);
  const Outcome sharded = run(grid, small_buckets(compute, 1), adamw(0.7), false, 3);
  EXPECT_LE(largest_difference(sharded.weights, serial.weights), 1e-6);
  EXPECT_EQ(sharded.weights, plain.weights);
  EXPECT_EQ(sharded.norms, plain.norms);
  expect_same_norms(sharded.norms, serial.norms, 1e-7);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DataParallel,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(DType::f32, DType::bf16, DType::f16)));

TEST(DataParallel, OtherOptimizersToo) {
  const Grid grid{.dp = 3};
  for (const auto& config : {OptimizerConfig{.name = OptimizerName::adam, .clip_grad = 0},
                             OptimizerConfig{.name = OptimizerName::sgd, .momentum = 0.8, .clip_grad = 0},
                             OptimizerConfig{.name = OptimizerName::sgd, .momentum = 0, .clip_grad = 0}}) {
    const Outcome serial = run_serial(grid, DType::bf16, config, false);
    EXPECT_EQ(run(grid, small_buckets(DType::bf16, 1), config, false).weights, serial.weights);
  }
}

/// Updates of split main weights are those of whole ones, to the last bit.
TEST(DataParallel, SplitMainWeightsAreTrainedAlike) {
  const OptimizerConfig sgd{.name = OptimizerName::sgd, .momentum = 0.8, .clip_grad = 0};
  for (const OptimizerConfig& config : {adamw(0), sgd}) {
    for (const Grid& grid : {Grid{1, 1, 1}, Grid{1, 3, 1}, Grid{4, 2, 2}}) {
      const Outcome serial = run_serial(grid, DType::bf16, config, true);
      for (const int stage : {0, 1}) {
        const Outcome found = run(grid, small_buckets(DType::bf16, stage, true), config, true);
        EXPECT_EQ(found.weights, serial.weights) << grid_name(grid) << " zero_stage " << stage;
        expect_same_norms(found.norms, serial.norms, 1e-12);
      }
    }
  }
}

TEST(DataParallel, SplitMainWeightsStartRoundedAlikeOnAllRanks) {
  run_local(2, [&](auto world) {
    Parameter w("w", {701, 503}, Init::normal(1));
    const ParamStore store(ExecCtx::cpu(1), {&w},
                           {.compute = DType::bf16,
                            .split_main = true,
                            .groups = {.data = world.get(), .world = world.get()},
                            .zero_stage = 1});
    const auto main = store.weights().whole(w).to_floats(), model = w.value().to_floats();
    int ties = 0, differences = 0;
    for (std::size_t i = 0; i < main.size(); ++i) {
      ties += (std::bit_cast<std::uint32_t>(main[i]) & 0x1ffffu) == 0x8000u;  // to even it would go down
      differences += model[i] != rounded_away(main[i]);
    }
    EXPECT_GT(ties, 1);
    EXPECT_EQ(differences, 0);
  });
}

class Grids : public testing::TestWithParam<std::tuple<Grid, int, DType>> {};

/// Vocabulary rows that do not divide, copied key-value heads, norms in the sequence-parallel region, a tied
/// table on the first and last stage.
TEST_P(Grids, EqualOneProcess) {
  const auto [grid, stage, compute] = GetParam();
  const Outcome serial = run_serial(grid, compute, adamw(0), true);
  const Outcome found = run(grid, small_buckets(compute, stage), adamw(0), true);
  EXPECT_EQ(found.weights, serial.weights);
  expect_same_norms(found.norms, serial.norms, 1e-12);
  const Outcome clipped = run(grid, small_buckets(compute, stage), adamw(0.7), true, 3);
  const Outcome serial_clipped = run_serial(grid, compute, adamw(0.7), true, 3);
  EXPECT_LE(largest_difference(clipped.weights, serial_clipped.weights), 1e-6);
  expect_same_norms(clipped.norms, serial_clipped.norms, 1e-12);
}

std::string case_name(const testing::TestParamInfo<Grids::ParamType>& info) {
  const auto& [grid, stage, compute] = info.param;
  return detail::concat(grid_name(grid), "_zero", stage, "_", compute);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Grids,
                         testing::Combine(testing::Values(Grid{2, 1, 1}, Grid{4, 1, 1}, Grid{1, 1, 2},
                                                          Grid{1, 2, 2}, Grid{4, 2, 1}, Grid{2, 3, 1},
                                                          Grid{2, 2, 2}, Grid{4, 2, 2}),
                                          testing::Values(0, 1), testing::Values(DType::f32, DType::bf16)),
                         case_name);

TEST(Distributed, GradientsAreTheSumsOverAllRanks) {
  for (const int stage : {0, 1}) {
    const Grid grid{4, 2, 2};
    Serial serial(grid, {}, adamw(1));
    serial.call({}, 0.5);
    serial.call({.call = 1}, 2.0);
    Collected found;
    run_local(16, [&](auto world) {
      Rank rank(world, grid, small_buckets(DType::f32, stage), adamw(1));
      rank.call({}, 0.5);
      rank.call({.call = 1}, 2.0, false);
      for (const Parameter* p : rank.declared.parameters)
        found.add(*p, p->name(), rank.store->gradient().whole(*p));
    });
    EXPECT_EQ(found.whole(), serial.gradient());
  }
}

TEST(Distributed, FirstValuesAreTheSameOnEveryLayout) {
  const Whole expected = Serial({}, {}, adamw(1)).weights();
  for (const Grid grid : {Grid{2, 1, 1}, Grid{4, 2, 1}, Grid{2, 2, 2}, Grid{1, 4, 1}}) {
    for (const int stage : {0, 1}) {
      for (const DType compute : {DType::f32, DType::bf16}) {
        Collected found;
        run_local(grid.tp * grid.dp * grid.pp, [&](auto world) {
          Rank rank(world, grid, small_buckets(compute, stage), adamw(1));
          found.add_weights(rank);
          if (rank.store->shards().sharded()) {  // the memory lent was given back clean
            for (const float v : rank.store->gradient().latest_call().on_device().to_floats())
              ASSERT_EQ(v, 0.0f);
          }
        });
        EXPECT_EQ(found.whole(), expected);
      }
    }
  }
}

TEST(Distributed, AGradientThatIsNotFiniteOnOneRankSkipsOnAll) {
  const Grid grid{2, 2, 2};
  for (const int stage : {0, 1}) {
    for (int bad = 0; bad < 8; ++bad) {
      run_local(8, [&](auto world) {
        Rank rank(world, grid, small_buckets(DType::f32, stage), adamw(1));
        const auto before = rank.store->weights().main_buffer().to_floats();
        const auto with = [&](float value) {
          for (Parameter* p : rank.declared.parameters)
            write_gradient(*p, std::vector<float>(static_cast<std::size_t>(p->grad().numel()), value));
          rank.store->gradient().finish_call();
          return rank.optimizer->step(0.1, 0.1);
        };
        const float nan = std::numeric_limits<float>::quiet_NaN();
        EXPECT_TRUE(with(world->rank() == bad ? nan : 0.5f).skipped);
        EXPECT_EQ(rank.store->weights().main_buffer().to_floats(), before);
        EXPECT_EQ(rank.optimizer->updates(), 0);
        EXPECT_FALSE(with(0.5f).skipped);
        EXPECT_NE(rank.store->weights().main_buffer().to_floats(), before);
      });
    }
  }
}

TEST(Distributed, ParametersWithoutContributionsHaveNoGradient) {
  const Grid grid{.dp = 2};
  run_local(2, [&](auto world) {
    Rank rank(world, grid, small_buckets(DType::f32, 1), adamw(1));
    Parameter& silent = rank.declared["layer1.fc1"];
    rank.call({});
    rank.optimizer->step(0.1, 0.1);  // leaves old values in the gradient buffer
    rank.store->gradient().begin_call([&](const Parameter& p) { return &p == &silent ? 0 : 2; });
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      for (Parameter* p : rank.declared.parameters) {
        if (p == &silent) continue;
        write_gradient(*p, std::vector<float>(static_cast<std::size_t>(p->grad().numel()), 1.0f));
        rank.store->gradient().ready(*p);
      }
    }
    rank.store->gradient().finish_call();
    for (const Parameter* p : rank.declared.parameters) {
      const float expected = p == &silent ? 0.0f : 4.0f;
      for (const float v : rank.store->gradient().whole(*p).to_floats()) ASSERT_EQ(v, expected) << p->name();
    }
  });
}

}  // namespace
}  // namespace tessera
