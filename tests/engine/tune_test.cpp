/// tessera tune: the products it finds are those of real runs on the same layout, and a search that was
/// interrupted goes on.

#include "tessera/engine/tune.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

#include "engine_support.hpp"
#include "layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::NamedLayout;

Config config_of(const NamedLayout& c) {
  Settings config;
  config.model = {.family = c.family,
                  .num_layers = 4,
                  .hidden_size = 48,
                  .num_heads = 4,
                  .num_kv_heads = c.family == Family::llama ? 2 : 0,
                  .ffn_hidden_size = 92,
                  .vocab_size = 251,
                  .max_positions = 32};
  config.training.seq_length = 24;
  config.training.micro_batch_size = 2;
  config.training.global_batch_size = 16;
  config.device.threads = 1;
  return test::with_overrides(config, c.overrides);
}

std::set<std::string> keys_of(const std::vector<ops::RecordedProduct>& products) {
  std::set<std::string> keys;
  for (const ops::RecordedProduct& product : products) {
    EXPECT_TRUE(keys.insert(product.key).second) << "twice: " << product.shape;
    EXPECT_GT(product.count, 0);
    EXPECT_GT(product.flops, 0);
  }
  return keys;
}

class TuneProducts : public ::testing::TestWithParam<NamedLayout> {};

TEST_P(TuneProducts, AreThoseOfRealRuns) {
  const Config config = config_of(GetParam());
  std::set<std::string> real;
  std::mutex mutex;
  const Batch whole = test::random_batch(16, 24, 3, 251);
  test::run_local(GetParam().ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const auto trace = std::make_shared<Trace>(*engine->ctx().stream);
    engine->set_trace(trace);
    const MeshShape& mesh = engine->mesh().shape();
    engine->step(test::data_part(whole, engine->mesh().coordinates().dp, mesh.dp, 2));
    const auto keys = keys_of(ops::recorded_products(trace->lanes()));
    const std::lock_guard lock(mutex);
    real.insert(keys.begin(), keys.end());
  });
  EXPECT_EQ(keys_of(products_of(config, device_of(config.device))), real);
}

const NamedLayout kCases[] = {
    {"alone", Family::gpt2, {}, 1},
    {"bf16", Family::llama, {"training.precision=bf16"}, 1},
    {"recompute", Family::llama, {"training.recompute=full", "training.recompute_layers=2"}, 1},
    {"tp2_dp2", Family::gpt2, {"parallel.tensor=2"}, 4},
    {"tp4_sp_bf16",
     Family::llama,
     {"parallel.tensor=4", "parallel.sequence=true", "training.precision=bf16"},
     4},
    {"pp3_uneven", Family::gpt2, {"parallel.pipeline=3", "parallel.pipeline_layout=\"2,1,1\""}, 3},
    {"pp2_interleaved",
     Family::llama,
     {"parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"},
     2},
    {"pp2_zb_v_tp2",
     Family::gpt2,
     {"parallel.pipeline=2", "parallel.schedule=zb-v", "parallel.tensor=2", "parallel.sequence=true"},
     4},
};
INSTANTIATE_TEST_SUITE_P(Layouts, TuneProducts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

/// How the products of a GPT-2 read: of a layer forward, its gradients, and of the head.
TEST(Tune, ProductsSayWhatTheyAre) {
  const Config config = config_of({"", Family::gpt2, {"training.precision=bf16"}, 1});
  const auto products = products_of(config, device_of(config.device));
  const auto has = [&](const std::string& shape, const std::string& dtypes) {
    return std::any_of(products.begin(), products.end(),
                       [&](const ops::RecordedProduct& p) { return p.shape == shape && p.dtypes == dtypes; });
  };
  EXPECT_TRUE(has("48 x 144 x 48, B transposed", "bfloat16")) << "qkv";
  EXPECT_TRUE(has("144 x 48 x 48, A transposed", "bfloat16 into float32")) << "its weight's gradient";
  EXPECT_TRUE(has("48 x 92 x 48, B transposed", "bfloat16")) << "fc1";
}

/// However many layers an encoder is said to have, there is one of each kind.
TEST(Tune, ProductsAreOfAnEncoderAndADecoder) {
  Config config = config_of({"", {"t5"}, {"training.decoder_seq_length=16", "model.encoder_layers=3"}, 1});
  const auto products = products_of(config, device_of(config.device));
  for (const char* shape :
       {"48 x 144 x 48, B transposed", "32 x 144 x 48, B transposed", "48 x 96 x 48, B transposed"}) {
    EXPECT_TRUE(std::ranges::any_of(products, [&](const ops::RecordedProduct& p) {
      return p.shape == shape;
    })) << shape;
  }
}

TEST(Tune, ASearchGoesOnWhereItEnded) {
  const Config config = config_of({"", Family::gpt2, {}, 1});
  const Device device = device_of(config.device);
  auto products = products_of(config, device);
  const auto file = std::filesystem::temp_directory_path() / ("tessera-tune-" + std::to_string(::getpid()));
  const ExecCtx ctx = test::context();
  const auto tune = [&] {
    int told = 0;
    const auto timed = tune_products(ctx, products, file.string(), [&](const auto&, const auto&) { ++told; });
    EXPECT_EQ(told, static_cast<int>(products.size()));
    return timed;
  };
  if (!test::on_cuda()) {
    EXPECT_THROW(tune(), ConfigError);
    return;
  }
  const auto all = static_cast<std::int64_t>(products.size());
  const auto last = products.back();
  products.pop_back();
  EXPECT_EQ(tune(), all - 1);
  products.push_back(last);
  EXPECT_EQ(tune(), 1) << "what the file has is not timed again";
  EXPECT_EQ(tune(), 0);
  std::filesystem::remove(file);
}

TEST(Tune, WhereTablesAre) {
  const auto tables = [](std::vector<std::string> variables) {
    return gemm_tables(read_environment(variables));
  };
  const std::string below = "/tessera/gemm_table.txt";
  EXPECT_EQ(tables({"HOME=/home/me"}).at(0), "/home/me/.cache" + below);
  EXPECT_EQ(tables({"HOME=/home/me", "XDG_CACHE_HOME=/scratch"}).at(0), "/scratch" + below);
  EXPECT_EQ(default_gemm_table(read_environment(std::array<std::string, 0>{})), "");
}

}  // namespace
}  // namespace tessera
