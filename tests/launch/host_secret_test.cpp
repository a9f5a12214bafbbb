/// The secret in a file, which the processes of one machine share where nobody gave them one.

#include "launch/host_secret.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "launch_test_support.hpp"
#include "tessera/base/error.hpp"
#include "tests/support/errors.hpp"

namespace tessera::launching {
namespace {

using test::contains;

namespace fs = std::filesystem;

class HostSecretTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "tessera-host-secret-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    home_ = name;
  }
  void TearDown() override { fs::remove_all(home_); }
  static mode_t mode_of(const fs::path& path) {
    struct stat status {};
    return ::lstat(path.c_str(), &status) == 0 ? status.st_mode & 07777 : 0;
  }
  fs::path home_;
};

TEST_F(HostSecretTest, IsThereUntilItIsNotNeeded) {
  const std::string path = home_ / "own" / "job-1";
  EXPECT_EQ(read_host_secret(path), "");
  {
    HostSecret secret(path);
    EXPECT_EQ(secret.text().size(), 64u);
    EXPECT_EQ(read_host_secret(path), "");
    secret.publish();
    EXPECT_EQ(read_host_secret(path), secret.text());
    EXPECT_EQ(mode_of(path), 0600u);
    EXPECT_EQ(mode_of(home_ / "own"), 0700u);
    EXPECT_NE(HostSecret(path).text(), secret.text());
    EXPECT_EQ(read_host_secret(path), secret.text());  // that one had published nothing
  }
  EXPECT_EQ(read_host_secret(path), "");
  EXPECT_TRUE(fs::is_empty(home_));
}

TEST_F(HostSecretTest, WhatAnEarlierJobLeftIsReplaced) {
  const std::string path = home_ / "own" / "job-1";
  auto earlier = std::make_unique<HostSecret>(path);
  earlier->publish();
  HostSecret later(path);
  later.publish();
  earlier.reset();  // must not take the other's file along
  EXPECT_EQ(read_host_secret(path), later.text());
}

/// Whoever reads while it is replaced gets one or the other, whole.
TEST_F(HostSecretTest, IsNeverHalf) {
  const std::string path = home_ / "own" / "job-1";
  HostSecret first(path);
  first.publish();
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) EXPECT_EQ(read_host_secret(path).size(), 64u);
  });
  std::vector<std::unique_ptr<HostSecret>> all;
  for (int i = 0; i < 50; ++i) {
    all.push_back(std::make_unique<HostSecret>(path));
    all.back()->publish();
  }
  stop = true;
  reader.join();
}

/// Jobs that come and go share the folder, which goes when it is empty.
TEST_F(HostSecretTest, ManyJobsAtOnce) {
  std::vector<std::thread> jobs;
  for (int job = 0; job < 4; ++job) {
    jobs.emplace_back([&, job] {
      const std::string path = home_ / "own" / std::to_string(job);
      for (int i = 0; i < 50; ++i) {
        HostSecret secret(path);
        EXPECT_NO_THROW(secret.publish());
        EXPECT_EQ(read_host_secret(path), secret.text());
      }
    });
  }
  for (std::thread& job : jobs) job.join();
  EXPECT_TRUE(fs::is_empty(home_));
}

TEST_F(HostSecretTest, LinksAndOpenFilesAreNotBelieved) {
  const fs::path folder = home_ / "own", file = folder / "job-1";
  HostSecret secret(file);
  ::mkdir(folder.c_str(), 0700);
  std::ofstream(home_ / "theirs") << std::string(64, 'a');
  ::chmod((home_ / "theirs").c_str(), 0600);
  fs::create_symlink(home_ / "theirs", file);
  EXPECT_THROW(read_host_secret(file), IoError);
  secret.publish();  // replaces the link, not what it points to
  EXPECT_EQ(read_host_secret(file), secret.text());
  EXPECT_EQ(fs::file_size(home_ / "theirs"), 64u);
  EXPECT_FALSE(fs::is_symlink(file));
  ::chmod(file.c_str(), 0644);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { read_host_secret(file); }),
                       file.string() + ": is not a file that this user alone can read"));
}

TEST_F(HostSecretTest, SomebodyElsesFolderIsRefused) {
  const fs::path folder = home_ / "own", file = folder / "job-1";
  const auto both_say = [&](const std::string& part) {
    HostSecret secret(file);
    for (const std::string& message : {message_of<ConfigError>([&] { secret.publish(); }),
                                       message_of<ConfigError>([&] { read_host_secret(file); })}) {
      EXPECT_TRUE(contains(message, folder.string() + part)) << message;
      EXPECT_TRUE(contains(message, "TESSERA_JOB_SECRET")) << message;
    }
  };
  ::mkdir(folder.c_str(), 0755);
  both_say(": others can enter it, and the job's secret would lie there: chmod 700");
  fs::remove(folder);
  fs::create_directory(home_ / "theirs");
  fs::create_symlink(home_ / "theirs", folder);
  both_say(": is not this user's folder");
  fs::remove(folder);
  std::ofstream(folder) << "a file";
  both_say(": is not this user's folder");
  fs::remove(folder);
  if (::geteuid() != 0) return;  // only root can give a folder away
  ::mkdir(folder.c_str(), 0700);
  ASSERT_EQ(::chown(folder.c_str(), 12345, 12345), 0);
  both_say(": belongs to user 12345");
}

}  // namespace
}  // namespace tessera::launching
