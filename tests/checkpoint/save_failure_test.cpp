// Saves that are killed or refused by the system: what was saved before is always still there.

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <set>

#include "sample_run.hpp"

namespace tessera::test {
namespace {

using SaveFailure = ScratchTest;

constexpr SavePhase kPhases[] = {
    SavePhase::started,   SavePhase::tensor_written,  SavePhase::shard_written, SavePhase::manifest_written,
    SavePhase::published, SavePhase::pointer_written, SavePhase::pruned};

std::set<std::string> names_in(const fs::path& dir) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.insert(entry.path().filename().string());
  return names;
}

SaveOptions keeping(int count) {
  SaveOptions options;
  options.keep = count;
  return options;
}

/// Runs `work` in a child process; returns its wait status.
template <typename Work>
int in_child(Work&& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST_F(SaveFailure, KilledAtEveryPhaseTheFolderHoldsAWholeCheckpoint) {
  for (const SavePhase phase : kPhases) {
    for (const bool same_step : {false, true}) {
      const fs::path root = dir_ / std::to_string(static_cast<int>(phase) * 2 + same_step);
      SampleRun(100).save(root);
      SampleRun(200).save(root);
      const std::int64_t step = same_step ? 200 : 300;
      const int status = in_child([&] {
        SaveOptions options = keeping(2);
        options.on_phase = [&](SavePhase now) {
          if (now == phase) ::kill(::getpid(), SIGKILL);
        };
        SampleRun(step).save(root, options);
      });
      ASSERT_TRUE(WIFSIGNALED(status));
      const bool published = phase >= SavePhase::published;
      const FoundCheckpoint found = find_latest(root, {.check_contents = true});
      ASSERT_TRUE(found.dir);
      EXPECT_EQ(found.step, published ? step : 200);
      EXPECT_TRUE(found.problems.empty());
      SampleRun(found.step).expect_equal(*found.dir);

      // The next save goes through and clears what the crash left.
      SampleRun(400).save(root, keeping(2));
      EXPECT_EQ(names_in(root),
                (std::set<std::string>{"latest", checkpoint_name(found.step), "step-00000400"}));
    }
  }
}

TEST_F(SaveFailure, AnErrorAtEveryPhaseLosesNothingAndLeavesNothing) {
  for (const SavePhase phase : kPhases) {
    const fs::path root = dir_ / std::to_string(static_cast<int>(phase));
    SampleRun(100).save(root);
    SaveOptions options;
    options.on_phase = [&](SavePhase now) {
      if (now == phase) throw IoError("injected");
    };
    EXPECT_THROW(SampleRun(200).save(root, options), IoError);
    const FoundCheckpoint found = find_latest(root, {.check_contents = true});
    EXPECT_EQ(found.step, phase >= SavePhase::published ? 200 : 100);
    SampleRun(found.step).expect_equal(*found.dir);
    for (const auto& name : names_in(root)) EXPECT_FALSE(name.starts_with(".")) << name;
  }
}

TEST_F(SaveFailure, SavingAStepAgainReplacesItWhole) {
  const fs::path dir = SampleRun(100).save(dir_);
  spill(dir / "extra", "x");
  std::string text = slurp(dir / "model_tp_0_pp_0.safetensors");
  spill(dir / "model_tp_0_pp_0.safetensors", text.substr(1));
  SampleRun(100).save(dir_);
  SampleRun(100).expect_equal(dir);
  EXPECT_FALSE(fs::exists(dir / "extra"));
  EXPECT_EQ(names_in(dir_), (std::set<std::string>{"latest", "step-00000100"}));
}

TEST_F(SaveFailure, FileTooLargeForTheSystemIsAnIoErrorWithBytes) {
  SampleRun(100).save(dir_);
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{600, 600};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      SampleRun(200).save(dir_);
    } catch (const IoError& error) {
      const std::string text = error.what();
      const bool clear =
          text.find("step-00000200") != std::string::npos && text.find("bytes needed") != std::string::npos;
      ::_exit(clear ? 42 : 43);
    }
    ::_exit(44);
  });
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_EQ(names_in(dir_), (std::set<std::string>{"latest", "step-00000100"}));
  SampleRun(100).expect_equal(dir_ / "step-00000100");
}

