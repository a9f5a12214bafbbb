#include "tessera/base/env.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tessera {
namespace {

Environment read(std::vector<std::string> variables) { return read_environment(variables); }

std::string refusal(std::vector<std::string> variables) {
  try {
    read_environment(variables);
    return {};
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Environment, EmptyMeansOneProcess) {
  const Environment env = read({});
  EXPECT_FALSE(env.launched());
  EXPECT_FALSE(env.rank || env.world_size || env.local_rank || env.local_world_size);
  EXPECT_FALSE(env.master_addr || env.master_port || env.log_level || env.threads || env.python);
  EXPECT_FALSE(env.no_color);
  EXPECT_TRUE(env.warnings.empty());
}

TEST(Environment, ReadsAllVariables) {
  const Environment env =
      read({"PATH=/bin", "RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4", "MASTER_ADDR=node-0",
            "MASTER_PORT=29500", "NO_COLOR=1", "TESSERA_LOG_LEVEL=debug", "TESSERA_THREADS=3",
            "TESSERA_PYTHON=/usr/bin/python3", "ODD", "EMPTY=", "A=b=c"});
  EXPECT_TRUE(env.launched());
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.master_addr, "node-0");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_TRUE(env.no_color);
  EXPECT_EQ(env.log_level, LogLevel::debug);
  EXPECT_EQ(env.threads, 3);
  EXPECT_EQ(env.python, "/usr/bin/python3");
  EXPECT_TRUE(env.warnings.empty());
}

TEST(Environment, EmptyValuesCountAsAbsent) {
  const Environment env =
      read({"NO_COLOR=", "RANK=", "WORLD_SIZE=", "TESSERA_THREADS=", "TESSERA_LOG_LEVEL="});
  EXPECT_FALSE(env.no_color);
  EXPECT_FALSE(env.launched());
}

TEST(Environment, MalformedNumbersNameTheVariable) {
  const char* bad[] = {"x", "1.5", "-1", " 1", "1 ", "0x1", "+1", "99999999999999999999", "1e3"};
  for (const char* value : bad) {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TESSERA_THREADS"}) {
      const std::string message = refusal({std::string(name) + "=" + value});
      EXPECT_EQ(message.find(std::string("environment variable ") + name + " must be an integer from "), 0u)
          << message;
      EXPECT_NE(message.find(std::string("not '") + value + "'"), std::string::npos) << message;
    }
  }
  EXPECT_NE(refusal({"MASTER_PORT=65536"}), "");
  EXPECT_NE(refusal({"TESSERA_THREADS=0"}), "");
  EXPECT_NE(refusal({"WORLD_SIZE=0", "RANK=0"}), "");
}

TEST(Environment, ContradictionsAreRefused) {
  EXPECT_EQ(refusal({"RANK=0"}), "environment variable RANK is set but WORLD_SIZE is not");
  EXPECT_EQ(refusal({"WORLD_SIZE=2"}), "environment variable WORLD_SIZE is set but RANK is not");
  EXPECT_EQ(refusal({"RANK=2", "WORLD_SIZE=2"}), "environment variable RANK = 2 does not fit WORLD_SIZE = 2");
  EXPECT_EQ(refusal({"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"}),
            "environment variable LOCAL_RANK = 1 does not fit LOCAL_WORLD_SIZE = 1");
  EXPECT_EQ(refusal({"TESSERA_LOG_LEVEL=loud"}),
            "environment variable TESSERA_LOG_LEVEL must be debug, info, warning or error, not 'loud'");
}

TEST(Environment, AllFaultsAtOnce) {
  const std::string message = refusal({"RANK=a", "WORLD_SIZE=2", "MASTER_PORT=b", "TESSERA_LOG_LEVEL=c"});
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 2) << message;
}

TEST(Environment, UnknownVariablesOfOursAreReported) {
  const Environment env =
      read({"TESSERA_LOGLEVEL=debug", "TESSERA_THREAD=2", "TESSERA_ZZZZZZZZZ=1", "OTHER_THING=1"});
  ASSERT_EQ(env.warnings.size(), 3u);
  EXPECT_EQ(
      env.warnings[0],
      "environment variable TESSERA_LOGLEVEL means nothing to Tessera; did you mean 'TESSERA_LOG_LEVEL'?");
  EXPECT_NE(env.warnings[1].find("did you mean 'TESSERA_THREADS'?"), std::string::npos) << env.warnings[1];
  EXPECT_NE(env.warnings[2].find("TESSERA_ZZZZZZZZZ means nothing"), std::string::npos) << env.warnings[2];
}

TEST(Environment, ReadsTheProcess) {
  ::setenv("TESSERA_THREADS", "7", 1);
  EXPECT_EQ(read_environment().threads, 7);
  ::unsetenv("TESSERA_THREADS");
  EXPECT_FALSE(read_environment().threads);
}

}  // namespace
}  // namespace tessera
