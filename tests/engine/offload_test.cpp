/// What lies in host memory or in a file changes no number, on any layout. Without a GPU the CPU's memory
/// counts as another place than the host's (OffloadConfig::memory_apart): the code is that of a GPU, and its
/// copies run in threads of their own.

#include <filesystem>

#include "tessera/autograd/activation_offload.hpp"
#include "tessera/engine/plan.hpp"
#include "tessera/engine/state.hpp"
#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test::edge {
namespace {

/// What is offloaded: the optimizer's state, gradients, parameters, activations.
struct Where {
  const char* name = "nowhere";
  OffloadTo optimizer = OffloadTo::none, gradients = OffloadTo::none, parameters = OffloadTo::none,
            activations = OffloadTo::none;
  double ratio = 1;
};

constexpr OffloadTo kNone = OffloadTo::none, kCpu = OffloadTo::cpu, kNvme = OffloadTo::nvme;
constexpr Where kOptimizer{"optimizer", kCpu, kNone, kNone, kNone}, kDisk{"disk", kNvme, kNone, kNone, kNone},
    kGradients{"gradients", kNone, kCpu, kNone, kNone}, kParameters{"parameters", kNone, kNone, kCpu, kNone},
    kActivations{"activations", kNone, kNone, kNone, kCpu}, kAllOfIt{"all", kCpu, kCpu, kCpu, kCpu},
    kPartly{"partly", kCpu, kCpu, kCpu, kNone, 0.6},
    kDiskAndMemory{"disk_and_memory", kNvme, kCpu, kCpu, kNone};

Config offloaded(Config config, const Where& where) {
  config.offload = {.optimizer = where.optimizer,
                    .gradients = where.gradients,
                    .parameters = where.parameters,
                    .activations = where.activations,
                    .ratio = where.ratio,
                    .tile = 1024,
                    .buffers = 3,
                    .memory_apart = true};
  if (where.optimizer == kNvme) config.offload.path = std::filesystem::temp_directory_path().string();
  return config;
}

/// All numbers of three steps, the second of two calls; every rank's.
struct Numbers {
  std::vector<double> losses, norms;
  WholeTensors tensors;
  std::size_t elsewhere = 0;  ///< bytes
};

Numbers train(const Config& config, int ranks) {
  Numbers all;
  std::mutex mutex;
  run_ranks(ranks, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const auto batch = [&](unsigned i) { return own_part(*engine, random_batch(8, kSeq, 60 + i, kVocab)); };
    std::vector<double> losses, norms;
    for (unsigned i = 0; i < 3; ++i) {
      losses.push_back(engine->forward_backward(batch(i)));
      if (i == 1) losses.push_back(engine->forward_backward(batch(7), 0.5));
      if (i < 2) norms.push_back(engine->update().grad_norm);
    }
    losses.push_back(engine->evaluate(batch(9)));
    WholeTensors tensors = whole_tensors(*engine, false);
    for (auto& [name, values] : whole_tensors(*engine, true)) tensors["gradient of " + name] = values;
    const std::lock_guard lock(mutex);
    for (auto& [name, values] : tensors) all.tensors[std::to_string(world->rank()) + name] = values;
    if (const auto& kept = engine->ctx().activations) all.elsewhere += kept->host_bytes();
    if (const auto& place = engine->params().place()) all.elsewhere += place->in_memory + place->on_disk;
    if (world->rank() > 0) return;
    all.losses = losses;
    all.norms = norms;
  });
  return all;
}