TEST_F(SaveFailure, DiskTooSmallIsSaidBeforeAnythingIsWritten) {
  SampleRun(100).save(dir_);
  expect_error<IoError>([&] { CheckpointSave save(dir_, 200, std::uint64_t{1} << 62); }, "not enough space",
                        "4611686018427387904 bytes needed", "free");
  EXPECT_EQ(names_in(dir_), (std::set<std::string>{"latest", "step-00000100"}));
}

TEST_F(SaveFailure, UnwritableOrImpossibleFoldersAreIoErrors) {
  spill(dir_ / "file", "");
  EXPECT_THROW(SampleRun(1).save(dir_ / "file" / "below"), IoError);
  if (::geteuid() != 0) {
    fs::create_directory(dir_ / "closed");
    fs::permissions(dir_ / "closed", fs::perms::owner_read | fs::perms::owner_exec);
    expect_error<IoError>([&] { SampleRun(1).save(dir_ / "closed"); }, "may write");
  }
  EXPECT_THROW(SampleRun(1).save("/proc/tessera-test"), IoError);
}

TEST_F(SaveFailure, KeepsTheNewestAndOnlyDeletesItsOwn) {
  for (const std::int64_t step : {10, 20, 30}) SampleRun(step).save(dir_);
  fs::create_directories(dir_ / "step-00000001");  // ours by name, but without our manifest
  spill(dir_ / "step-00000001" / "keep.txt", "mine");
  fs::create_directories(dir_ / "step-5");  // not our naming
  fs::create_directories(dir_ / ".incomplete-step-00000015");
  fs::create_directories(dir_ / ".incomplete-notes");
  spill(dir_ / ".incomplete-latest", "torn");
  fs::create_directories(dir_ / "elsewhere");
  SampleRun(2).save(dir_ / "elsewhere");
  fs::create_directory_symlink("elsewhere/step-00000002", dir_ / "step-00000002");
  SampleRun(40).save(dir_, keeping(2));
  EXPECT_EQ(names_in(dir_),
            (std::set<std::string>{"latest", "step-00000040", "step-00000030", "step-00000001", "step-5",
                                   ".incomplete-notes", "elsewhere", "step-00000002"}));
  SampleRun(2).expect_equal(dir_ / "elsewhere" / "step-00000002");
  EXPECT_THROW(prune_checkpoints(dir_, 0), InvalidArgument);
}

TEST_F(SaveFailure, PruningNeverCountsADamagedCheckpointNorTakesTheOneJustSaved) {
  for (const std::int64_t step : {10, 20, 30}) SampleRun(step).save(dir_);
  for (const std::int64_t step : {20, 30})
    fs::resize_file(dir_ / checkpoint_name(step) / "model_tp_0_pp_0.safetensors", 5);
  EXPECT_TRUE(prune_checkpoints(dir_, 1).empty());
  SampleRun(10).expect_equal(*find_latest(dir_).dir);
  // The run went back to step 10: what it saves now stays, although 30 is "newer".
  SampleRun(30).save(dir_);
  SampleRun(15).save(dir_, keeping(1));
  EXPECT_TRUE(fs::exists(dir_ / "step-00000015"));
}

TEST_F(SaveFailure, ACheckpointCaughtBetweenTwoRenamesComesBack) {
  SampleRun(10).save(dir_);
  fs::rename(dir_ / "step-00000010", dir_ / ".incomplete-step-00000010-replaced");
  SampleRun(20).save(dir_);
  SampleRun(10).expect_equal(dir_ / "step-00000010");
}

}  // namespace
}  // namespace tessera::test
