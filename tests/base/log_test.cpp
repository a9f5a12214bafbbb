#include "tessera/base/log.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

namespace tessera {
namespace {

struct Lines {
  std::vector<std::pair<LogLevel, std::string>> list;

  LogOptions options(LogLevel level = LogLevel::info) {
    return {.level = level, .console = false, .callback = [this](LogLevel line_level, std::string_view text) {
              list.emplace_back(line_level, text);
            }};
  }
};

TEST(Logger, JoinsPartsAndKeepsLevels) {
  Lines lines;
  const Logger log(lines.options());
  log.debug("no");
  log.info("step ", 3, " of ", 0.5);
  log.warning("{} %s", '!');
  log.error("e");
  const std::vector<std::pair<LogLevel, std::string>> expected = {
      {LogLevel::info, "step 3 of 0.5"}, {LogLevel::warning, "{} %s!"}, {LogLevel::error, "e"}};
  EXPECT_EQ(lines.list, expected);
}

TEST(Logger, LevelsFilter) {
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error}) {
    Lines lines;
    const Logger log(lines.options(level));
    EXPECT_EQ(log.level(), level);
    log.debug("a");
    log.info("b");
    log.warning("c");
    log.error("d");
    EXPECT_EQ(lines.list.size(), 4u - static_cast<std::size_t>(level));
    EXPECT_EQ(log_level(name_of(level)), level);
  }
  EXPECT_EQ(log_level("Info"), std::nullopt);
}

TEST(Logger, WarnsOncePerKeyAndLog) {
  Lines lines;
  const Logger log(lines.options());
  const Logger copy = log;
  EXPECT_TRUE(log.warn_once("a", "first"));
  EXPECT_FALSE(log.warn_once("a", "second"));
  EXPECT_FALSE(copy.warn_once("a", "third"));
  EXPECT_TRUE(copy.warn_once("b", "fourth"));
  EXPECT_EQ(lines.list.size(), 2u);
  Lines other_lines;
  EXPECT_TRUE(Logger(other_lines.options()).warn_once("a", "another log"));
}

TEST(Logger, ConsoleIsStderrWithoutColoursOffATerminal) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  {
    const Logger alone{LogOptions{}};
    alone.info("hello");
    const Logger ranked(LogOptions{.rank = 3, .world_size = 8, .no_color = true});
    ranked.warning("careful");
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_TRUE(std::regex_match(
      text, std::regex(R"(\d\d:\d\d:\d\d info hello\n\d\d:\d\d:\d\d warning \[rank 3\] careful\n)")))
      << text;
}

TEST(Logger, SilentWritesNowhere) {
  ::testing::internal::CaptureStderr();
  Logger::silent().error("nobody hears");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Logger, FileIsAppendedTo) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "tessera_log_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "run.log").string();
  for (const char* word : {"one", "two"}) Logger(LogOptions{.console = false, .file = path}).info(word);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_TRUE(std::regex_match(text.str(), std::regex(R"(\S+ info one\n\S+ info two\n)"))) << text.str();
  EXPECT_THROW(Logger(LogOptions{.console = false, .file = folder.string()}), IoError);
  std::filesystem::remove_all(folder);
}

TEST(Logger, ManyThreadsShareOne) {
  Lines lines;
  const Logger log(lines.options());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&log] {
      for (int i = 0; i < 100; ++i) {
        log.info("line ", i);
        log.warn_once("shared", "once");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines.list.size(), 401u);
}

}  // namespace
}  // namespace tessera
