#include "tessera/base/config_file.hpp"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "config_test_support.hpp"

namespace tessera {
namespace {

class ConfigFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera_config_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) + "_" +
               std::to_string(reinterpret_cast<std::uintptr_t>(this)));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = (folder_ / name).string();
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static std::string load_error(const std::string& path) {
    try {
      load_config(path);
      return {};
    } catch (const ConfigError& error) {
      return error.what();
    }
  }

  std::filesystem::path folder_;
};

TEST_F(ConfigFiles, ReportsTheFilesPath) {
  const std::string path = write("a.yaml", "model:\n  num_layer: 3\n");
  expect_contains(load_error(path), path + ":2:3: unknown key 'num_layer'");
}

TEST_F(ConfigFiles, RefusesWhatIsNoFile) {
  expect_contains(load_error((folder_ / "absent.yaml").string()),
                  "absent.yaml: the configuration cannot be opened: No such file");
  expect_contains(load_error(folder_.string()), "is a directory");
  expect_contains(load_error("/dev/null"), "is not a regular file");
}

TEST_F(ConfigFiles, RefusesEmptyAndOversizedFiles) {
  expect_contains(load_error(write("empty.yaml", "")), "empty.yaml:1:1: the configuration is empty");
  expect_contains(load_error(write("comment.yaml", "# nothing\n")), "the configuration is empty");
  expect_contains(load_error(write("dashes.yaml", "---\n")), "the configuration is empty");
  const std::string padding(1 << 20, '#');
  expect_contains(load_error(write("large.yaml", "device:\n  threads: 0\n" + padding)),
                  "larger than 1048576 bytes");
  const std::string head = "device:\n  threads: 3\n#";
  const std::string fits = head + std::string((1 << 20) - head.size(), 'x');
  EXPECT_EQ(load_config(write("fits.yaml", fits)).device.threads, 3);
}

TEST_F(ConfigFiles, WindowsLineEndsAndByteOrderMark) {
  const std::string path =
      write("crlf.yaml", "\xEF\xBB\xBFmodel:\r\n  num_layers: 3\r\nlogging:\r\n  dir: runs/x\r\n");
  const Config config = load_config(path);
  EXPECT_EQ(config.model.num_layers, 3);
  EXPECT_EQ(config.logging.dir, "runs/x");
}

TEST(ConfigShipped, EveryFileLoadsAndCanBeShortened) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs")) {
    if (entry.path().extension() != ".yaml") continue;
    SCOPED_TRACE(entry.path());
    ++count;
    const Config config = load_config(entry.path());
    EXPECT_EQ(config.logging.dir, "runs/" + entry.path().stem().string());
    EXPECT_FALSE(config.data.path.empty());
    EXPECT_EQ(parse_config(to_yaml(config), "printed"), config);
    const Config brief =
        load_config(entry.path(), {"training.steps=10", "data.path=x", "training.eval_interval=0"});
    EXPECT_EQ(brief.training.steps, 10);
    EXPECT_EQ(brief.lr_schedule, config.lr_schedule);
  }
  EXPECT_GE(count, 6);
}

TEST(Overrides, ReplaceTheFilesValue) {
  const std::string text = "model: {num_layers: 3, rope_scaling: {factor: 2, original_max_positions: 64}}\n";
  const Config config =
      parse_config(text, "t.yaml",
                   {"model.num_layers=5", "model.num_layers=7", "model.rope_scaling.factor=8",
                    "optimizer.betas=[0.5, 6.0e-1]", "data.path=[[0.25, a], [0.75, 'b c']]",
                    "data.split=90,5,5", "checkpoint.dir=x=y", "model.tied_head=false",
                    "optimizer.no_decay=[\"*.w\"]", "parallel.data=", "training.seed= 12 "});
  EXPECT_EQ(config.model.num_layers, 7);
  EXPECT_EQ(config.model.rope_scaling.factor, 8.0);
  EXPECT_EQ(config.model.rope_scaling.original_max_positions, 64);
  EXPECT_EQ(config.optimizer.betas, (std::vector<double>{0.5, 0.6}));
  EXPECT_EQ(config.data.path, (std::vector<std::pair<double, std::string>>{{0.25, "a"}, {0.75, "b c"}}));
  EXPECT_EQ(config.data.split, "90,5,5");
  EXPECT_EQ(config.checkpoint.dir, "x=y");
  EXPECT_EQ(config.model.tied_head, false);
  EXPECT_EQ(config.optimizer.no_decay, std::vector<std::string>{"*.w"});
  EXPECT_EQ(config.parallel.data, std::nullopt);
  EXPECT_EQ(config.training.seed, 12);
}

