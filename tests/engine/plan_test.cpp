#include "tessera/engine/plan.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>

#include "tessera/base/model_math.hpp"
#include "tessera/engine/build.hpp"

namespace tessera {
namespace {

Settings gpt(std::int64_t layers = 4) {
  Settings c;
  c.model = {.num_layers = layers, .hidden_size = 64, .num_heads = 4, .vocab_size = 256, .max_positions = 32};
  c.training.seq_length = 32;
  c.training.micro_batch_size = 2;
  c.training.global_batch_size = 16;
  return c;
}

Config seven_billion() {
  Settings c;
  c.model = {.family = Family::llama,
             .num_layers = 32,
             .hidden_size = 4096,
             .num_heads = 32,
             .ffn_hidden_size = 11008,
             .vocab_size = 32000,
             .max_positions = 2048};
  c.training.seq_length = 2048;
  c.training.micro_batch_size = 1;
  c.training.global_batch_size = 64;
  c.training.precision = Precision::bf16;
  return c;
}

double per_parameter(const Config& config, std::int64_t processes) {
  const Plan plan = make_plan(config, processes);
  return static_cast<double>(plan.ranks[0].persistent_bytes()) / static_cast<double>(plan.parameters);
}

/// A gradient is summed as soon as it is complete: two buckets or two layers' are there, of 27 GB in all.
TEST(Plan, GradientsAreNotHeldBack) {
  for (const Family family : {Family::llama, Family::gpt2}) {  // the second's head is tied
    for (const int zero : {2, 3}) {
      Config c = seven_billion();
      c.model.family = family;
      c.parallel.zero_stage = zero;
      c.training.recompute = Recompute::full;
      EXPECT_LT(make_plan(c, 8).ranks[0].memory_of("temporary"), 3'000'000'000) << zero;
    }
  }
}

TEST(Plan, PersistentBytesPerParameter) {
  Config c = seven_billion();
  // The table that kernels read in fp32, 1.9 % of the parameters, is whole on every rank: +4 (1 - 1/d) of it.
  const double share = 32000.0 * 4096 / 6738415616.0;
  for (const int d : {1, 2, 8, 64}) {
    EXPECT_NEAR(per_parameter(c, d), 6 + 12.0 / d + 4 * (1 - 1.0 / d) * share, 0.005) << d;
  }
  c.training.precision = Precision::fp16;
  EXPECT_NEAR(per_parameter(c, 8), 6 + 12.0 / 8 + 4 * (1 - 1.0 / 8) * share, 0.005);
  c.training.precision = Precision::bf16;
  c.parallel.zero_stage = 0;
  EXPECT_NEAR(per_parameter(c, 8), 18, 0.001);
  c.training.precision = Precision::fp32;
  EXPECT_NEAR(per_parameter(c, 8), 16, 0.001);
  c.parallel.zero_stage = 1;
  EXPECT_NEAR(per_parameter(c, 8), 8 + 8.0 / 8, 0.001);
  c.optimizer.name = OptimizerName::sgd;
  EXPECT_NEAR(per_parameter(c, 8), 8 + 4.0 / 8, 0.001);
  c.optimizer.momentum = 0;
  EXPECT_NEAR(per_parameter(c, 8), 8, 0.001);
}

TEST(Plan, ParametersOfTheRanksAreTheModels) {
  Config c = gpt();
  EXPECT_EQ(make_plan(c).ranks[0].parameters, parameter_count(c.model));
  // Whole on both of two tensor ranks: norms, positions, and the biases of linears split by columns of input.
  c.parallel.tensor = 2;
  const std::int64_t whole = (2 * 4 + 1) * 2 * 64 + 32 * 64 + 4 * 2 * 64;
  const Plan two = make_plan(c);
  ASSERT_EQ(two.ranks.size(), 2u);
  EXPECT_EQ(two.ranks[0].parameters + two.ranks[1].parameters, parameter_count(c.model) + whole);
  // Two stages: the tied table is on both.
  c.parallel.tensor = 1;
  c.parallel.pipeline = 2;
  const Plan stages = make_plan(c);
  EXPECT_EQ(stages.ranks[0].parameters + stages.ranks[1].parameters, parameter_count(c.model) + 256 * 64);
  // Folded, the first stage has embedding and head.
  c.parallel.schedule = PipelineSchedule::zb_v;
  const Plan folded = make_plan(c);
  EXPECT_EQ(folded.ranks[0].parameters + folded.ranks[1].parameters, parameter_count(c.model));
  EXPECT_EQ(folded.ranks[0].bytes_sent("embedding"), 0);
  EXPECT_TRUE(folded.ranks[0].pieces[0].embedding && folded.ranks[0].pieces[1].head);
}

TEST(Plan, RanksAndGroups) {
  Config c = gpt();
  c.parallel.tensor = 2;
  c.parallel.pipeline = 2;
  const Plan plan = make_plan(c, 8);
  EXPECT_EQ(plan.mesh, (MeshShape{.tp = 2, .dp = 2, .pp = 2}));
  EXPECT_EQ(plan.micro_batches, 4);
  ASSERT_EQ(plan.groups.size(), 3u);
  EXPECT_EQ(plan.groups[0].groups, (std::vector<std::vector<int>>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(plan.groups[1].groups, (std::vector<std::vector<int>>{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(plan.groups[2].groups, (std::vector<std::vector<int>>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  for (int r = 0; r < 8; ++r) {
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(r)].rank, r);
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(r)].at.pp, r / 4);
  }
}

TEST(Plan, TensorTrafficIsTheFormula) {
  Config c = gpt();
  c.parallel.tensor = 4;
  // 8 micro-batches of b C elements: 4 all-reduces of 2 (t-1)/t b C e for each of 4 layers.
  const std::int64_t unit = 8 * 64 * 64 * 4;  // micro-batches x rows x width x bytes
  const auto passes = [](const Config& config) {
    std::int64_t sum = 0;
    const Plan plan = make_plan(config);
    for (const TrafficTerm& term : plan.ranks[1].traffic)
      sum += term.name.starts_with("forward") || term.name.starts_with("backward") ? term.bytes : 0;
    return sum;
  };
  // What embedding and head send is there without layers too.
  const auto layers = [&] {
    Config more = c;
    more.model.num_layers = 8;
    return passes(more) - passes(c);
  };
  EXPECT_EQ(layers(), 4 * 4 * 2 * unit * 3 / 4);
  c.parallel.sequence = true;
  EXPECT_EQ(layers(), 4 * (6 + 4) * unit * 3 / 4);
  c.training.recompute = Recompute::full;
  EXPECT_EQ(layers(), 4 * (6 + 4 + 4) * unit * 3 / 4);
  const std::int64_t whole = passes(c);
  c.training.recompute_method = RecomputeMethod::block;
  c.training.recompute_layers = 3;
  EXPECT_EQ(whole - passes(c), 4 * unit * 3 / 4);
  EXPECT_EQ(layers(), 4 * 10 * unit * 3 / 4);
  c.parallel.sequence = false;
  EXPECT_EQ(layers(), 4 * 8 * unit * 3 / 4);
}

/// What MFU is relative to is what kernels do, but for attention: backward computes the scores once more,
/// which counts for 7 products instead of 6, and causality leaves the diagonal.
TEST(Plan, KernelsDoTheOperationsOfTheFormula) {
  for (const char* family : {"gpt2", "llama", "gpt_neox"}) {
    Settings settings = gpt(3);
    settings.model.family = Family{family};
    settings.model.num_kv_heads = 2;
    const Config c = settings;
    const std::vector<ModelPiece> pieces = pieces_of(c, 0);
    const DryRun run =
        dry_run([&](ProcessMesh& mesh) { return make_model(c, mesh, pieces, {DeviceType::meta}); },
                EngineOptions::from(c), {}, 0, {2, 32}, 1);
    const double attention = 3 * 64;  // layers x width of the queries
    EXPECT_DOUBLE_EQ(
        (run.pieces[0].forward.flops + run.pieces[0].backward.flops) / (2 * 32),
        flops_per_token(c.model, 32, FlopConvention::causal) - 6 * attention * 32 + 7 * attention * (32 + 1))
        << family;
    EXPECT_EQ(run.parameters, parameter_count(c.model)) << family;
  }
}

TEST(Plan, BubbleOfEvenPieces) {
  Config c = gpt(8);
  for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
    c.parallel.schedule = schedule;
    for (const std::int64_t stages : {2, 4}) {
      c.parallel.pipeline = stages;
      const double p = static_cast<double>(stages), m = 8;
      EXPECT_NEAR(make_plan(c).even_bubble, (p - 1) / (m + p - 1), 1e-12);
      EXPECT_GT(make_plan(c).bubble, 0);
    }
  }
  c.parallel.pipeline = 1;
  EXPECT_EQ(make_plan(c).bubble, 0);
}

TEST(Plan, ActivationsInFlight) {
  Config c = gpt(8);
  c.parallel.pipeline = 4;
  c.parallel.pipeline_layout = "2,2,2,2";
  const Plan plan = make_plan(c);
  c.training.global_batch_size = 2;  // one micro-batch
  const std::int64_t middle = make_plan(c).ranks[1].memory_of("activations");
  c.training.global_batch_size = 16;
  EXPECT_EQ(plan.ranks[1].most_in_flight, 3);
  EXPECT_EQ(plan.ranks[1].memory_of("activations"), 3 * middle);
  EXPECT_EQ(plan.ranks[2].memory_of("activations"), 2 * middle);
  c.parallel.schedule = PipelineSchedule::gpipe;
  EXPECT_EQ(make_plan(c).ranks[1].memory_of("activations"), 8 * middle);
  EXPECT_EQ(make_plan(c).ranks[1].most_in_flight, 8);
}

TEST(Plan, RecomputeLowersActivations) {
  Config c = gpt(8);
  const auto activations = [&] { return make_plan(c).ranks[0].memory_of("activations"); };
  const std::int64_t none = activations();
  c.training.recompute = Recompute::selective;
  // Two norm outputs of 64 rows of 64 fp32 numbers in each of 8 layers.
  EXPECT_EQ(none - activations(), 8 * 2 * 64 * 64 * 4);
  c.training.recompute = Recompute::full;
  const std::int64_t full = activations();
  EXPECT_LT(full, none / 8);
  c.training.recompute_layers = 3;  // three segments instead of eight
  EXPECT_EQ(full - activations(), 5 * 64 * 64 * 4);
}

TEST(Plan, RefusesWhatCannotBe) {
  Config c = gpt();
  c.parallel.tensor = 3;
  c.parallel.pipeline = 8;
  try {
    make_plan(c, 7);
    FAIL();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    for (const char* part : {"model.num_heads (4)", "8 pieces", "but there are 7 processes"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  Config misspelt = gpt();
  misspelt.optimizer.no_decay = {"*.bias", "decoder.layer.*"};
  EXPECT_THROW(make_plan(misspelt), ConfigError);
}

TEST(Advice, FitsAndWasPlanned) {
  Config c = seven_billion();
  c.parallel.zero_stage = 0;
  const Plan plan = make_plan(c, 8);
  const std::int64_t limit = 80'000'000'000;
  ASSERT_GT(plan.largest().memory_bytes(), limit);
  const std::optional<PlanAdvice> advice = advise(plan, limit);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->processes, 8);
  EXPECT_EQ(advice->changes, (std::vector<ConfigItem>{{"parallel.zero_stage", "1"}}));
  c.parallel.zero_stage = 1;
  EXPECT_EQ(make_plan(c, 8).largest().memory_bytes(), advice->memory_bytes);
}

TEST(Advice, TakesMoreRanksWhenItMust) {
  const Plan plan = make_plan(seven_billion(), 1);
  for (const std::int64_t limit : {std::int64_t{40'000'000'000}, std::int64_t{12'000'000'000}}) {
    const std::optional<PlanAdvice> advice = advise(plan, limit);
    ASSERT_TRUE(advice) << limit;
    EXPECT_GT(advice->processes, 1);
    Config changed = plan.config;
    std::vector<std::string> overrides;
    for (const ConfigItem& change : advice->changes) overrides.push_back(change.key + "=" + change.value);
    changed = parse_config(to_yaml(changed), "plan", overrides);
    const Plan after = make_plan(changed, advice->processes);
    EXPECT_EQ(after.largest().memory_bytes(), advice->memory_bytes);
    EXPECT_LE(after.largest().memory_bytes(), limit);
  }
  EXPECT_FALSE(advise(make_plan(gpt(), 1), 1000));
}

/// One GPU takes 7B where the optimizer's state is elsewhere; on CPUs that would be the same memory.
TEST(Advice, PutsOptimizerStateIntoHostMemory) {
  Config c = seven_billion();
  const std::int64_t limit = 80'000'000'000;
  const std::optional<PlanAdvice> without = advise(make_plan(c, 1), limit);
  ASSERT_TRUE(without);
  EXPECT_GT(without->processes, 1);
  c.device.type = DeviceChoice::cuda;
  const Plan plan = make_plan(c, 1);
  const std::optional<PlanAdvice> advice = advise(plan, limit);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->processes, 1);
  std::vector<std::string> overrides;
  for (const ConfigItem& change : advice->changes) overrides.push_back(change.key + "=" + change.value);
  EXPECT_NE(std::find(overrides.begin(), overrides.end(), "offload.optimizer=cpu"), overrides.end());
  const Plan after = make_plan(parse_config(to_yaml(plan.config), "plan", overrides), 1);
  EXPECT_EQ(after.largest().memory_bytes(), advice->memory_bytes);
  EXPECT_LE(advice->memory_bytes, limit);
}

/// Stages keep gathered weights from forward to backward, unless these are what does not fit.
TEST(Advice, GathersWeightsAgainWhereTheyCannotBeKept) {
  Config c = seven_billion();
  c.parallel.pipeline = 2;
  c.parallel.zero_stage = 3;
  const Plan kept = make_plan(c, 8);
  c.parallel.zero_reshard = ZeroReshard::always;
  const std::int64_t again = make_plan(c, 8).largest().memory_bytes();
  ASSERT_LT(again, kept.largest().memory_bytes());
  const std::optional<PlanAdvice> advice = advise(kept, again);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->changes, (std::vector<ConfigItem>{{"parallel.zero_reshard", "always"}}));
  EXPECT_EQ(advice->memory_bytes, again);
}

TEST(PlanText, SaysWhatMatters) {
  Config c = gpt();
  c.parallel.tensor = 2;
  c.parallel.sequence = true;
  c.parallel.pipeline = 2;
  const Plan plan = make_plan(c, 8);
  const std::string text = to_text(plan, 1'000'000'000);
  for (const char* part : {"8 ranks: tensor 2 (sequence) x pipeline 2 x data 2", "[0 1] [2 3] [4 5] [6 7]",
                           "embedding + 0", "embedding  gradients, all-reduce",
                           "Schedule 1f1b: 2 stages, 4 micro-batches, bubble", "Fits: the largest rank"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  const std::string tight = to_text(plan, 100'000);
  EXPECT_NE(tight.find("Does not fit: 8 of 8 ranks"), std::string::npos) << tight;
  EXPECT_NE(to_json(plan, 1'000'000'000).find("\"fits\": true"), std::string::npos);
}

TEST(PlanConfigs, EveryShippedFileIsPossible) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs")) {
    if (entry.path().extension() != ".yaml") continue;
    SCOPED_TRACE(entry.path());
    const Plan plan = make_plan(load_config(entry.path()));
    EXPECT_EQ(plan.ranks.size(), static_cast<std::size_t>(plan.mesh.world()));
    EXPECT_GT(plan.largest().memory_bytes(), 0);
    ++count;
  }
  EXPECT_GE(count, 18);
}

}  // namespace
}  // namespace tessera
