/// Resuming from a disk that is slower than any deadline, and from one that does not answer.

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "engine/resume.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

/// What the disk does with each read of a checkpoint's bytes.
struct SlowDisk {
  std::atomic<bool> on = false;
  std::atomic<int> delay_ms = 0, reads = 0;
  std::atomic<std::int64_t> bytes = 0;
  std::atomic<int> hang_at = -1, hang_ms = 0;  ///< the read with this number takes so long
};
SlowDisk disk;
/// Whether it is this rank's disk: the others' are fast, so that they wait for it.
thread_local bool slow_here = false;

}  // namespace
}  // namespace tessera

/// Takes the place of libc's for everything in this program.
extern "C" ssize_t pread(int fd, void* out, std::size_t count, off_t offset) {
  using tessera::disk;
  if (disk.on) {
    const int number = tessera::slow_here ? disk.reads++ : -1;
    disk.bytes += static_cast<std::int64_t>(count);
    const int delay =
        !tessera::slow_here ? 0 : (number == disk.hang_at ? disk.hang_ms : disk.delay_ms).load();
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  }
  return syscall(SYS_pread64, fd, out, count, offset);
}

namespace tessera {
namespace {

using test::expect_error;
using test::run_local;
using test::slurp;
using test::spill;

struct SlowDisks : test::FolderTest {
  void TearDown() override {
    disk.on = false;
    FolderTest::TearDown();
  }
  void be_slow(int delay_ms, int hang_at = -1, int hang_ms = 0) {
    disk.reads = 0;
    disk.bytes = 0;
    disk.delay_ms = delay_ms;
    disk.hang_at = hang_at;
    disk.hang_ms = hang_ms;
    disk.on = true;
  }
  Config config() {
    Config c = run_config("run");
    c.training.steps = 4;
    c.checkpoint.every = 2;
    c.parallel.data = 2;
    return c;
  }
  /// As `tessera train` runs it on two ranks, of which the second has the slow disk; returns what rank 0 was
  /// told.
  std::string train_on_two(const Config& config, double timeout_s) {
    std::string told;
    LogOptions options;
    options.console = false;
    options.callback = [&](LogLevel, std::string_view line) { told += std::string(line) + "\n"; };
    const Logger log(options);
    run_local(2, {.timeout_s = timeout_s}, [&](const auto& world) {
      slow_here = world->rank() == 1;
      train(config, {}, world->rank() == 0 ? log : Logger::silent(), world);
    });
    return told;
  }
};

/// Every read of one rank takes 50 ms, and what it has to read several deadlines of the other.
TEST_F(SlowDisks, ResumingTakesLongerThanTheDeadlineAndSucceeds) {
  Config c = config();
  train_on_two(c, 60);
  c.training.steps = 6;
  be_slow(50);
  const auto begin = std::chrono::steady_clock::now();
  const std::string told = train_on_two(c, 1.5);
  const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_NE(told.find("resuming from"), std::string::npos) << told;
  EXPECT_GT(took_s, 3.0) << "the disk is not slow enough for this test";
}

/// A read that hangs renews nothing, although the same rank was at work before.
TEST_F(SlowDisks, AReadThatHangsEndsTheRun) {
  Config c = config();
  train_on_two(c, 60);
  c.training.steps = 6;
  be_slow(0, /*hang_at=*/30, /*hang_ms=*/2500);
  expect_error<CommunicationError>([&] { train_on_two(c, 1); }, "did not come within 1 s");
}

/// Every byte is read once to be verified, by one rank or another, and a damaged one is found wherever it
/// lies.
TEST_F(SlowDisks, RanksShareTheVerificationAndAgree) {
  const Config c = config();
  train_on_two(c, 60);
  const auto root = dir_ / "run/checkpoints";
  const auto newest = root / "step-00000004", older = root / "step-00000002";
  std::uint64_t bytes = 0;
  const CheckpointReader reader(newest);
  for (const auto& file : reader.manifest().files) bytes += file.bytes;
  for (const int ranks : {1, 2, 4}) {
    be_slow(0);
    run_local(ranks, [&](const auto& world) { EXPECT_EQ(first_whole({newest, older}, *world).dir, newest); });
    disk.on = false;
    EXPECT_GE(disk.bytes, static_cast<std::int64_t>(bytes));
    // Headers and the manifest come on top, for each rank.
    EXPECT_LE(disk.bytes, static_cast<std::int64_t>(bytes) + ranks * 150'000) << ranks << " ranks";
  }
  for (const auto& entry : std::filesystem::directory_iterator(newest)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string good = slurp(entry.path());
    std::string bad = good;
    bad.back() = static_cast<char>(bad.back() ^ 1);
    spill(entry.path(), bad);
    run_local(3, [&](const auto& world) {
      const WholeCheckpoint found = first_whole({newest, older}, *world);
      EXPECT_EQ(found.dir, older);
      ASSERT_EQ(found.problems.size(), 1u);
      EXPECT_NE(found.problems[0].find(entry.path().string()), std::string::npos) << found.problems[0];
    });
    spill(entry.path(), good);
  }
  std::filesystem::remove(newest / "manifest.json");
  run_local(2, [&](const auto& world) {
    const WholeCheckpoint found = first_whole({newest, older}, *world);
    EXPECT_EQ(found.dir, older);
    EXPECT_EQ(found.problems.size(), 1u);  // both ranks saw the same
  });
}

TEST_F(SlowDisks, ADamagedCheckpointThatWasAskedForIsAnErrorOnEveryRank) {
  Config c = config();
  train_on_two(c, 60);
  const auto file = dir_ / "run/checkpoints/step-00000004/optimizer_tp_0_pp_0_dp_1.safetensors";
  std::string bad = slurp(file);
  ASSERT_FALSE(bad.empty());
  bad.back() = static_cast<char>(bad.back() ^ 1);
  spill(file, bad);
  c.checkpoint.resume = (dir_ / "run/checkpoints/step-00000004").string();
  c.logging.dir = (dir_ / "branch").string();
  std::atomic<int> errors = 0;
  run_local(2, [&](const auto& world) {
    expect_error<CheckpointError>([&] { train(c, {}, Logger::silent(), world); },
                                  "which checkpoint.resume names, is damaged", file.string());
    ++errors;
  });
  EXPECT_EQ(errors, 2);
}

}  // namespace
}  // namespace tessera