TEST(Overrides, AMappingTakesThePlaceOfTheWhole) {
  const Config config = parse_config("model: {rope_scaling: {factor: 2, original_max_positions: 64}}\n",
                                     "t.yaml", {"model.rope_scaling={factor: 4}"});
  EXPECT_EQ(config.model.rope_scaling, (RopeScaling{.factor = 4.0}));
}

TEST(Overrides, CorrectAFaultOfTheFile) {
  EXPECT_EQ(refusal("model: {num_layers: many}\n", {"model.num_layers=2"}), "");
}

TEST(Overrides, FaultsNameTheOverride) {
  const std::string text = "model:\n  num_layers: 2\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"model.num_layer=3", "unknown key 'num_layer' in 'model'; did you mean 'num_layers'?"},
      {"modle.num_layers=3", "unknown section 'modle'; did you mean 'model'?"},
      {"model.num_layers=x", "model.num_layers must be an integer, not 'x'"},
      {"model.num_layers=0", "must be at least 1"},
      {"model.num_layers=", "not null"},
      {"model.num_heads=7", "model.hidden_size (768) is not a multiple of model.num_heads (7)"},
      {"model.num_layers", "must be section.key=value"},
      {"num_layers=3", "must name section and key"},
      {"model.=3", "must name section and key"},
      {"=3", "must name section and key"},
      {"model.num_layers=[1", "not valid YAML"},
      {"model.num_layers=*a", "not valid YAML"},
      {"model.num_layers=&a 3", "anchors"},
      {"model.num_layers.deep=3", "there is no key 'deep' in '2' at t.yaml:2:15"},
      {"model.hidden_size.deep=3", "model.hidden_size must be an integer, not a mapping"},
      {"model.rope_scaling.fator=3", "unknown key 'fator' in 'model.rope_scaling'; did you mean 'factor'?"},
      {"training.lr=3", "did you mean optimizer.lr?"},
  };
  for (const auto& [override_text, message] : cases) {
    SCOPED_TRACE(override_text);
    const std::string text_of_error = refusal(text, {override_text});
    EXPECT_EQ(text_of_error.rfind("override '" + override_text + "': ", 0), 0u) << text_of_error;
    expect_contains(text_of_error, message);
  }
}

TEST(AllAtOnce, InTheOrderOfTheText) {
  const std::string message =
      refusal("training: {steps: -1}\nmodel:\n  num_layers: x\n  num_layers: 2\n  wdith: 4\n  num_heads: 5\n",
              {"device.type=gpu", "optimizer.lr=-1"});
  std::istringstream lines(message);
  std::vector<std::string> places;
  for (std::string line; std::getline(lines, line);) places.push_back(line.substr(0, line.find(": ", 12)));
  EXPECT_EQ(message.substr(0, 14), "t.yaml:1:19: t");
  const char* order[] = {"t.yaml:1:19: ",
                         "t.yaml:3:15: ",
                         "t.yaml:4:3: ",
                         "t.yaml:5:3: ",
                         "override 'device.type=gpu': ",
                         "override 'optimizer.lr=-1': "};
  std::size_t at = 0;
  for (const char* place : order) {
    const auto found = message.find(place);
    ASSERT_NE(found, std::string::npos) << place << "\n" << message;
    EXPECT_GE(found, at);
    at = found;
  }
  EXPECT_EQ(places.size(), std::size(order)) << message;
}

TEST(AllAtOnce, RulesBesideOtherFaults) {
  const std::string message = refusal(
      "model: {hidden_size: 100, num_heads: 7, num_kv_heads: 2}\n"
      "training: {micro_batch_size: 3, global_batch_size: 8, seq_length: 4096, stps: 3}\n");
  expect_contains(message, "t.yaml:1:38: model.hidden_size (100) is not a multiple of model.num_heads (7)");
  expect_contains(message, "t.yaml:1:55: model.num_heads (7) is not a multiple of model.num_kv_heads (2)");
  expect_contains(message, "t.yaml:2:52: training.global_batch_size (8) is not a multiple");
  expect_contains(message, "t.yaml:2:67: training.seq_length (4096) is more than model.max_positions (1024)");
  expect_contains(message, "t.yaml:2:73: unknown key 'stps'");
}

