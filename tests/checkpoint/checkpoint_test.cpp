#include "tessera/checkpoint/checkpoint.hpp"

#include <nlohmann/json.hpp>
#include <thread>

#include "sample_run.hpp"

namespace tessera::test {
namespace {

using Checkpoint = ScratchTest;
using Json = nlohmann::json;

TEST_F(Checkpoint, RoundTrip) {
  const SampleRun run(500);
  const fs::path dir = run.save(dir_ / "runs" / "demo");
  EXPECT_EQ(dir, dir_ / "runs" / "demo" / "step-00000500");
  EXPECT_EQ(slurp(dir.parent_path() / "latest"), "step-00000500\n");
  EXPECT_TRUE(fs::exists(dir / "model_tp_0_pp_0.safetensors"));
  run.expect_equal(dir);
  const CheckpointReader reader(dir);
  EXPECT_EQ(reader.state().step, 500);
  EXPECT_EQ(reader.state().consumed_samples, 16000);
  EXPECT_EQ(Json::parse(reader.state().config_json), Json::parse(R"({"model":{"lr":6e-4}})"));
  EXPECT_EQ(Json::parse(reader.state().rng_json), Json::parse("[18446744073709551615,0]"));
  EXPECT_EQ(Json::parse(reader.state().data_json), Json::parse(R"({"position":17})"));
  EXPECT_FALSE(reader.state().tessera_version.empty());
  EXPECT_TRUE(verify_checkpoint(dir).empty());
  EXPECT_EQ(reader.find("param.w")->placement, "shard(0)");
  EXPECT_EQ(reader.find("param"), nullptr);
  std::vector<std::byte> out(4);
  expect_error<CheckpointError>([&] { reader.read("param.none", out); }, "param.none");
  expect_error<InvalidArgument>([&] { reader.read("param.w", out); }, "param.w");
}

TEST_F(Checkpoint, SameStateMakesSameBytes) {
  const SampleRun run(1);
  const fs::path a = run.save(dir_ / "a"), b = run.save(dir_ / "b");
  for (const auto& entry : fs::directory_iterator(a))
    EXPECT_EQ(slurp(entry.path()), slurp(b / entry.path().filename())) << entry.path();
}

TEST_F(Checkpoint, InspectSumsUpByPrefix) {
  const SampleRun run(7);
  const CheckpointSummary summary = inspect_checkpoint(run.save(dir_));
  ASSERT_EQ(summary.groups.size(), 2u);
  EXPECT_EQ(summary.groups[0].prefix, "adam_m");
  EXPECT_EQ(summary.groups[0].elements, 13 * 5);
  EXPECT_EQ(summary.groups[1].tensors, 2);
  EXPECT_EQ(summary.groups[1].bytes, 4u * 13 * 5 + 2 * 3);
  EXPECT_EQ(summary.bytes, fs::file_size(dir_ / "step-00000007" / "model_tp_0_pp_0.safetensors"));
}

/// Four ranks hold a matrix in different cuts; any box read back equals the matrix.
TEST_F(Checkpoint, ReadsAnySliceFromTheShardsOfSeveralRanks) {
  const Shape shape = {7, 6};
  const auto whole = random_bytes(42 * 4, 9);
  const auto cut = [&](TensorSlice slice) {
    std::vector<std::byte> out;
    for (std::int64_t i = 0; i < slice.shape[0]; ++i)
      for (std::int64_t j = 0; j < slice.shape[1] * 4; ++j)
        out.push_back(whole[static_cast<std::size_t>(((slice.offset[0] + i) * 6 + slice.offset[1]) * 4 + j)]);
    return out;
  };
  // A flat range [0, 9) of 42 elements is two boxes on rank 0; the rest is split by rows and then by columns.
  const std::vector<std::pair<int, TensorSlice>> layout = {{0, {{0, 0}, {1, 6}}}, {0, {{1, 0}, {1, 3}}},
                                                           {1, {{1, 3}, {1, 3}}}, {1, {{2, 0}, {2, 6}}},
                                                           {2, {{4, 0}, {3, 2}}}, {3, {{4, 2}, {3, 4}}}};
  const SaveOptions options{.keep = 0, .chunk_bytes = 20, .on_phase = {}};
  CheckpointSave save(dir_, 3, 1000, options);
  std::vector<std::string> records(4);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      std::vector<std::vector<std::byte>> parts;
      std::vector<CheckpointTensor> tensors;
      for (const auto& [owner, slice] : layout) {
        if (owner != rank) continue;
        parts.push_back(cut(slice));
        tensors.push_back({"m", DType::f32, shape, slice, "mixed", parts.back().data()});
      }
      records[static_cast<std::size_t>(rank)] =
          write_checkpoint_shard(save.staging(), "model_tp_" + std::to_string(rank), tensors, options);
    });
  }
  for (auto& rank : ranks) rank.join();
  CheckpointState state;
  state.step = 3;
  const fs::path dir = save.commit(state, records);
  EXPECT_TRUE(verify_checkpoint(dir).empty());
  const CheckpointReader reader(dir);
  for (std::int64_t i = 0; i < 7; ++i)
    for (std::int64_t j = 0; j < 6; ++j)
      for (std::int64_t h = 0; i + h <= 7; ++h)
        for (std::int64_t w = 0; j + w <= 6; ++w) {
          const TensorSlice slice{{i, j}, {h, w}};
          std::vector<std::byte> out(static_cast<std::size_t>(h * w) * 4);
          reader.read("m", slice, out);
          ASSERT_EQ(out, cut(slice));
        }
}

