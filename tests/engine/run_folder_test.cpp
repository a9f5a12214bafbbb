/// Which folders a run may use.

#include "engine/run_folder.hpp"

#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

using test::expect_error;
using test::spill;

struct RunFolders : test::FolderTest {
  const Logger log = Logger::silent();
};

TEST_F(RunFolders, AForeignFolderIsRefusedAndLeftAlone) {
  const Config config = run_config("thesis");
  std::filesystem::create_directories(dir_ / "thesis");
  spill(dir_ / "thesis/chapter1.txt", "words");
  expect_error<ConfigError>([&] { RunFolder(config, log); }, "thesis", "not empty", "another folder");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_ / "thesis"), {}), 1);
}

TEST_F(RunFolders, EmptyAndAbsentFoldersAreTaken) {
  const Config config = run_config("a/b/c");
  { const RunFolder made(config, log); }
  EXPECT_TRUE(std::filesystem::is_directory(dir_ / "a/b/c"));
  RunFolder again(config, log);
  EXPECT_TRUE(again.checkpoints_to_try().empty());
}

TEST_F(RunFolders, AFileInTheWayIsAnError) {
  spill(dir_ / "file", "words");
  const Config config = run_config("file");
  EXPECT_THROW(RunFolder(config, log), Error);
  const Config below = run_config("file/run");
  EXPECT_THROW(RunFolder(below, log), Error);
}

TEST_F(RunFolders, AnotherRunsFolderIsRefusedWithTheKeysThatDiffer) {
  const Config config = run_config("run");
  RunFolder(config, log).write_config();
  spill(dir_ / "run/metrics.jsonl", "{\"step\":1}\n");
  Config other = config;
  other.model.num_layers = 3;
  other.training.seed = 9;
  other.training.precision = Precision::bf16;
  other.optimizer.lr = 1.0;
  try {
    RunFolder(other, log);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    for (const char* part :
         {"another run", "model.num_layers: 2 there, 3 here", "training.seed: 1234 there, 9 here",
          "training.precision: fp32 there, bf16 here"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    EXPECT_EQ(message.find("optimizer.lr"), std::string::npos) << message;
  }
}

TEST_F(RunFolders, WhatDoesNotChangeTheModelOrTheDataMayChange) {
  const Config config = run_config("run");
  RunFolder(config, log).write_config();
  spill(dir_ / "run/metrics.jsonl", "{\"step\":1}\n");
  Config other = config;
  other.training.steps = 100;
  other.training.micro_batch_size = 1;
  other.training.eval_interval = 5;
  other.optimizer.lr = 1e-4;
  other.checkpoint.keep = 1;
  other.device.threads = 1;
  std::string told;
  LogOptions options;
  options.console = false;
  options.callback = [&](LogLevel, std::string_view line) { told += std::string(line) + "\n"; };
  const RunFolder folder(other, Logger(options));
  EXPECT_NE(told.find("optimizer.lr changes from"), std::string::npos) << told;
  EXPECT_EQ(told.find("checkpoint.keep"), std::string::npos) << told;
}

TEST_F(RunFolders, ARunThatNeverBeganIsInNobodysWay) {
  Config config = run_config("run");
  RunFolder(config, log).write_config();
  spill(dir_ / "run/metrics.jsonl", "");
  config.model.num_layers = 3;
  EXPECT_NO_THROW(RunFolder(config, log));
  std::filesystem::create_directories(dir_ / "run/checkpoints/step-00000005");
  expect_error<ConfigError>([&] { RunFolder(config, log); }, "model.num_layers: 2 there, 3 here");
}

TEST_F(RunFolders, TheWrittenConfigurationIsTheConfiguration) {
  const Config config = run_config("run");
  RunFolder(config, log).write_config();
  EXPECT_EQ(load_config(dir_ / "run/config.yaml"), config);
}

TEST_F(RunFolders, ResumeNoneDoesNotMixCheckpoints) {
  Config config = run_config("run");
  std::filesystem::create_directories(dir_ / "run/checkpoints/step-00000005");
  spill(dir_ / "run/config.yaml", to_yaml(config));
  config.checkpoint.resume = "none";
  expect_error<ConfigError>([&] { RunFolder(config, log); }, "holds checkpoints", "resume=none");
  std::filesystem::remove_all(dir_ / "run/checkpoints");
  EXPECT_TRUE(RunFolder(config, log).checkpoints_to_try().empty());
}

}  // namespace
}  // namespace tessera