TEST(AllAtOnce, EndsAtAHundred) {
  std::string text = "model:\n";
  for (int i = 0; i < 5000; ++i) text += "  zz" + std::to_string(i) + ": 1\n";
  const std::string message = refusal(text);
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 100);
  expect_contains(message, "and 1 more");
}

TEST(StrictYaml, SyntaxAndStructure) {
  expect_contains(refusal("model: {num_layers: 2\n"), "not valid YAML");
  expect_contains(refusal("model:\n  num_layers: 2\n   hidden_size: 8\n"), "t.yaml:3:");
  expect_contains(refusal("model:\n\tnum_layers: 2\n"),
                  "t.yaml:2:1: not valid YAML: indented with a tab; use spaces");
  expect_contains(refusal("- model\n"),
                  "t.yaml:1:1: the configuration must be a mapping of sections, not a list");
  expect_contains(refusal("model\n"), "not 'model'");
  expect_contains(refusal("model: 3\n"), "t.yaml:1:8: model must be a mapping of keys to values, not '3'");
  expect_contains(refusal("model:\n- num_layers: 2\n"), "t.yaml:2:1: model must be a mapping");
  expect_contains(refusal("model: {rope_scaling: 8}\n"), "model.rope_scaling must be a mapping");
  EXPECT_EQ(refusal("model:\n  # all defaults\ntraining: {}\n"), "");
}

TEST(StrictYaml, DuplicatesAreFoundEverywhere) {
  expect_contains(refusal("model:\n  num_layers: 2\n  num_layers: 2\n"),
                  "t.yaml:3:3: duplicate key 'num_layers'; it is already at line 2");
  expect_contains(refusal("model: {}\ntraining: {}\nmodel: {}\n"), "t.yaml:3:1: duplicate key 'model'");
  expect_contains(refusal("model: {rope_scaling: {factor: 1, 'factor': 2}}\n"),
                  "t.yaml:1:35: duplicate key 'factor'");
}

TEST(StrictYaml, AnchorsAliasesTagsDocuments) {
  const std::string message = refusal("model: &m {num_layers: 2}\ntraining: *m\n");
  expect_contains(message, "t.yaml:1:8: YAML anchors");
  expect_contains(message, "t.yaml:2:11: YAML aliases");
  expect_contains(refusal("model: {}\n---\nmodel: {}\n"), "t.yaml:2:1: a second YAML document");
  EXPECT_EQ(refusal("---\nmodel: {}\n...\n"), "");
  expect_contains(refusal("model: !!map {}\n"), "YAML tags");
  expect_contains(refusal("!thing\nmodel: {}\n"), "YAML tags");
}

TEST(StrictYaml, AMessageStaysOnItsLine) {
  const std::string message =
      refusal("model: {\"a\\nb\": 1, num_layers: \"x\\ny\\x1b[31m\"}\n", {"device.threads=a\nb"});
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 2) << message;
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

TEST(StrictYaml, DepthAndHostileInput) {
  std::string nested;
  for (int i = 0; i < 63; ++i) nested += "[";
  std::string closed = nested;
  for (int i = 0; i < 63; ++i) closed += "]";
  expect_contains(refusal("model: {num_layers: " + closed + "}\n"), "nested more than 64 deep");
  expect_contains(refusal("model: " + closed + "\n"), "model must be a mapping");
  expect_contains(refusal("model: " + std::string(100000, '[')), "nested more than 64 deep");
  expect_contains(refusal(std::string(100000, '{')), "nested more than 64 deep");
  std::string stairs;
  for (int i = 0; i < 200; ++i) stairs += std::string(static_cast<std::size_t>(i), ' ') + "a:\n";
  expect_contains(refusal(stairs), "nested more than 64 deep");
  expect_contains(refusal(std::string("model: {}\0evil: 1\n", 18)),
                  "t.yaml:1:10: control character number 0");
  EXPECT_NE(refusal("\xff\xfe\xfd"), "");
  EXPECT_NE(refusal(std::string(100000, '\'')), "");
  EXPECT_NE(refusal(std::string(100000, ':')), "");
  EXPECT_NE(refusal("%YAML 9.9\n---\nmodel: {}\nx: 1\n"), "");
}

}  // namespace
}  // namespace tessera