TEST_F(Checkpoint, CommitRefusesHolesAndOverlapsBetweenRanks) {
  const auto data = random_bytes(40, 1);
  const auto commit = [&](TensorSlice first, TensorSlice second) {
    CheckpointSave save(dir_, 1, 100);
    std::vector<std::string> records;
    int rank = 0;
    for (const TensorSlice& slice : {first, second}) {
      const CheckpointTensor tensor{"m", DType::f32, {10}, slice, "shard(0)", data.data()};
      records.push_back(write_checkpoint_shard(save.staging(), std::to_string(rank++), {&tensor, 1}));
    }
    CheckpointState state;
    state.step = 1;
    save.commit(state, records);
  };
  expect_error<CheckpointError>([&] { commit({{0}, {5}}, {{6}, {4}}); }, "9 of 10");
  expect_error<CheckpointError>([&] { commit({{0}, {6}}, {{4}, {4}}); }, "overlap");
  EXPECT_TRUE(fs::is_empty(dir_));
  EXPECT_NO_THROW(commit({{0}, {5}}, {{5}, {5}}));
}

TEST_F(Checkpoint, EveryFlippedBitIsFoundBeforeUse) {
  const SampleRun run(5);
  const fs::path dir = run.save(dir_);
  const fs::path shard = dir / "model_tp_0_pp_0.safetensors";
  const std::string valid = slurp(shard);
  for (std::size_t byte = 0; byte < valid.size(); byte += 3) {
    std::string damaged = valid;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << byte % 8));
    spill(shard, damaged);
    ASSERT_FALSE(verify_checkpoint(dir).empty()) << byte;
    ASSERT_THROW(run.expect_equal(dir), CheckpointError) << byte;
  }
  spill(shard, valid);
  EXPECT_TRUE(verify_checkpoint(dir).empty());
  const std::string manifest = slurp(dir / "manifest.json");
  const Json document = Json::parse(manifest);
  for (std::size_t byte = 0; byte < manifest.size(); byte += 2) {
    std::string damaged = manifest;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << byte % 7));
    if (Json::accept(damaged) && Json::parse(damaged) == document) continue;  // white space
    spill(dir / "manifest.json", damaged);
    ASSERT_THROW(CheckpointReader reader(dir), CheckpointError) << byte << ": " << damaged.substr(byte, 20);
  }
}

