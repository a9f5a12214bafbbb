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

TEST(Environment, ReadsWhatOurLauncherSays) {
  const Environment env = read({"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=node-0", "TESSERA_STORE=node-0:4711",
                                "TESSERA_JOB_SECRET=s3cret", "TESSERA_COMM_ADDRESS=10.0.0.2",
                                "TESSERA_CHECK_COLLECTIVES=1", "TESSERA_RESTART=3"});
  EXPECT_EQ(env.store_host, "node-0");
  EXPECT_EQ(env.store_port, 4711);
  EXPECT_EQ(env.job_secret, "s3cret");
  EXPECT_EQ(env.comm_address, "10.0.0.2");
  EXPECT_TRUE(env.check_collectives);
  EXPECT_EQ(env.restart, 3);
  EXPECT_FALSE(env.torchrun || env.job_id);
  EXPECT_TRUE(env.warnings.empty());
  EXPECT_EQ(read({"TESSERA_STORE=[fe80::1]:80"}).store_host, "fe80::1");
  for (const char* bad : {"node-0", "node-0:", ":80", "node-0:0", "node-0:65536", "node-0:8x"}) {
    EXPECT_EQ(refusal({std::string("TESSERA_STORE=") + bad}),
              std::string("environment variable TESSERA_STORE must be host:port, not '") + bad + "'");
  }
  EXPECT_NE(refusal({"TESSERA_CHECK_COLLECTIVES=yes"}), "");
  EXPECT_NE(refusal({"TESSERA_RESTART=-1"}), "");
}

struct Place {
  std::int64_t rank, size, local_rank, local_size;
  std::string master;
};

void expect_place(const Environment& env, const Place& place) {
  EXPECT_EQ(env.rank, place.rank);
  EXPECT_EQ(env.world_size, place.size);
  EXPECT_EQ(env.local_rank, place.local_rank);
  EXPECT_EQ(env.local_world_size.value_or(-1), place.local_size);
  EXPECT_EQ(env.master_addr.value_or("none"), place.master);
}

TEST(Environment, Torchrun) {
  const Environment env =
      read({"RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=a",
            "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_RESTART_COUNT=2"});
  expect_place(env, {3, 4, 1, 2, "a"});
  EXPECT_TRUE(env.torchrun);
  EXPECT_EQ(env.job_id, "none");
  EXPECT_EQ(env.restart, 2);
}

TEST(Environment, OpenMpi) {
  const std::vector<std::string> variables{"OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3",
                                           "OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_LOCAL_SIZE=3",
                                           "OMPI_MCA_ess_base_jobid=7012352"};
  const Environment env = read(variables);
  expect_place(env, {2, 3, 2, 3, "127.0.0.1"});
  EXPECT_EQ(env.job_id, "7012352");
  EXPECT_FALSE(env.torchrun);
  // Several machines, and nobody says where they meet.
  auto spread = variables;
  spread[3] = "OMPI_COMM_WORLD_LOCAL_SIZE=1";
  spread[2] = "OMPI_COMM_WORLD_LOCAL_RANK=0";
  expect_place(read(spread), {2, 3, 0, 1, "none"});
}

TEST(Environment, MpichAndIntelMpi) {
  expect_place(read({"PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2"}),
               {1, 2, 1, 2, "127.0.0.1"});
}

TEST(Environment, Slurm) {
  const std::vector<std::string> step{"SLURM_PROCID=9",   "SLURM_NTASKS=11",
                                      "SLURM_LOCALID=0",  "SLURM_STEP_TASKS_PER_NODE=4(x2),3",
                                      "SLURM_NODEID=2",   "SLURM_STEP_NODELIST=gpu[007-008,12],login",
                                      "SLURM_JOB_ID=4242"};
  expect_place(read(step), {9, 11, 0, 3, "gpu007"});
  EXPECT_EQ(read(step).job_id, "4242");
  auto other = step;
  other[4] = "SLURM_NODEID=1";
  EXPECT_EQ(read(other).local_world_size, 4);
  for (const auto& [list, host] :
       {std::pair{"n1", "n1"}, {"n1,n2", "n1"}, {"r[2-3]n[4,6]x,z", "r2n4x"}, {"n[1-2", "none"}}) {
    other[5] = std::string("SLURM_STEP_NODELIST=") + list;
    EXPECT_EQ(read(other).master_addr.value_or("none"), host);
  }
  expect_place(read({"SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=2",
                     "SLURM_STEP_NODELIST=n1"}),
               {1, 2, 1, 2, "127.0.0.1"});
}

/// The script of a batch job sees the job's numbers, but is no task of it.
TEST(Environment, ABatchScriptIsOneProcess) {
  EXPECT_FALSE(read({"SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0", "SLURM_JOB_ID=1"}).launched());
  // Neither is a shell that srun opened.
  EXPECT_FALSE(read({"SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_STEP_NODELIST=n1"}).launched());
  EXPECT_TRUE(read({"RANK=0", "WORLD_SIZE=1"}).launched());
}

TEST(Environment, TheNearestLauncherWins) {
  std::vector<std::string> all{
      "SLURM_PROCID=0", "SLURM_NTASKS=2",         "SLURM_STEP_NODELIST=n1,n2", "PMI_RANK=1",
      "PMI_SIZE=3",     "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4",    "RANK=3",
      "WORLD_SIZE=5"};
  for (const auto& [rank, size] : {std::pair{3, 5}, {2, 4}, {1, 3}, {0, 2}}) {
    EXPECT_EQ(read(all).rank, rank);
    EXPECT_EQ(read(all).world_size, size);
    all.resize(all.size() - (all.size() > 3 ? 2 : 0));
  }
  EXPECT_EQ(refusal({"PMI_RANK=2", "PMI_SIZE=2"}),
            "environment variable PMI_RANK = 2 does not fit PMI_SIZE = 2");
  EXPECT_EQ(refusal({"OMPI_COMM_WORLD_RANK=x", "OMPI_COMM_WORLD_SIZE=2"}),
            "environment variable OMPI_COMM_WORLD_RANK must be an integer from 0 to 16777215, not 'x'");
}

TEST(Environment, ReadsTheProcess) {
  ::setenv("TESSERA_THREADS", "7", 1);
  EXPECT_EQ(read_environment().threads, 7);
  ::unsetenv("TESSERA_THREADS");
  EXPECT_FALSE(read_environment().threads);
}

}  // namespace
}  // namespace tessera
