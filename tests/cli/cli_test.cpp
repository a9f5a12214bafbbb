/// The command line inside one process: exit codes, nothing thrown, nothing left behind. Whole commands are
/// tested on the program, in tests/python.

#include "tessera/cli/cli.hpp"
#include "cli/signal_handlers.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

namespace tessera {
namespace {

struct Outcome {
  int code;
  std::string out, err;
};

Outcome call(const std::vector<std::string>& args) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int code = cli_main(args);
  return {code, ::testing::internal::GetCapturedStdout(), ::testing::internal::GetCapturedStderr()};
}

TEST(Cli, ExitCodesSayWhatKindOfFailure) {
  EXPECT_EQ(call({"--version"}).code, 0);
  EXPECT_EQ(call({"env"}).code, 0);
  EXPECT_EQ(call({}).code, 2);
  EXPECT_EQ(call({"trian", "x.yaml"}).code, 2);
  EXPECT_EQ(call({"train", "/nowhere/config.yaml"}).code, 2);
  EXPECT_EQ(call({"generate", "x", "--prompt", "y", "--top-p", "2"}).code, 2);
  EXPECT_EQ(call({"convert", "--from", "onnx", "a", "--to", "hf", "b"}).code, 2);
  EXPECT_EQ(call({"checkpoint", "inspect", "/nowhere"}).code, 4);
  EXPECT_EQ(call({"convert", "--from", "hf", "/nowhere", "--to", "tessera", "/nowhere/either"}).code, 4);
}

TEST(Cli, MessagesNameWhatIsWrong) {
  const Outcome config = call({"train", "/nowhere/config.yaml"});
  EXPECT_EQ(config.err.rfind("error: ", 0), 0u) << config.err;
  EXPECT_NE(config.err.find("/nowhere/config.yaml"), std::string::npos) << config.err;
  EXPECT_EQ(config.out, "");
  const Outcome format = call({"convert", "--from", "onnx", "a", "--to", "hf", "b"});
  EXPECT_NE(format.err.find("\"onnx\": hf, tessera, megatron, dcp, deepspeed and accelerate are known"),
            std::string::npos)
      << format.err;
}

TEST(Cli, PreprocessTakesMegatronsUnderscoresAndKeepsWhatIsThere) {
  const auto dir =
      std::filesystem::temp_directory_path() / ("tessera-cli-text-" + std::to_string(::getpid()));
  std::filesystem::create_directories(dir);
  std::ofstream(dir / "a.txt") << "{\"text\": \"a\"}\n";
  const std::vector<std::string> command = {
      "preprocess",       "--input", (dir / "a.txt").string(), "--output_prefix", (dir / "a").string(),
      "--tokenizer_type", "bytes",   "--append_eod",           "--json_keys",     "text"};
  const Outcome first = call(command);
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_NE(first.out.find("1 documents, 15 tokens"), std::string::npos) << first.out;
  EXPECT_NE(first.err.find("note: begins like JSON lines"), std::string::npos) << first.err;
  const Outcome again = call(command);
  EXPECT_EQ(again.code, 2);
  EXPECT_NE(again.err.find("--overwrite"), std::string::npos) << again.err;
  std::vector<std::string> replace = command;
  replace.push_back("--overwrite");
  EXPECT_EQ(call(replace).code, 0);
  std::filesystem::remove_all(dir);
}

TEST(Cli, SignalHandlersAreGivenBack) {
  struct sigaction before {
  }, after{};
  stack_t stack_before{}, stack_after{};
  sigaction(SIGINT, nullptr, &before);
  sigaltstack(nullptr, &stack_before);
  const auto dir = std::filesystem::temp_directory_path() / ("tessera-cli-" + std::to_string(::getpid()));
  const char* const config = "configs/quickstart.yaml";
  EXPECT_EQ(call({"train", config, "data.path=/nowhere/corpus", "logging.dir=" + dir.string(),
                  "checkpoint.dir=" + (dir / "checkpoints").string()})
                .code,
            4);
  sigaction(SIGINT, nullptr, &after);
  sigaltstack(nullptr, &stack_after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  EXPECT_EQ(stack_before.ss_sp, stack_after.ss_sp);
  EXPECT_EQ(stack_before.ss_flags, stack_after.ss_flags);
  std::filesystem::remove_all(dir);
}

TEST(Cli, ARankThatIsDoneIsNotEndedByALateSignal) {
  struct sigaction before {};
  sigaction(SIGTERM, nullptr, &before);
  {
    cli::SignalHandlers signals({{SIGTERM, [](int) {}}});
    signals.ignore_late_ones();
  }
  raise(SIGTERM);
  struct sigaction after {};
  sigaction(SIGTERM, &before, &after);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
}

}  // namespace
}  // namespace tessera
