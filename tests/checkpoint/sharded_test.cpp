#include "tessera/checkpoint/sharded.hpp"

#include <nlohmann/json.hpp>

#include "scratch.hpp"

namespace tessera::test {
namespace {

using Sharded = ScratchTest;

std::vector<TensorSpec> five() {
  return {{"e", DType::f32, {10}},
          {"b", DType::bf16, {30}},
          {"a", DType::f32, {25}},
          {"d", DType::f32, {1}},
          {"c", DType::f32, {9}}};
}

void write_all(ShardedWriter& writer) {
  for (const auto& spec : five()) writer.append(spec.name, random_bytes(spec.bytes(), spec.name[0]));
  writer.finish();
}

void expect_all(const fs::path& dir) {
  const ShardedReader reader(dir);
  EXPECT_EQ(reader.entries().size(), 5u);
  for (const auto& spec : five()) {
    std::vector<std::byte> out(spec.bytes());
    reader.read(spec.name, out);
    EXPECT_EQ(out, random_bytes(spec.bytes(), spec.name[0])) << spec.name;
  }
}

TEST_F(Sharded, OneFileHasNoIndex) {
  ShardedWriter writer(dir_, five());
  write_all(writer);
  EXPECT_TRUE(fs::exists(dir_ / "model.safetensors"));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 1);
  expect_all(dir_);
}

TEST_F(Sharded, SplitsInOrderUpToTheLimit) {
  ShardedWriter::Options options;
  options.max_shard_bytes = 100;
  ShardedWriter writer(dir_, five(), options);
  write_all(writer);
  expect_all(dir_);
  const auto index = nlohmann::json::parse(slurp(dir_ / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 240);
  // 40 + 60 | 100 | 4 + 36
  const nlohmann::json map = {{"e", "model-00001-of-00003.safetensors"},
                              {"b", "model-00001-of-00003.safetensors"},
                              {"a", "model-00002-of-00003.safetensors"},
                              {"d", "model-00003-of-00003.safetensors"},
                              {"c", "model-00003-of-00003.safetensors"}};
  EXPECT_EQ(index["weight_map"], map);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 4);
}

TEST_F(Sharded, UnfinishedWriterLeavesNoIndexAndNoTemporaryFile) {
  ShardedWriter::Options options;
  options.max_shard_bytes = 100;
  {
    ShardedWriter writer(dir_, five(), options);
    writer.append("a", random_bytes(50, 1));
  }
  EXPECT_TRUE(fs::is_empty(dir_));
  ShardedWriter writer(dir_, five(), options);
  EXPECT_THROW(writer.finish(), InvalidArgument);
}

TEST_F(Sharded, IndexNamesThatLeaveTheFolderAreRefused) {
  fs::create_directories(dir_ / "model");
  const std::vector<TensorSpec> one = {{"a", DType::u8, {1}}};
  for (const fs::path& path : {dir_ / "secret.safetensors", dir_ / "model" / "ok.safetensors"}) {
    SafetensorsWriter writer(path, one);
    writer.append("a", random_bytes(1, 1));
    writer.finish();
  }
  const auto index = [&](const std::string& file) {
    spill(dir_ / "model" / "model.safetensors.index.json", "{\"weight_map\":{\"a\":\"" + file + "\"}}");
  };
  for (const std::string& name :
       {std::string("../secret.safetensors"), (dir_ / "secret.safetensors").string(),
        std::string("./ok.safetensors"), std::string(".."), std::string("."), std::string(""),
        std::string("..\\\\secret.safetensors"), std::string("x/../ok.safetensors"), std::string(".hidden"),
        std::string("ok.safetensors\\u0000")}) {
    index(name);
    expect_error<CheckpointError>([&] { ShardedReader reader(dir_ / "model"); }, "index.json",
                                  "$.weight_map.a", "plain name");
  }
  index("ok.safetensors");
  EXPECT_EQ(ShardedReader(dir_ / "model").file_of("a"), "ok.safetensors");
}

TEST_F(Sharded, IndexAndFilesMustAgree) {
  ShardedWriter::Options options;
  options.max_shard_bytes = 100;
  ShardedWriter writer(dir_, five(), options);
  write_all(writer);
  const fs::path path = dir_ / "model.safetensors.index.json";
  const auto valid = nlohmann::json::parse(slurp(path));
  const auto refuse = [&](const nlohmann::json& index, const char* what) {
    spill(path, index.dump());
    expect_error<CheckpointError>([&] { ShardedReader reader(dir_); }, what);
  };
  auto index = valid;
  index["weight_map"]["z"] = "model-00002-of-00003.safetensors";
  refuse(index, "'z'");
  index = valid;
  index["weight_map"]["a"] = "model-00001-of-00003.safetensors";
  refuse(index, "'a'");
  index = valid;
  index["weight_map"].erase("d");
  refuse(index, "'d'");
  index = valid;
  index["weight_map"]["a"] = 3;
  refuse(index, "$.weight_map.a");
  index = valid;
  index["weight_map"]["a"] = "absent.safetensors";
  refuse(index, "absent.safetensors");
  refuse({{"weight_map", {1, 2}}}, "$.weight_map: expected an object, found array");
  refuse({{"metadata", {}}}, "\"weight_map\" is missing");
  spill(path, R"({"weight_map":{"a":"x","a":"y"}})");
  expect_error<CheckpointError>([&] { ShardedReader reader(dir_); }, "\"a\" appears twice");
  spill(path, std::string(100'000, '['));
  expect_error<CheckpointError>([&] { ShardedReader reader(dir_); }, "deep");
  fs::remove(path);
  expect_error<CheckpointError>([&] { ShardedReader reader(dir_); }, "neither", "save_pretrained");
}

}  // namespace
}  // namespace tessera::test
