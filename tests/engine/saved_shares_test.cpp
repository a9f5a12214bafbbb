/// Who writes what of a checkpoint: what data ranks hold in common each writes a part of, and the bytes are
/// those of one rank.

#include <map>

#include "tessera/base/model_math.hpp"
#include "tessera/engine/background_save.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

/// As large as it takes for what files have besides tensors not to count.
Config config_of(int dp, int zero_stage) {
  Config config = tiny_llama();
  config.model.num_layers = 1;
  config.model.hidden_size = 96;
  config.model.vocab_size = 45'000;
  config.training.global_batch_size = 4;
  config.training.micro_batch_size = 1;
  config.parallel.data = dp;
  config.parallel.zero_stage = zero_stage;
  return config;
}

std::map<std::string, std::vector<std::byte>> contents(const fs::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  EXPECT_EQ(reader.verify(), std::vector<std::string>{});
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& tensor : reader.manifest().tensors) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.shape.numel()) * size_of(tensor.dtype));
    reader.read(tensor.name, bytes);
    all[tensor.name] = bytes;
  }
  return all;
}

std::map<std::string, std::uint64_t> sizes(const fs::path& checkpoint) {
  std::map<std::string, std::uint64_t> all;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    all[entry.path().filename().string()] = entry.file_size();
  return all;
}

struct SavedShares : FolderTest {
  /// What two data ranks save that have loaded `from`. `culprit`: a rank whose disk fails meanwhile.
  static void save_again(const fs::path& from, const fs::path& root, int zero_stage, bool with_optimizer,
                         std::optional<int> culprit = std::nullopt) {
    const Config config = config_of(2, zero_stage);
    const StateParts parts{.optimizer = with_optimizer};
    run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config, true, world);
      load_engine(CheckpointReader(from), *engine, parts);
      SaveOptions options;
      options.on_phase = [&](SavePhase phase) {
        if (world->rank() == culprit && phase == SavePhase::tensor_written) throw IoError("the disk is gone");
      };
      StagingMemory memory;
      BackgroundSave save(root, *engine, {.step = 2, .config = config}, options, parts, memory);
      const auto wait = [&] { save.wait(); };
      if (!culprit) {
        wait();
      } else if (world->rank() == culprit) {
        expect_error<IoError>(wait, "the disk is gone");
      } else {
        expect_error<Error>(wait, "the disk is gone");
      }
    });
  }
};

TEST_F(SavedShares, DataRanksWriteEqualPartsOfWhatAllHoldAndTheBytesOfOne) {
  const Config config = config_of(1, 1);
  const auto engine = build_engine(config, true);
  engine->step(random_batch(4, 11, 1));
  const fs::path one = save_engine(dir_ / "one", *engine, {.step = 1, .config = config}, {});
  auto expected = contents(one);
  for (const int stage : {0, 1}) {
    const bool with_optimizer = stage == 0;  // each has its own share of it in stage 1
    const fs::path root = dir_ / ("zero" + std::to_string(stage)), saved = root / "step-00000002";
    save_again(one, root, stage, with_optimizer);
    if (!with_optimizer)
      std::erase_if(expected, [](const auto& each) { return !each.first.starts_with("param."); });
    EXPECT_TRUE(contents(saved) == expected) << "zero_stage " << stage;
    const auto files = sizes(saved);
    EXPECT_EQ(files.size(), with_optimizer ? 5u : 3u);
    const auto expect_half = [&](const std::string& file, std::int64_t bytes) {
      ASSERT_TRUE(files.contains(file)) << file;
      EXPECT_NEAR(static_cast<double>(files.at(file)) / static_cast<double>(bytes / 2), 1.0, 0.001) << file;
    };
    const std::int64_t all = parameter_count(config.model);
    for (const char* rank : {"0", "1"}) {
      const std::string place = std::string("_tp_0_pp_0_dp_") + rank + ".safetensors";
      expect_half("model" + place, 4 * all);
      if (with_optimizer) expect_half("optimizer" + place, 8 * all);
    }
  }
  // Whoever of them fails, the last one stays.
  for (const int culprit : {0, 1}) {
    save_again(one, dir_ / "one", 1, false, culprit);
    EXPECT_EQ(find_latest(dir_ / "one", {.check_contents = true}).step, 1);
    EXPECT_FALSE(fs::exists(dir_ / "one/step-00000002"));
  }
}

}  // namespace
}  // namespace tessera::test
