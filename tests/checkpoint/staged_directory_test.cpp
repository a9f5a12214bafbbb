/// Folders that appear whole: what replaces what, what is kept, what the next process makes of each state in
/// which a killed one can have left things, and links out of a folder.

#include "tessera/checkpoint/staged_directory.hpp"

#include <barrier>
#include <thread>

#include "checkpoint/file_io.hpp"
#include "hf_folder.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::test {
namespace {

using StagedDirectoryTest = ScratchTest;

std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}
using Names = std::vector<std::string>;

void publish(const fs::path& target, Existing existing, const std::map<std::string, std::string>& files) {
  StagedDirectory staged(target, existing);
  for (const auto& [name, text] : files) spill(staged.path() / name, text);
  staged.sync();
  staged.publish();
}

TEST_F(StagedDirectoryTest, ReplacesTheWholeFolder) {
  const fs::path target = dir_ / "state";
  publish(target, Existing::replace, {{"a", "1"}, {"b", "1"}});
  {
    const StagedDirectory given_up(target);
    spill(given_up.path() / "a", "half");
  }
  EXPECT_EQ(slurp(target / "a"), "1");
  publish(target, Existing::replace, {{"a", "2"}});
  EXPECT_EQ(names_in(target), Names{"a"});
  EXPECT_EQ(slurp(target / "a"), "2");
  EXPECT_EQ(names_in(dir_), Names{"state"});
}

/// Neither writes into the other's, nor takes it for what a killed process has left.
TEST_F(StagedDirectoryTest, OfTwoWritersBothPublishTheirOwn) {
  for (const Existing existing : {Existing::replace, Existing::update}) {
    const fs::path target = dir_ / "state";
    publish(target, existing, {{"a", "0"}, {"b", "0"}});
    if (existing == Existing::update)
      fs::create_directory(target / "logs");  // so the new files come from inside
    StagedDirectory one(target, existing);
    spill(one.path() / "a", "1");
    StagedDirectory two(target, existing);
    spill(two.path() / "a", "2");
    EXPECT_NE(one.path(), two.path());
    recover_directory(target);
    spill(two.path() / "b", "2");
    spill(one.path() / "b", "1");
    two.publish();
    EXPECT_EQ(slurp(target / "a") + slurp(target / "b"), "22");
    one.publish();
    EXPECT_EQ(slurp(target / "a") + slurp(target / "b"), "11");
  }
}

/// A process that was killed holds nothing, whatever the name it wrote under.
TEST_F(StagedDirectoryTest, WhatNobodyWritesIsRemoved) {
  fs::create_directories(dir_ / ".incomplete-state~0123abcd/deep");
  fs::create_directories(dir_ / ".incomplete-state");
  fs::create_directories(dir_ / ".incomplete-state~notamark");
  fs::create_directories(dir_ / ".incomplete-state2~0123abcd");
  publish(dir_ / "state", Existing::replace, {{"a", "1"}});
  EXPECT_EQ(names_in(dir_), (Names{".incomplete-state2~0123abcd", ".incomplete-state~notamark", "state"}));
}

TEST_F(StagedDirectoryTest, RefusesWhatIsThere) {
  fs::create_directory(dir_ / "empty");
  publish(dir_ / "empty", Existing::refuse, {{"a", "1"}});
  expect_error<IoError>([&] { publish(dir_ / "empty", Existing::refuse, {{"a", "2"}}); }, "empty", "exists");
  EXPECT_EQ(slurp(dir_ / "empty/a"), "1");
}

/// All that two processes killed one after the other can leave beside a folder.
TEST_F(StagedDirectoryTest, RecoversTheOldOrTheNew) {
  for (const bool old_stepped_aside : {false, true}) {
    for (const bool staged : {false, true}) {
      for (const std::string aside : {".incomplete-tessera_state-replaced", ".tessera_state.old"}) {
        const fs::path target = dir_ / "tessera_state";
        fs::create_directory(old_stepped_aside ? dir_ / aside : target);
        spill((old_stepped_aside ? dir_ / aside : target) / "a", "old");
        if (staged) fs::create_directory(dir_ / ".incomplete-tessera_state");
        fs::create_directory(dir_ / ".tessera_state.incomplete");
        settle_directory(target);
        EXPECT_EQ(slurp(target / "a"), "old");
        recover_directory(target);
        EXPECT_EQ(names_in(dir_), Names{"tessera_state"});
        publish(target, Existing::replace, {{"a", "new"}});
        EXPECT_EQ(slurp(target / "a"), "new");
        fs::remove_all(target);
      }
    }
  }
  // Nobody else's names.
  fs::create_directory(dir_ / ".mine.old");
  recover_directory(dir_ / "mine");
  EXPECT_EQ(names_in(dir_), Names{".mine.old"});
}

