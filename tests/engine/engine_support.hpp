#pragma once
/// Tiny models, batches and runs for the engine's tests.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/config_file.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/engine/build.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera::test {

/// Resolved; no schedule, so that the first update already moves the weights.
inline Config tiny_config(double dropout = 0.0) {
  Settings c;
  c.model = {.family = Family::gpt2,
             .num_layers = 2,
             .hidden_size = 20,
             .num_heads = 5,
             .ffn_hidden_size = 33,
             .vocab_size = 257,
             .max_positions = 16,
             .dropout = dropout,
             .attention_dropout = dropout,
             .init_std = 0.1};
  c.optimizer.lr = 1e-2;
  c.lr_schedule.style = LrStyle::constant;
  c.training.steps = 40;
  c.training.seq_length = 11;
  c.training.micro_batch_size = 2;
  c.training.global_batch_size = 4;
  c.training.eval_interval = 0;
  c.device.threads = 1;
  return c;
}

/// Four layers, an encoder's and a decoder's two each.
inline Config tiny_t5(double dropout = 0.0) {
  Config c = tiny_config();
  c.model = ModelSettings{.family = {"t5"},
                          .num_layers = 4,
                          .hidden_size = 16,
                          .num_heads = 2,
                          .head_dim = 5,
                          .ffn_hidden_size = 24,
                          .vocab_size = 31,
                          .max_positions = 12,
                          .dropout = dropout,
                          .attention_dropout = dropout};
  c.training.seq_length = 13;
  c.training.decoder_seq_length = 7;
  return c;
}

inline Config tiny_llama(double dropout = 0.0) {
  Config c = tiny_config(dropout);
  ModelSettings m{.family = Family::llama,
                  .num_layers = 2,
                  .hidden_size = 24,
                  .num_heads = 6,
                  .num_kv_heads = 2,
                  .ffn_hidden_size = 19,
                  .vocab_size = 257,
                  .max_positions = 16,
                  .dropout = dropout,
                  .attention_dropout = dropout,
                  .init_std = 0.1};
  c.model = m;
  return c;
}

using Overrides = std::vector<std::string>;

/// As a command line changes a file.
inline Config with_overrides(const Config& config, const Overrides& overrides) {
  return parse_config(to_yaml(config), "case", overrides);
}

/// A layout of `ranks` for a parametrised test.
struct NamedLayout {
  const char* name;
  Family family;
  Overrides overrides;
  int ranks;
};
inline void PrintTo(const NamedLayout& c, std::ostream* out) { *out << c.name; }

/// Random tokens; every seventh label is ignored.
inline Batch random_batch(std::int64_t samples, std::int64_t length, unsigned seed,
                          std::int32_t vocab = 257) {
  std::mt19937 generator(seed);
  Batch batch;
  batch.batch = samples;
  batch.seq_length = length;
  for (std::int64_t i = 0; i < samples * length; ++i) {
    batch.tokens.push_back(static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab)));
    batch.labels.push_back(
        i % 7 == 6 ? -100 : static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab)));
  }
  return batch;
}

/// Samples [first, first + count) with numbers that begin at 0: what a caller who splits by hand passes.
inline Batch part(const Batch& batch, std::int64_t first, std::int64_t count) {
  Batch piece = slice(batch, first, count);
  piece.sample0 = 0;
  return piece;
}

/// The accumulated gradient.
inline std::vector<float> gradient_of(Engine& engine) {
  const FlatGradient g = engine.params().gradient().sum();
  std::vector<float> values = g.flat.to_floats();
  for (float& v : values) v *= static_cast<float>(g.scale);
  return values;
}
inline std::vector<float> weights_in(Engine& engine) {
  return engine.params().weights().main_buffer().to_floats();
}

/// The gradient parameter by parameter, so that small ones count as much as large ones.
inline void expect_same_gradients(Engine& a, const std::vector<float>& expected, double tolerance) {
  const std::vector<float> got = gradient_of(a);
  for (const ParamSlot& slot : a.params().slots()) {
    const auto from = static_cast<std::ptrdiff_t>(slot.offset),
               to = from + static_cast<std::ptrdiff_t>(slot.numel);
    const std::vector<float> x(got.begin() + from, got.begin() + to),
        y(expected.begin() + from, expected.begin() + to);
    EXPECT_LE(distance(x, y, 1e-4), tolerance) << slot.parameter->name();
  }
}

class FolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(info->test_suite_name()) + "-" + info->name();
    for (char& c : name) c = c == '/' ? '-' : c;
    dir_ = std::filesystem::temp_directory_path() / ("tessera-" + std::to_string(::getpid()) + "-" + name);
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  /// A corpus of bytes at dir_/corpus, and a configuration that trains on it in dir_/`name`.
  Config run_config(const std::string& name, double dropout = 0.0) {
    const std::string prefix = (dir_ / "corpus").string();
    if (!std::filesystem::exists(prefix + ".idx")) {
      std::mt19937 generator(5);
      IndexedDatasetWriter writer(prefix, DType::u16);
      for (int document = 0; document < 30; ++document) {
        std::vector<std::int32_t> tokens(20 + generator() % 60);
        for (auto& t : tokens) t = static_cast<std::int32_t>(97 + generator() % 13);
        tokens.push_back(256);
        writer.add_document(tokens);
      }
      writer.finish();
    }
    Config c = tiny_config(dropout);
    c.data.path = {{1.0, prefix}};
    c.data.split = "90,10,0";
    c.data.cache_dir = (dir_ / "cache").string();
    c.logging.dir = (dir_ / name).string();
    c.logging.peak_tflops = 1;  // or a device of unknown peak is warned about
    c.checkpoint.every = 25;
    c.checkpoint.dir.reset();  // below logging.dir, wherever a test puts that
    return c;
  }

  std::filesystem::path dir_;
};

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void spill(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace tessera::test
