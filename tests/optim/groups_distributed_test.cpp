/// Parameter groups and frozen parameters: any layout updates as one process does.

#include "tests/optim/distributed_support.hpp"

namespace tessera {
namespace {

using namespace test;

/// Norms apart, two projections frozen, layer 1 with betas of its own.
ParamGroups groups(OptimizerName name) {
  std::vector<ParamGroup> list(4);
  list[1] = {.lr_factor = 0.5, .decay_factor = 0};
  list[2].frozen = true;
  if (name == OptimizerName::sgd) {
    list[3] = {.lr_factor = 2, .momentum = 0.25};
  } else {
    list[3] = {.lr_factor = 2, .beta1 = 0.5, .beta2 = 0.75, .eps = 1e-3};
  }
  return {list, [](const Parameter& p) -> std::size_t {
            const std::string& at = p.name();
            if (at == "layer0.proj" || at == "layer1.qkv" || at == "position") return 2;
            if (at.find("norm") != std::string::npos) return 1;
            return at.starts_with("layer1") ? 3 : 0;
          }};
}

struct Outcome {
  Whole weights;
  double norm = 0;
};

ParamStoreOptions options(DType compute, int zero_stage, const ParamGroups& g, bool store_knows) {
  ParamStoreOptions o{.compute = compute, .zero_stage = zero_stage, .bucket_elements = 500};
  if (store_knows) o.frozen = [g](const Parameter& p) { return g.freezes(p); };
  return o;
}

Outcome run(const Grid& grid, DType compute, int zero_stage, const OptimizerConfig& config, bool store_knows,
            int calls) {
  Collected weights;
  double norm = 0;
  const ParamGroups g = groups(config.name);
  run_local(grid.tp * grid.dp * grid.pp, {.timeout_s = 60, .check = true}, [&](auto world) {
    Rank rank(world, grid, options(compute, zero_stage, g, store_knows), config, g);
    for (int step = 0; step < 4; ++step) {
      for (int call = 0; call < calls; ++call) rank.call({true, step, call}, 0.5, step % 2 == 0);
      const StepResult result = rank.optimizer->step(0.05, 0.1);
      if (world->rank() == 0) norm = result.grad_norm;
    }
    weights.add_weights(rank);
  });
  return {weights.whole(), norm};
}

Outcome run_serial(const Grid& grid, DType compute, const OptimizerConfig& config, int calls) {
  const ParamGroups g = groups(config.name);
  Serial serial(grid, options(compute, 0, g, true), config, g);
  Outcome outcome;
  for (int step = 0; step < 4; ++step) {
    for (int call = 0; call < calls; ++call) serial.call({true, step, call}, 0.5);
    outcome.norm = serial.step().grad_norm;
  }
  outcome.weights = serial.weights();
  return outcome;
}

class GroupsOnGrids : public ::testing::TestWithParam<Grid> {};

TEST_P(GroupsOnGrids, EqualOneProcess) {
  for (const OptimizerConfig& config :
       {OptimizerConfig{.eps = 1e-5, .clip_grad = 0},
        OptimizerConfig{.name = OptimizerName::sgd, .momentum = 0.75, .clip_grad = 0}}) {
    for (const DType compute : {DType::f32, DType::bf16, DType::f16}) {
      for (const int calls : {1, 2}) {
        const Outcome serial = run_serial(GetParam(), compute, config, calls);
        for (const int stage : {0, 1}) {
          for (const bool store_knows : {false, true}) {
            const Outcome found = run(GetParam(), compute, stage, config, store_knows, calls);
            EXPECT_EQ(found.weights, serial.weights)
                << compute << " zero_stage " << stage << " store knows " << store_knows;
            EXPECT_NEAR(found.norm, serial.norm, 1e-12 * serial.norm);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GroupsOnGrids,
                         ::testing::Values(Grid{1, 3, 1}, Grid{4, 2, 1}, Grid{2, 2, 2}));

TEST(FrozenBuckets, AreNeitherReducedNorGathered) {
  for (const int stage : {0, 1}) {
    run_local(2, [&](auto world) {
      const ParamGroups g = groups(OptimizerName::adamw);
      ParamStoreOptions o = options(DType::bf16, stage, g, true);
      o.bucket_elements = 1;  // a bucket for each of 16 parameters, 3 of them frozen
      Rank rank(world, {.dp = 2}, o, {}, g);
      Communicator& data = rank.mesh[Axis::dp];
      data.reset_stats();
      rank.call({});
      EXPECT_EQ(data.stats().operations, 13u);
      rank.optimizer->step(0.05, 0.1);
      rank.store->weights().wait();
      EXPECT_EQ(data.stats().operations, stage == 1 ? 26u : 13u);
    });
  }
}

TEST(FrozenBuckets, WeightsLoadedFromACheckpointAreGathered) {
  run_local(2, [&](auto world) {
    const ParamGroups g = groups(OptimizerName::adamw);
    Rank rank(world, {.dp = 2}, options(DType::bf16, 1, g, true), {}, g);
    for (const StatePiece& piece : rank.store->pieces(PieceSet::held))
      test::edit(piece.values.values, [](auto& values) { values.assign(values.size(), 0.75f); });
    rank.store->weights().gather();
    const Parameter& frozen = rank.declared["layer0.proj"];
    EXPECT_EQ(frozen.value().to_floats(),
              std::vector<float>(static_cast<std::size_t>(frozen.shape().numel()), 0.75f));
    EXPECT_EQ(rank.optimizer->pieces(PieceSet::held).size(), 2 * rank.store->pieces(PieceSet::held).size());
  });
}

}  // namespace
}  // namespace tessera
