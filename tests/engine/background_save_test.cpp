/// Checkpoints that are written while training goes on: the bytes of one that training waited for, whatever
/// fails meanwhile.

#include "tessera/engine/background_save.hpp"

#include <atomic>
#include <map>
#include <thread>

#include "tessera/base/model_math.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

Config config_of(int tp, int dp) {
  Config config = tiny_llama(0.1);
  config.training.global_batch_size = 4;
  config.training.micro_batch_size = 1;
  config.model.ffn_hidden_size = 20;
  config.parallel.tensor = tp;
  config.parallel.data = dp;
  return config;
}

Batch own_part(const Engine& engine, std::int64_t step) {
  return data_part(random_batch(4, 11, static_cast<unsigned>(step)), engine.mesh().coordinates().dp,
                   engine.mesh().shape().dp, 1);
}

std::map<std::string, std::vector<std::byte>> contents(const fs::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& tensor : reader.manifest().tensors) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.shape.numel()) * size_of(tensor.dtype));
    reader.read(tensor.name, bytes);
    all[tensor.name] = bytes;
  }
  return all;
}

struct BackgroundSaves : FolderTest {
  bool nothing_but(const std::string& name) const {
    for (const auto& entry : fs::directory_iterator(dir_)) {
      if (entry.path().filename() != name && entry.path().filename() != "latest") return false;
    }
    return true;
  }
};

TEST_F(BackgroundSaves, HoldWhatWasThereWhenTheyBeganWhileTrainingGoesOn) {
  for (const auto& [tp, dp] : {std::pair{1, 1}, {2, 2}}) {
    const fs::path waited = dir_ / "waited", beside = dir_ / "beside";
    const Config config = config_of(tp, dp);
    std::atomic<bool> go = false;
    run_ranks(tp * dp, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config, true, world);
      engine->step(own_part(*engine, 1));
      const RunState run{.step = 1, .config = config};
      save_engine(waited, *engine, run, {});
      SaveOptions options;
      options.on_phase = [&](SavePhase phase) {
        while (phase == SavePhase::tensor_written && !go) std::this_thread::yield();
      };
      StagingMemory memory;
      BackgroundSave save(beside, *engine, run, options, {}, memory);
      for (std::int64_t step = 2; step < 5; ++step) engine->step(own_part(*engine, step));
      world->barrier(engine->ctx());
      EXPECT_FALSE(save.settled());
      EXPECT_FALSE(fs::exists(beside / "step-00000001"));
      go = true;
      EXPECT_EQ(save.wait(), beside / "step-00000001");
      EXPECT_TRUE(save.settled());
    });
    EXPECT_EQ(contents(beside / "step-00000001"), contents(waited / "step-00000001"));
    for (const auto& entry : fs::directory_iterator(beside / "step-00000001"))
      EXPECT_NE(entry.path().extension(), ".record");
    fs::remove_all(waited);
    fs::remove_all(beside);
  }
}

TEST_F(BackgroundSaves, FailOnEveryRankIfTheyFailOnOneAndLeaveNothing) {
  const Config config = config_of(1, 3);
  for (const int culprit : {0, 2}) {
    std::atomic<int> failed = 0;
    run_ranks(3, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config, true, world);
      SaveOptions options;
      options.on_phase = [&](SavePhase phase) {
        if (world->rank() == culprit && phase == SavePhase::tensor_written) throw IoError("the disk is full");
      };
      StagingMemory memory;
      BackgroundSave save(dir_, *engine, {.step = 7, .config = config}, options, {}, memory);
      try {
        save.wait();
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("the disk is full"), std::string::npos) << error.what();
        ++failed;
      }
    });
    EXPECT_EQ(failed, 3);
    EXPECT_TRUE(nothing_but(""));
  }
}

TEST_F(BackgroundSaves, NameTheRankThatWritesNothing) {
  Config config = config_of(1, 2);
  config.parallel.timeout_s = 0.5;
  std::atomic<bool> over = false;
  run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    SaveOptions options;
    options.on_phase = [&](SavePhase) {
      while (world->rank() == 1 && !over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
    StagingMemory memory;
    BackgroundSave save(dir_, *engine, {.step = 7, .config = config}, options, {}, memory);
    if (world->rank() == 0)
      expect_error<IoError>([&] { save.wait_here(); }, "rank 1 has not written its part of the checkpoint");
    over = world->rank() == 0 ? true : over.load();
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
}

TEST_F(BackgroundSaves, EndWithWhoeverLeavesThem) {
  const Config config = config_of(1, 1);
  const auto engine = build_engine(config, true);
  StagingMemory memory;
  { BackgroundSave save(dir_, *engine, {.step = 3, .config = config}, {}, {}, memory); }
  EXPECT_EQ(verify_checkpoint(dir_ / "step-00000003"), std::vector<std::string>{});
  EXPECT_TRUE(nothing_but("step-00000003"));
  const std::byte* before = memory.at_least(1);
  { BackgroundSave save(dir_, *engine, {.step = 4, .config = config}, {}, {}, memory); }
  EXPECT_EQ(memory.at_least(1), before);  // its pages serve again
}

TEST_F(BackgroundSaves, NeedRoomForCopiesOfAllRanksOfAHost) {
  const Config config = config_of(1, 2);
  run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const BackgroundRoom room = background_room(*engine);
    EXPECT_EQ(room.needed_bytes, parameter_count(config.model) * 12);  // weight and two moments, each once
    EXPECT_LT(room.largest_bytes, room.needed_bytes);
    EXPECT_GE(room.largest_bytes, room.needed_bytes / 2);
    EXPECT_TRUE(room.fits);
  });
}

TEST_F(BackgroundSaves, ARunWithThemIsTheRunWithout) {
  const auto run = [&](const char* name, AutoSwitch async) {
    Config config = run_config(name, 0.1);
    config.training.steps = 9;
    config.checkpoint.every = 2;
    config.checkpoint.keep = 9;
    config.checkpoint.async = async;
    std::vector<std::string> saved;
    TrainHooks hooks;
    hooks.on_checkpoint = [&](const fs::path& path) { saved.push_back(path.filename().string()); };
    LogOptions log;
    log.console = false;
    train(config, hooks, Logger(log));
    return saved;
  };
  const std::vector<std::string> all = {"step-00000002", "step-00000004", "step-00000006", "step-00000008",
                                        "step-00000009"};
  EXPECT_EQ(run("waits", AutoSwitch::off), all);
  EXPECT_EQ(run("beside", AutoSwitch::on), all);
  for (const std::string& name : all)
    EXPECT_EQ(contents(dir_ / "beside/checkpoints" / name), contents(dir_ / "waits/checkpoints" / name));
}

}  // namespace
}  // namespace tessera::test
