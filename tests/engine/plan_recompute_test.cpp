/// training.recompute auto: what is chosen at which limit, on every rank alike, and that it changes no
/// number.

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "tessera/engine/plan.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_edge_support.hpp"

namespace tessera {
namespace {

using test::expect_error;
using test::Overrides;

constexpr Recompute kAuto = Recompute::automatic;

Config base(const Overrides& overrides) {
  Settings c;
  c.model = {.family = Family::llama,
             .num_layers = 8,
             .hidden_size = 64,
             .num_heads = 4,
             .num_kv_heads = 2,
             .ffn_hidden_size = 96,
             .vocab_size = 251,
             .max_positions = 64};
  c.training.seq_length = 64;
  c.training.micro_batch_size = 4;
  c.training.global_batch_size = 64;
  c.device.threads = 1;
  return test::with_overrides(c, overrides);
}

/// The most any rank needs with what is said by hand.
std::int64_t needed(Config config, const RecomputeOptions& options) {
  config.training.recompute = options.what;
  config.training.recompute_method = options.method;
  config.training.recompute_layers = options.layers;
  return make_plan(config).largest().memory_bytes();
}

/// What auto is with so many bytes.
RecomputeChoice choice_at(Config config, std::int64_t bytes) {
  config.training.recompute = kAuto;
  config.device.memory_gb = static_cast<double>(bytes) / 1e9;
  const Plan plan = make_plan(config);
  const RecomputeChoice& choice = *plan.recompute;
  EXPECT_EQ(choice.limit.bytes, bytes);
  EXPECT_EQ(RecomputeOptions::from(plan.config.training), choice.chosen.options);
  // What was counted quickly is what a whole plan of every rank says.
  EXPECT_EQ(plan.largest().memory_bytes(), choice.chosen.memory_bytes);
  return choice;
}

struct Case {
  const char* name;
  Overrides overrides;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class AutoRecompute : public ::testing::TestWithParam<Case> {
 protected:
  struct Way {
    RecomputeOptions options;
    std::int64_t bytes = 0;
  };

  /// Every way there is, cheapest first, with what it needs by a plan of its own.
  std::vector<Way> ways() const {
    std::vector<RecomputeOptions> list{{.what = Recompute::none}, {.what = Recompute::selective}};
    std::int64_t most = 0;
    for (const ModelPiece& piece : make_plan(config_).pieces) most = std::max(most, piece.num_layers);
    for (std::int64_t n = 1; n <= most; ++n)
      list.push_back({.what = Recompute::full, .method = RecomputeMethod::block, .layers = n});
    RecomputeOptions least{.what = Recompute::full};
    for (std::int64_t n = 2; n <= most; ++n) {
      const RecomputeOptions next{.what = Recompute::full, .layers = n};
      if (needed(config_, next) < needed(config_, least)) least = next;
    }
    list.push_back(least);
    std::vector<Way> result;
    for (const RecomputeOptions& options : list) result.push_back({options, needed(config_, options)});
    return result;
  }

  const Config config_ = base(GetParam().overrides);
};

TEST_P(AutoRecompute, TakesTheCheapestThatFitsToTheByte) {
  const std::vector<Way> all = ways();
  std::size_t chosen = 0;
  for (const Way& at : all) {
    for (const std::int64_t limit : {at.bytes, at.bytes - 1}) {
      const auto expected =
          std::find_if(all.begin(), all.end(), [&](const Way& way) { return way.bytes <= limit; });
      const RecomputeChoice choice = choice_at(config_, limit);
      ASSERT_EQ(choice.fits(), expected != all.end()) << limit;
      if (!choice.fits()) continue;
      EXPECT_EQ(choice.chosen.options, expected->options) << to_text(choice);
      EXPECT_EQ(choice.chosen.memory_bytes, expected->bytes);
      ++chosen;
    }
  }
  EXPECT_GT(chosen, all.size());
}

TEST_P(AutoRecompute, NamesTheLeastWhereNothingFits) {
  const std::vector<Way> all = ways();
  const auto least =
      std::min_element(all.begin(), all.end(), [](const Way& a, const Way& b) { return a.bytes < b.bytes; });
  const RecomputeChoice choice = choice_at(config_, least->bytes - 1);
  EXPECT_FALSE(choice.fits());
  EXPECT_EQ(choice.chosen.memory_bytes, least->bytes);
  EXPECT_EQ(choice.tried.size(), 4u);
}

const Case kCases[] = {
    {"one_rank", {}},
    {"bf16", {"training.precision=bf16"}},
    {"tp2_uneven_vocabulary", {"parallel.tensor=2", "parallel.data=2"}},
    {"tp4_sequence", {"parallel.tensor=4", "parallel.sequence=true"}},
    {"uneven_stages", {"parallel.pipeline=3", "parallel.pipeline_layout=\"1,5,2\""}},
    {"a_stage_without_layers", {"parallel.pipeline=2", "parallel.pipeline_layout=\"8,0\""}},
    {"gpipe", {"parallel.pipeline=2", "parallel.schedule=gpipe"}},
    {"interleaved",
     {"parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
      "parallel.pipeline_layout=\"3,2,1,2\""}},
    {"zb_h1", {"parallel.pipeline=2", "parallel.schedule=zb-h1"}},
    {"zb_v", {"parallel.pipeline=2", "parallel.schedule=zb-v"}},
};
INSTANTIATE_TEST_SUITE_P(Layouts, AutoRecompute, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AutoRecomputeRanks, TheOneThatNeedsMostDecides) {
  // The middle stage holds most layers; the others would fit with less recomputation.
  Config config = base({"parallel.pipeline=3", "parallel.pipeline_layout=\"1,6,1\""});
  const Plan none = make_plan(config);
  EXPECT_EQ(none.largest().at.pp, 1);
  const std::int64_t limit = none.largest().memory_bytes() - 1;
  EXPECT_LT(none.ranks[0].memory_bytes(), limit);
  EXPECT_EQ(choice_at(config, limit).chosen.options.what, Recompute::selective);
}

TEST(AutoRecomputeLimit, IsTheGivenOneOrAShareOfThisMachine) {
  DeviceConfig device{.type = DeviceChoice::cpu};
  const MemoryLimit one = memory_limit(device, 1), four = memory_limit(device, 4);
  EXPECT_EQ(four.bytes, one.bytes / 4);
  EXPECT_GT(one.bytes, 0);
  EXPECT_LT(one.bytes, memory_bytes_of({}));
  EXPECT_NE(four.source.find("1 / 4 of a machine's"), std::string::npos) << four.source;
  device.memory_gb = 1.5;
  EXPECT_EQ(memory_limit(device, 4).bytes, 1'500'000'000);
  EXPECT_EQ(memory_limit(device, 4).source, "device.memory_gb");
}

TEST(AutoRecomputeText, SaysWhatWasTriedAndWhy) {
  Config config = base({"training.recompute=auto"});
  const std::int64_t selective = needed(config, {.what = Recompute::selective});
  config.device.memory_gb = static_cast<double>(selective) / 1e9;
  const Plan plan = make_plan(config);
  const std::string text = to_text(plan, selective), json = to_json(plan, selective);
  for (const char* part :
       {"fp32, recompute selective\n", "recompute  auto is selective, the first that fits into ",
        "(device.memory_gb): none ", "B, selective ", "Fits: the largest rank"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  for (const char* part : {"\"recompute_auto\"", "\"limit_source\": \"device.memory_gb\"", "\"tried\""})
    EXPECT_NE(json.find(part), std::string::npos) << part << "\n" << json;
  EXPECT_EQ(to_json(make_plan(base({}))).find("recompute_auto"), std::string::npos);
}

TEST(AutoRecomputeUnsettled, ReachesNoModel) {
  const Config config = base({"training.recompute=auto"});
  expect_error<InvalidArgument>([&] { RecomputeOptions::from(config.training); }, "still auto",
                                "settle_recompute");
}

TEST(SettleRecompute, LeavesAloneWhatIsSettled) {
  const Config config = base({"training.recompute=full", "training.recompute_layers=3"});
  EXPECT_EQ(settle_recompute(config, nullptr), config);
  EXPECT_EQ(settle_recompute(config, 1), config);
}

TEST(SettleRecompute, WithoutANumberItAsksTheMachine) {
  Config config = base({"training.recompute=auto"});
  Config none = config;
  none.training.recompute = Recompute::none;
  EXPECT_EQ(settle_recompute(config, 1), none);
  test::run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    EXPECT_EQ(settle_recompute(config, world), none);
  });
}

TEST(SettleRecompute, IsTheSameOnEveryRankAndToldOnce) {
  Config config = base({"training.recompute=auto", "parallel.pipeline=2"});
  const RecomputeOptions block{.what = Recompute::full, .method = RecomputeMethod::block, .layers = 2};
  config.device.memory_gb = static_cast<double>(needed(config, block)) / 1e9;
  std::mutex mutex;
  std::vector<Config> settled;
  std::string told;
  LogOptions options;
  options.console = false;
  options.callback = [&](LogLevel, std::string_view line) { told += std::string(line) + "\n"; };
  const Logger log(options);
  test::run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const Config own = settle_recompute(config, world, log);
    const std::lock_guard lock(mutex);
    settled.push_back(own);
  });
  ASSERT_EQ(settled.size(), 2u);
  EXPECT_EQ(settled[0], settled[1]);
  EXPECT_EQ(RecomputeOptions::from(settled[0].training), block);
  EXPECT_EQ(settled[0], settle_recompute(config, 2));
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  EXPECT_NE(told.find("training.recompute auto is full (block, 2 layers), the first"), std::string::npos)
      << told;
}

TEST(SettleRecompute, SaysOnEveryRankWhatWouldFitWhereNothingDoes) {
  Config config = base({"training.recompute=auto", "parallel.pipeline=2"});
  std::int64_t least = needed(config, {.what = Recompute::none});
  for (std::int64_t n = 1; n <= 8; ++n)
    least = std::min(least, needed(config, {.what = Recompute::full, .layers = n}));
  config.device.memory_gb = static_cast<double>(least - 1) / 1e9;
  expect_error<ConfigError>([&] { settle_recompute(config, 2); },
                            "training.recompute auto finds nothing that fits into",
                            "(device.memory_gb); least needs full (block, 4 layers): none ",
                            "What fits: training.micro_batch_size=2 on 2 processes");
  test::run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    expect_error<ConfigError>([&] { build_engine(config, true, world); }, "finds nothing", "What fits:");
  });
  // What is not trained keeps nothing.
  config.parallel = {};
  EXPECT_NO_THROW(build_engine(config, false));
}