/// As `ranks` write it: each two files, one kind after the other.
fs::path save_as(int ranks, const fs::path& root) {
  const SaveOptions options{.keep = 0, .chunk_bytes = 64, .on_phase = {}};
  const auto bytes = random_bytes(4 * 40, 3);
  CheckpointSave save(root, 7, 1 << 20, options);
  std::vector<std::string> records;
  for (const char* kind : {"model", "optimizer"}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const CheckpointTensor whole =
          CheckpointTensor::whole({detail::concat(kind, ".", rank), DType::f32, {40}, bytes.data()});
      records.push_back(write_checkpoint_shard(
          save.staging(), detail::concat(kind, "_", rank, ".safetensors"), {&whole, 1}, options));
    }
  }
  CheckpointState state = SampleRun(7).state();
  return save.commit(state, records);
}

TEST_F(Checkpoint, SharesAreEveryByteOnceAndARanksOwnFiles) {
  const fs::path dir = save_as(3, dir_);
  for (int parts = 1; parts <= 7; ++parts) {
    int read = 0;
    for (int part = 0; part < parts; ++part) {
      const int before = read;
      EXPECT_TRUE(CheckpointReader(dir, [&] { ++read; }).verify(part, parts).empty());
      EXPECT_LE(read - before, 18 / parts + 2) << part << " of " << parts;
    }
    EXPECT_EQ(read, 6 * 3) << parts;
  }
  for (int rank = 0; rank < 3; ++rank) {
    for (const char* kind : {"model", "optimizer"}) {
      const fs::path file = dir / detail::concat(kind, "_", rank, ".safetensors");
      const std::string good = slurp(file);
      std::string bad = good;
      bad.back() = static_cast<char>(bad.back() ^ 1);
      spill(file, bad);
      for (int part = 0; part < 3; ++part) {
        const auto problems = CheckpointReader(dir).verify(part, 3);
        ASSERT_EQ(problems.size(), part == rank ? 1u : 0u);
        if (part == rank) {
          EXPECT_NE(problems[0].find(file.filename().string()), std::string::npos);
        }
      }
      spill(file, good);
    }
  }
  EXPECT_THROW(CheckpointReader(dir).verify(3, 3), InvalidArgument);
}

TEST_F(Checkpoint, DamagedNewestIsReportedAndTheOneBeforeUsed) {
  for (const std::int64_t step : {100, 200, 300, 400}) SampleRun(step).save(dir_);
  const fs::path shard = dir_ / "step-00000400" / "model_tp_0_pp_0.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  std::string text = slurp(dir_ / "step-00000300" / "model_tp_0_pp_0.safetensors");
  text.back() = static_cast<char>(text.back() ^ 1);
  spill(dir_ / "step-00000300" / "model_tp_0_pp_0.safetensors", text);

  const FoundCheckpoint by_size = find_latest(dir_);
  EXPECT_EQ(by_size.step, 300);
  ASSERT_EQ(by_size.problems.size(), 1u);
  EXPECT_NE(by_size.problems[0].find("step-00000400/model_tp_0_pp_0"), std::string::npos)
      << by_size.problems[0];
  EXPECT_THROW(SampleRun(300).expect_equal(*by_size.dir), CheckpointError);

  const FoundCheckpoint by_content = find_latest(dir_, {.check_contents = true});
  EXPECT_EQ(by_content.step, 200);
  EXPECT_EQ(by_content.problems.size(), 2u);
  SampleRun(200).expect_equal(*by_content.dir);
  EXPECT_EQ(find_latest(dir_, {.check_contents = true, .before_step = 200}).step, 100);
  EXPECT_EQ(resolve_checkpoint(dir_), dir_ / "step-00000300");
  EXPECT_EQ(resolve_checkpoint(dir_ / "step-00000100"), dir_ / "step-00000100");
  EXPECT_THROW(resolve_checkpoint(dir_ / "step-00000400"), CheckpointError);

  for (const std::int64_t step : {100, 200, 300}) fs::remove(dir_ / checkpoint_name(step) / "manifest.json");
  const FoundCheckpoint none = find_latest(dir_);
  EXPECT_FALSE(none.dir);
  EXPECT_EQ(none.problems.size(), 4u);
  expect_error<CheckpointError>([&] { resolve_checkpoint(dir_); }, "no usable checkpoint", "step-00000100");
  EXPECT_FALSE(find_latest(dir_ / "absent").dir);
  expect_error<CheckpointError>([&] { resolve_checkpoint(dir_ / "absent"); }, "no such folder");
}