struct Case {
  const char* name;
  Family family;
  Overrides layout;
  int ranks;
  std::vector<Where> where;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const Overrides kZero2{"parallel.zero_stage=2"}, kZero3{"parallel.zero_stage=3"},
    kBf16{"training.precision=bf16"}, kDp2{"parallel.data=2"}, kFull{"training.recompute=full"};

class Offload : public ::testing::TestWithParam<Case> {};

TEST_P(Offload, ChangesNoNumber) {
  const Case& c = GetParam();
  const Config plain = edge_config(c.family, c.layout);
  const Numbers expected = train(plain, c.ranks);
  for (const Where& where : c.where) {
    const Numbers got = train(offloaded(plain, where), c.ranks);
    EXPECT_GT(got.elsewhere, 0u) << where.name;
    EXPECT_EQ(got.losses, expected.losses) << where.name;
    ASSERT_EQ(got.norms.size(), expected.norms.size()) << where.name;
    // Squares of offloaded gradients are added up tile by tile, in fp64.
    for (std::size_t i = 0; i < got.norms.size(); ++i)
      EXPECT_NEAR(got.norms[i], expected.norms[i], 1e-12 * expected.norms[i]) << where.name;
    ASSERT_EQ(got.tensors.size(), expected.tensors.size());
    for (const auto& [name, values] : expected.tensors)
      EXPECT_EQ(got.tensors.at(name), values) << where.name << ": " << name;
  }
}

const std::vector<Where> kOfStage2{kOptimizer, kGradients}, kOfStage3{kParameters, kAllOfIt, kPartly};
const Case kCases[] = {
    {"one_rank", Family::gpt2, kFull, 1, {kOptimizer, kDisk, kActivations}},
    {"one_rank_bf16", Family::llama, kBf16, 1, {kOptimizer, kDisk}},
    {"dp2_zero1_bf16", Family::gpt2, kDp2 + kBf16, 2, {kOptimizer, kDisk}},
    {"dp2_zero1_split",
     Family::gpt2,
     kDp2 + kBf16 + Overrides{"optimizer.split_main_weights=true"},
     2,
     {kOptimizer}},
    {"dp2_zero2", Family::llama, kDp2 + kZero2 + kFull, 2, {kOptimizer, kGradients, kActivations}},
    {"dp3_zero2_bf16", Family::gpt2, kZero2 + kBf16 + Overrides{"training.global_batch_size=12"}, 3,
     kOfStage2},
    {"dp2_zero3", Family::gpt2, kDp2 + kZero3 + kFull, 2, kOfStage3},
    {"dp2_zero3_bf16",
     Family::llama,
     kDp2 + kZero3 + kBf16 + kFull,
     2,
     {kParameters, kAllOfIt, kPartly, kDiskAndMemory}},
    {"dp2_zero3_fp16",
     Family::gpt2,
     kDp2 + kZero3 + kFull + Overrides{"training.precision=fp16", "training.initial_loss_scale=1024"},
     2,
     {kAllOfIt}},
    {"dp4_zero3_group2", Family::gpt2, kZero3 + kFull + Overrides{"parallel.zero_group=2"}, 4, {kAllOfIt}},
    {"tp2_sp_dp2_zero3", Family::llama, kTp2Sp + kDp2 + kZero3 + kFull, 4, {kAllOfIt}},
    {"tp2_partition",
     Family::gpt2,
     kTp2 + kFull + Overrides{"training.recompute_partition=true", "training.recompute_layers=2"},
     2,
     {kActivations}},
    {"pp2_1f1b_dp2_zero3_bf16", Family::gpt2, kPp2 + kDp2 + kZero3 + kBf16 + kFull, 4, {kAllOfIt}},
    {"pp2_interleaved",
     Family::llama,
     kPp2 + kFull + Overrides{"parallel.schedule=interleaved", "parallel.virtual_stages=2"},
     2,
     {kActivations}},
    {"zbv_dp2_zero2", Family::gpt2, kZbV + kDp2 + kZero2 + kFull, 4, {kGradients, kActivations}},
    {"zbh1_dp2_zero3_never",
     Family::llama,
     kPp2 + kDp2 + kZero3 + kFull + Overrides{"parallel.schedule=zb-h1", "parallel.zero_reshard=never"},
     4,
     {kAllOfIt}},
};
INSTANTIATE_TEST_SUITE_P(Layouts, Offload, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

/// Stages of ZeRO are those of one rank too where something lies elsewhere.
TEST(Offload, OneRankBringsWeightsLayerByLayer) {
  // One micro-batch: shares are added to pass by pass, and whole gradients within products.
  const Overrides one = kBf16 + kFull + Overrides{"training.micro_batch_size=8"};
  const Numbers expected = train(edge_config(Family::gpt2, one), 1);
  for (const Where& where : {kParameters, kAllOfIt, kPartly}) {
    const Numbers got = train(offloaded(edge_config(Family::gpt2, one + kZero3), where), 1);
    EXPECT_EQ(got.losses, expected.losses) << where.name;
    for (const auto& [name, values] : expected.tensors)
      EXPECT_EQ(got.tensors.at(name), values) << where.name << ": " << name;
  }
}

/// Steps [first, last) from the checkpoint that is in `root`, if any, and a checkpoint behind them.
std::vector<double> train_part(const Config& config, const std::filesystem::path& root, std::int64_t first,
                               std::int64_t last) {
  std::vector<double> losses;
  run_ranks(2, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    if (first > 0) {
      load_engine(CheckpointReader(resolve_checkpoint(root)), *engine);
      engine->params().weights().gather();
      engine->progress().steps = first;
    }
    for (std::int64_t step = first; step < last; ++step) {
      const Batch batch = random_batch(8, kSeq, static_cast<unsigned>(200 + step), kVocab);
      const double loss = engine->step(own_part(*engine, batch)).loss;
      if (world->rank() == 0) losses.push_back(loss);
    }
    save_engine(root, *engine, {.step = last, .consumed_samples = last * 8, .config = config}, {});
  });
  return losses;
}

class OffloadState : public FolderTest {};

TEST_F(OffloadState, CheckpointsMoveBetweenAllPlaces) {
  const Config plain = edge_config(Family::gpt2, kDp2 + kZero3 + kBf16 + kFull);
  const std::vector<double> straight = train_part(plain, dir_ / "straight", 0, 4);
  const std::pair<Where, Where> moves[] = {
      {kAllOfIt, {}}, {{}, kAllOfIt}, {kDiskAndMemory, kPartly}, {kPartly, kDisk}};
  for (const auto& [from, to] : moves) {
    const std::filesystem::path root = dir_ / (std::string(from.name) + " to " + to.name);
    train_part(offloaded(plain, from), root, 0, 2);
    const std::vector<double> losses = train_part(offloaded(plain, to), root, 2, 4);
    EXPECT_EQ(losses, std::vector<double>(straight.begin() + 2, straight.end())) << root;
  }
}

TEST(Offload, PlansAreWhatRunsHold) {
  if (on_cuda()) GTEST_SKIP() << "a GPU's blocks are other ones than those of models so small";
  struct Layout {
    Overrides overrides;
    int ranks;
    Where where;
  };
  const Layout layouts[] = {{kBf16, 1, kOptimizer},
                            {kDp2 + kBf16, 2, kOptimizer},
                            {kDp2 + kZero2, 2, kGradients},
                            {kDp2 + kZero3 + kBf16, 2, kPartly},
                            {kDp2 + kZero3 + kBf16, 2, kDiskAndMemory},
                            {kDp2 + kZero3 + kFull, 2, kAllOfIt},
                            {kPp2 + kFull, 2, kActivations}};
  for (const Layout& layout : layouts) {
    Config config = offloaded(edge_config(Family::llama, layout.overrides), layout.where);
    config.model.hidden_size = 64;
    config.model.ffn_hidden_size = 128;
    config.training.micro_batch_size = 2;
    config.model.head_dim = 16;
    const Plan plan = make_plan(config, layout.ranks);
    const DryRun dry = dry_run(
        [&](ProcessMesh& mesh) {
          return make_model(plan.config, mesh, pieces_of(plan.config, 0), {DeviceType::meta});
        },
        EngineOptions::from(plan.config), plan.mesh, 0, {2, kSeq}, plan.micro_batches);
    EXPECT_EQ(dry.elsewhere, plan.ranks[0].elsewhere) << layout.where.name;
    EXPECT_EQ(dry.bytes_sent(), bytes_of(plan.ranks[0].traffic)) << layout.where.name;
    std::mutex mutex;
    run_local(layout.ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config, true, world);
      const auto crossed = [&] {
        std::uint64_t in = 0, out = 0;
        const auto add = [&](const HostLink& link) {
          in += link.bytes_to_device();
          out += link.bytes_to_host();
        };
        if (const auto& place = engine->params().place()) add(place->link);
        if (const auto& kept = engine->ctx().activations) add(kept->link());
        return std::pair(in, out);
      };
      std::pair<std::uint64_t, std::uint64_t> before;
      for (unsigned i = 0; i < 2; ++i) {
        before = crossed();
        engine->step(own_part(*engine, random_batch(8, kSeq, i, kVocab)));
      }
      const RankPlan& planned = plan.ranks[static_cast<std::size_t>(world->rank())];
      const std::lock_guard lock(mutex);
      std::size_t in_memory = 0, on_disk = 0;
      if (const auto& kept = engine->ctx().activations) in_memory += kept->host_bytes();
      if (const auto& place = engine->params().place()) {
        in_memory += place->in_memory;
        on_disk = place->on_disk;
      }
      EXPECT_EQ(planned.elsewhere.host_bytes, static_cast<std::int64_t>(in_memory)) << layout.where.name;
      EXPECT_EQ(planned.elsewhere.disk_bytes, static_cast<std::int64_t>(on_disk)) << layout.where.name;
      // Of a stage whose backward pass comes next to the forward pass the last segment's input never leaves,
      // which a plan of several stages does not count on.
      const auto came = static_cast<std::int64_t>(crossed().first - before.first);
      EXPECT_LE(came, planned.elsewhere.to_device) << layout.where.name;
      EXPECT_GE(plan.mesh.pp * came, planned.elsewhere.to_device) << layout.where.name;
      EXPECT_EQ(planned.elsewhere.to_host, static_cast<std::int64_t>(crossed().second - before.second))
          << layout.where.name;
      const auto peak = static_cast<double>(engine->ctx().allocator->stats().peak_used_bytes);
      EXPECT_NEAR(static_cast<double>(planned.memory_bytes()) / peak, 1.0, 0.02) << layout.where.name;
    });
  }
}

}  // namespace
}  // namespace tessera::test::edge