/// Losses of three steps on two stages, by every rank.
std::vector<double> losses(const Config& config) {
  const std::vector<Batch> batches{test::random_batch(8, test::edge::kSeq, 1, test::edge::kVocab),
                                   test::random_batch(8, test::edge::kSeq, 2, test::edge::kVocab),
                                   test::random_batch(8, test::edge::kSeq, 3, test::edge::kVocab)};
  std::vector<double> result;
  test::run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    for (const Batch& batch : batches) {
      const double loss = engine->step(batch).loss;
      if (world->rank() == 0) result.push_back(loss);
    }
  });
  return result;
}

TEST(SettleRecompute, TrainsAsTheSameChoiceByHand) {
  const Config by_hand = test::edge::edge_config(
      Family::gpt2, {"parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
                     "training.recompute=full", "training.recompute_method=block"});
  Config config = by_hand;
  config.training.recompute = kAuto;
  config.training.recompute_method = RecomputeMethod::uniform;
  config.device.memory_gb = static_cast<double>(make_plan(by_hand).largest().memory_bytes()) / 1e9;
  ASSERT_EQ(RecomputeOptions::from(settle_recompute(config, 2).training),
            RecomputeOptions::from(by_hand.training));
  const std::vector<double> chosen = losses(config);
  EXPECT_EQ(chosen, losses(by_hand));
  Config none = by_hand;
  none.training.recompute = Recompute::none;
  EXPECT_EQ(chosen, losses(none));
}