TEST_F(Checkpoint, ManifestErrorsNameTheirPlace) {
  const fs::path path = SampleRun(1).save(dir_) / "manifest.json";
  const std::string valid = slurp(path);
  const auto refuse = [&](const std::string& text, const char* what) {
    spill(path, text);
    expect_error<CheckpointError>([&] { read_manifest(path); }, "manifest.json", what);
  };
  refuse("", "JSON");
  refuse(R"({"format":"tessera-checkpoint","format":1})", "twice");
  refuse(R"({"format":"other"})", "tessera-checkpoint");
  refuse(R"({"format":"tessera-checkpoint","format_version":2})", "format_version 2");
  refuse(R"({"format":"tessera-checkpoint","format_version":"1"})",
         "$.format_version: expected an integer, found string");
  auto altered = Json::parse(valid);
  altered["step"] = 2;
  refuse(altered.dump(), "$.checksum");
  refuse(valid.substr(0, valid.size() / 2), "JSON");
  spill(path, Json::parse(valid).dump());  // other white space
  EXPECT_NO_THROW(read_manifest(path));
  Manifest manifest = read_manifest(path);
  const auto refuse_written = [&](auto change, const char* what) {
    Manifest changed = manifest;
    change(changed);
    write_manifest(changed, path);  // its checksum is right: only the checks themselves can see it
    expect_error<CheckpointError>([&] { read_manifest(path); }, what);
  };
  refuse_written([](Manifest& m) { m.files[0].name = "../x"; }, "$.files[0].name");
  refuse_written([](Manifest& m) { m.files[0].bytes -= 40; }, "$.tensors[");
  refuse_written([](Manifest& m) { m.tensors[1].pieces[0].end += 4; }, "$.tensors[1].pieces[0].bytes");
  refuse_written([](Manifest& m) { m.tensors[1].pieces[0].begin = 0; }, "$.tensors[1].pieces[0].bytes");
  refuse_written([](Manifest& m) { m.tensors[0].pieces[0].crc32.clear(); }, "$.tensors[0].pieces[0].crc32");
  refuse_written([](Manifest& m) { m.tensors[0].pieces[0].slice.offset[0] = 1; }, "lies outside");
  refuse_written([](Manifest& m) { m.tensors[0].pieces.clear(); }, "$.tensors[0]: its pieces hold 0 of");
  refuse_written([](Manifest& m) { std::swap(m.tensors[0], m.tensors[1]); }, "not sorted");
  refuse_written([](Manifest& m) { m.files.push_back(m.files[0]); }, "listed twice");
  manifest.state.user_json = "{";
  EXPECT_THROW(write_manifest(manifest, path), InvalidArgument);
}

TEST_F(Checkpoint, MutatedManifestsNeverCrash) {
  const fs::path path = SampleRun(1).save(dir_) / "manifest.json";
  const std::string valid = slurp(path);
  const Json document = Json::parse(valid);
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    std::string text = valid;
    for (std::size_t edit = 0; edit < 1 + random() % 3 && !text.empty(); ++edit) {
      const std::size_t at = random() % text.size();
      if (random() % 4 == 0)
        text.resize(at);
      else if (random() % 2)
        text[at] = "{}[]\",:0123456789-e\n"[random() % 20];
      else
        text.insert(at, text.substr(at, random() % 50));
    }
    if (Json::accept(text) && Json::parse(text) == document) continue;
    spill(path, text);
    ASSERT_THROW(read_manifest(path), CheckpointError) << round;
  }
}

}  // namespace
}  // namespace tessera::test