TEST_F(StagedDirectoryTest, UpdateKeepsWhatIsNoModels) {
  for (const bool subfolder : {false, true}) {
    const fs::path target = dir_ / "model";
    publish(target, Existing::update, {{"config.json", "1"}, {"tessera.json", "1"}, {"hf_config.json", "1"}});
    spill(target / "model-00001-of-00002.safetensors", "old");
    spill(target / "README.md", "mine");
    fs::create_symlink("README.md", target / "link");
    if (subfolder) fs::create_directories(target / "logs/more");
    fs::permissions(target, fs::perms::owner_all);
    publish(target, Existing::update, {{"config.json", "2"}});
    Names expected = {"README.md", "config.json", "link"};
    if (subfolder) expected.insert(expected.end(), "logs");
    EXPECT_EQ(names_in(target), expected);
    EXPECT_EQ(slurp(target / "config.json") + slurp(target / "link"), "2mine");
    EXPECT_EQ(fs::status(target).permissions(), fs::perms::owner_all);
    EXPECT_EQ(names_in(dir_), Names{"model"});
    expect_error<CheckpointError>(
        [&] {
          publish(target, Existing::update, {{"model.safetensors", "x"}});
        },
        "model.safetensors", "header");
    EXPECT_EQ(names_in(target), expected);
    fs::remove_all(target);
  }
}

TEST_F(StagedDirectoryTest, ADecidedUpdateIsFinishedByAnybody) {
  const Names files = {"config.json", "model.safetensors"};
  for (int moved = 0; moved <= 3; ++moved) {  // of: the weights, the description, the list
    const fs::path target = dir_ / "model", ready = target / ".ready-model";
    fs::create_directories(ready);
    spill(target / "model-00001-of-00002.safetensors", "old");
    spill(target / "README.md", "mine");
    if (moved < 2) spill(target / "config.json", "old");
    spill((moved < 1 ? ready : target) / "model.safetensors", "new");
    spill((moved < 2 ? ready : target) / "config.json", "new");
    if (moved < 3) spill(ready / "files.json", R"(["config.json", "model.safetensors"])");
    settle_directory(target);
    settle_directory(target);
    EXPECT_EQ(slurp(target / "config.json") + slurp(target / "model.safetensors"), "newnew") << moved;
    EXPECT_FALSE(fs::exists(ready));
    if (moved < 3) {
      EXPECT_EQ(names_in(target), (Names{"README.md", "config.json", "model.safetensors"}));
    }
    fs::remove_all(target);
  }
  // One that leads out of the folder is no update.
  fs::create_directories(dir_ / "model/.ready-model");
  spill(dir_ / "model/.ready-model/files.json", R"(["../x"])");
  expect_error<CheckpointError>([&] { settle_directory(dir_ / "model"); }, "plain name");
}

TEST_F(StagedDirectoryTest, AFolderBehindALinkStaysBehindIt) {
  fs::create_directory(dir_ / "real");
  spill(dir_ / "real/a", "1");
  fs::create_directory_symlink(dir_ / "real", dir_ / "name");
  publish(dir_ / "name", Existing::replace, {{"a", "2"}});
  EXPECT_TRUE(fs::is_symlink(dir_ / "name"));
  EXPECT_EQ(slurp(dir_ / "real/a"), "2");
}

TEST_F(StagedDirectoryTest, PublishesFiles) {
  const std::string text = "new";
  spill(dir_ / "file", "old");
  publish_file(dir_ / "file", std::as_bytes(std::span(text.data(), text.size())));
  EXPECT_EQ(slurp(dir_ / "file"), "new");
  EXPECT_EQ(names_in(dir_), Names{"file"});
  expect_error<IoError>([&] { publish_file(dir_ / "no/file", {}); }, (dir_ / "no").string());
}

using SymbolicLinksTest = ScratchTest;

/// A model folder whose files are links to `blobs`.
void link_files(const fs::path& model, const fs::path& blobs) {
  fs::create_directories(blobs);
  for (const auto& entry : fs::directory_iterator(model)) {
    const fs::path blob = blobs / (entry.path().filename().string() + "-hash");
    fs::rename(entry.path(), blob);
    fs::create_symlink(fs::relative(blob, model), entry.path());
  }
}

