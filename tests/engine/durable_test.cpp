/// What a resume needs is on the disk before it is relied on: written under another name, synced, renamed,
/// and the folder synced.

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

/// Every sync, rename and link of this program, in order: "sync PATH", "name FROM TO".
struct Calls {
  std::atomic<bool> on = false;
  std::mutex mutex;
  std::vector<std::string> list;
  void add(const std::string& call) {
    const std::lock_guard lock(mutex);
    list.push_back(call);
  }
};
Calls calls;

int record_sync(int fd, long number) {
  if (calls.on) {
    std::error_code error;
    const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error);
    calls.add("sync " + path.string());
  }
  return static_cast<int>(syscall(number, fd));
}

}  // namespace
}  // namespace tessera

/// These take the place of libc's for everything in this program.
extern "C" int fsync(int fd) { return tessera::record_sync(fd, SYS_fsync); }
extern "C" int fdatasync(int fd) { return tessera::record_sync(fd, SYS_fdatasync); }
extern "C" int rename(const char* from, const char* to) noexcept {
  if (tessera::calls.on) tessera::calls.add(std::string("name ") + from + " " + to);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int link(const char* from, const char* to) noexcept {
  if (tessera::calls.on) tessera::calls.add(std::string("name ") + from + " " + to);
  return static_cast<int>(syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace tessera {
namespace {

struct Durable : test::FolderTest {
  void TearDown() override {
    calls.on = false;
    FolderTest::TearDown();
  }
  static std::size_t find(const std::string& call, std::size_t from = 0) {
    for (std::size_t i = from; i < calls.list.size(); ++i) {
      if (calls.list[i] == call) return i;
    }
    return calls.list.size();
  }
  /// Before anything has the name `path` it is synced, and its folder after.
  static void expect_durable(const std::filesystem::path& path) {
    bool named = false;
    for (std::size_t i = 0; i < calls.list.size(); ++i) {
      const std::string end = " " + path.string();
      if (!calls.list[i].starts_with("name ") || !calls.list[i].ends_with(end)) continue;
      named = true;
      const std::string from = calls.list[i].substr(5, calls.list[i].size() - 5 - end.size());
      EXPECT_LT(find("sync " + from), i) << path << " was not synced before it got its name";
      EXPECT_LT(find("sync " + path.parent_path().string(), i), calls.list.size())
          << "the folder of " << path << " was not synced after it";
    }
    EXPECT_TRUE(named) << path << " was not written under another name first";
  }
};

TEST_F(Durable, WhatAResumeNeeds) {
  Config config = run_config("deep/run");
  config.training.steps = 2;
  config.checkpoint.every = 1;
  std::size_t first_step = 0;
  TrainHooks hooks;
  hooks.on_step = [&](const StepRecord&) {
    if (first_step == 0) first_step = calls.list.size();
  };
  calls.list.clear();
  calls.on = true;
  train(config, hooks, Logger::silent());
  config.training.steps = 3;
  train(config, {}, Logger::silent());
  calls.on = false;
  const auto folder = dir_ / "deep/run";
  for (const char* name : {"run.lock", "run.json", "config.yaml", "metrics.jsonl"})
    expect_durable(folder / name);
  for (const char* name : {"run.lock", "run.json"}) expect_durable(folder / "checkpoints" / name);
  // New folders are entries of synced ones, all before the first step.
  for (const auto& parent : {dir_, dir_ / "deep", folder})
    EXPECT_LT(find("sync " + parent.string()), first_step) << parent;
  // A checkpoint's lines of metrics.jsonl are on the disk before it.
  const auto lines = find("sync " + (folder / "metrics.jsonl").string());
  const std::string staged = "name " + (folder / "checkpoints/.incomplete-step-00000001").string();
  const auto is_published = [&](const std::string& call) { return call.starts_with(staged); };
  const auto checkpoint = static_cast<std::size_t>(
      std::find_if(calls.list.begin(), calls.list.end(), is_published) - calls.list.begin());
  EXPECT_LT(lines, checkpoint);
  EXPECT_LT(checkpoint, calls.list.size());
}

}  // namespace
}  // namespace tessera