struct AutoRecomputeRuns : test::FolderTest {};

TEST_F(AutoRecomputeRuns, GoOnUnderAnotherChoice) {
  Config straight = run_config("straight", 0.1);
  straight.training.steps = 6;
  straight.checkpoint.every = 3;
  const TrainResult expected = train(straight, {}, Logger::silent());

  Config config = straight;
  config.logging.dir = (dir_ / "run").string();
  config.training.recompute = kAuto;
  config.training.steps = 3;
  config.lr_schedule.decay_steps = 6;
  config.device.memory_gb = 1;
  train(config, {}, Logger::silent());
  EXPECT_EQ(load_config(dir_ / "run/config.yaml").training.recompute, Recompute::none);

  config.training.steps = 6;
  config.device.memory_gb = static_cast<double>(needed(config, {.what = Recompute::selective})) / 1e9;
  std::string told;
  LogOptions options;
  options.console = false;
  options.callback = [&](LogLevel, std::string_view line) { told += std::string(line) + "\n"; };
  const TrainResult result = train(config, {}, Logger(options));
  EXPECT_NE(told.find("training.recompute changes from none to selective"), std::string::npos) << told;
  EXPECT_EQ(load_config(dir_ / "run/config.yaml").training.recompute, Recompute::selective);
  EXPECT_EQ(result.train_loss, expected.train_loss);
  EXPECT_EQ(test::slurp(dir_ / "run/checkpoints/step-00000006/model_tp_0_pp_0.safetensors"),
            test::slurp(dir_ / "straight/checkpoints/step-00000006/model_tp_0_pp_0.safetensors"));
}

TEST_F(AutoRecomputeRuns, ThatFitNowhereLeaveNothingBehind) {
  Config config = run_config("run");
  config.training.recompute = kAuto;
  config.device.memory_gb = 1e-6;
  expect_error<ConfigError>([&] { train(config, {}, Logger::silent()); }, "nothing that fits into 1000 B",
                            "No layout was found that fits");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "run"));
}

}  // namespace
}  // namespace tessera