TEST_F(SymbolicLinksTest, LeaveNoModelFolder) {
  const fs::path model = dir_ / "model", outside = dir_ / "outside";
  HfFolder::gpt2("transformer.", true, false).write(model);
  fs::create_directory_symlink(model, dir_ / "name");
  fs::create_directory(outside);
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::rename(model / name, outside / name);
    fs::create_symlink(outside / name, model / name);
    expect_error<CheckpointError>([&] { open_hf(model); },
                                  (model / name).string() + ": is a symbolic link to ",
                                  (outside / name).string(), "--follow_symlinks", "follow_symlinks=True");
    EXPECT_EQ(open_hf(model, SymbolicLinks::follow).config().model.family, Family::gpt2);
    fs::remove(model / name);
    fs::rename(outside / name, model / name);
  }
  fs::rename(model / "tokenizer.json", outside / "tokenizer.json");
  fs::create_symlink(outside / "tokenizer.json", model / "tokenizer.json");
  expect_error<CheckpointError>([&] { convert_from_hf(model, dir_ / "out"); }, "tokenizer.json", "outside");
  EXPECT_FALSE(fs::exists(dir_ / "out"));
  convert_from_hf(dir_ / "name", dir_ / "out", SymbolicLinks::follow);
  EXPECT_EQ(slurp(dir_ / "out/tokenizer.json"), slurp(outside / "tokenizer.json"));
}

TEST_F(SymbolicLinksTest, OfTheCacheAndWithinTheFolderAreFollowed) {
  const fs::path revision = dir_ / "hub/models--a--b/snapshots/0123";
  HfFolder::gpt2("transformer.", true, false).write(revision);
  link_files(revision, revision / "../../blobs");
  EXPECT_EQ(open_hf(revision).config().model.family, Family::gpt2);
  convert_from_hf(revision, dir_ / "out");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(dir_ / "out/tokenizer.json")));
  // The blobs of another model are outside.
  fs::remove(revision / "config.json");
  fs::create_directories(dir_ / "hub/models--c/blobs");
  spill(dir_ / "hub/models--c/blobs/hash", "{}");
  fs::create_symlink("../../../models--c/blobs/hash", revision / "config.json");
  expect_error<CheckpointError>([&] { open_hf(revision); }, "config.json", "outside");

  const fs::path model = dir_ / "model";
  HfFolder::gpt2("transformer.", true, false).write(model);
  fs::rename(model / "model.safetensors", model / "weights");
  fs::create_symlink("weights", model / "model.safetensors");
  EXPECT_EQ(open_hf(model).config().model.family, Family::gpt2);
}

TEST(SafetensorsInMemory, KnowsAllTypesOfTheFormat) {
  const std::string header =
      R"({"a": {"dtype": "F8_E4M3", "shape": [2, 1, 1, 1, 1, 1, 1], "data_offsets": [0, 2]},)"
      R"( "b": {"dtype": "F32", "shape": [], "data_offsets": [2, 6]}})";
  const std::string file = raw_file(header, "123456");
  const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
  const auto tensors = safetensors_in_memory(bytes, "x");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].type, "F8_E4M3");
  EXPECT_EQ(tensors[0].shape.size(), 7u);
  EXPECT_EQ(tensors[1].end, file.size());
  expect_error<CheckpointError>([&] { safetensors_in_memory(bytes.first(bytes.size() - 1), "x"); },
                                "x: tensor 'b'", "the file holds 5 bytes");
  expect_error<CheckpointError>([&] { safetensors_in_memory(bytes.first(7), "x"); }, "x: header",
                                "only 7 bytes");
  // What the engine reads from disk is what it can compute with.
  const fs::path path = fs::temp_directory_path() / ("tessera-types-" + std::to_string(::getpid()));
  spill(path, file);
  expect_error<CheckpointError>([&] { SafetensorsReader reader(path); }, "unknown dtype \"F8_E4M3\"");
  fs::remove(path);
}

/// Two jobs that save under one name find the same leftover and clear it away.
class Leftovers : public ScratchTest {};
TEST_F(Leftovers, TwoMayRemoveOne) {
  const fs::path left = dir_ / "left";
  for (int round = 0; round < 200; ++round) {
    for (const char* folder : {"a", "b", "c"}) {
      fs::create_directories(left / folder);
      for (int i = 0; i < 8; ++i) spill(left / folder / std::to_string(i), "x");
    }
    std::barrier start(2);
    std::string faults[2];
    const auto remove = [&](std::string& fault) {
      start.arrive_and_wait();
      try {
        checkpoint_detail::remove_tree(left);
      } catch (const Error& error) {
        fault = error.what();
      }
    };
    std::thread other([&] { remove(faults[1]); });
    remove(faults[0]);
    other.join();
    ASSERT_EQ(faults[0] + faults[1], "") << "round " << round;
    ASSERT_FALSE(fs::exists(left));
  }
}

}  // namespace
}  // namespace tessera::test
