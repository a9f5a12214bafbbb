/// How much memory a process may have: the machine's, or the limit of a control group.

#include "device/host_memory.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "tessera/device/exec_ctx.hpp"

namespace tessera {
namespace {

/// A folder that stands for the file system's root.
class HostMemory : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  const std::filesystem::path root_ =
      std::filesystem::temp_directory_path() / ("tessera-memory-" + std::to_string(::getpid()));
  const std::int64_t machine_ = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
};

TEST_F(HostMemory, IsTheMachinesWithoutGroups) {
  EXPECT_EQ(host_memory_bytes(root_), machine_);
  EXPECT_GT(memory_bytes_of({}), 0);
  EXPECT_LE(memory_bytes_of({}), machine_);
}

TEST_F(HostMemory, IsTheSmallestLimitOnTheWayUp) {
  write("proc/self/cgroup", "0::/service/job\n");
  write("sys/fs/cgroup/service/job/memory.max", "max\n");
  EXPECT_EQ(host_memory_bytes(root_), machine_);
  write("sys/fs/cgroup/service/memory.max", "300000000\n");
  EXPECT_EQ(host_memory_bytes(root_), 300'000'000);
  write("sys/fs/cgroup/service/job/memory.max", "200000000\n");
  EXPECT_EQ(host_memory_bytes(root_), 200'000'000);
  write("sys/fs/cgroup/service/other/memory.max", "1\n");
  EXPECT_EQ(host_memory_bytes(root_), 200'000'000);
}

TEST_F(HostMemory, KnowsTheFirstVersionOfGroups) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/a:b\n4:memory:/a:b\nnonsense\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(host_memory_bytes(root_), machine_);
  write("sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "100000000\n");
  EXPECT_EQ(host_memory_bytes(root_), 100'000'000);
}

TEST_F(HostMemory, InAContainerTheGroupIsTheTop) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "123456789\n");
  EXPECT_EQ(host_memory_bytes(root_), 123'456'789);
}

TEST_F(HostMemory, WhatIsFreeIsTheMachinesOrWhatIsLeftOfALimit) {
  write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n");
  EXPECT_EQ(free_host_memory_bytes(root_), 5000 * 1024);
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "4000000\n");
  write("sys/fs/cgroup/job/memory.stat", "anon_thp 5\nanon 1000000\nfile 2000000\n");  // a cache gives way
  EXPECT_EQ(free_host_memory_bytes(root_), 3'000'000);
  write("sys/fs/cgroup/job/memory.stat", "anon 4100000\n");
  EXPECT_EQ(free_host_memory_bytes(root_), 0);
  EXPECT_GT(free_host_memory_bytes(), 0);
}

}  // namespace
}  // namespace tessera
