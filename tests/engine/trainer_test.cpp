/// Whole runs: interrupted and resumed ones are bitwise the uninterrupted one; damage and full disks lose
/// nothing.

#include "tessera/engine/trainer.hpp"

#include <sys/resource.h>

#include <csignal>
#include <map>

#include "tessera/data/dataset_record.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/state.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;
using test::slurp;
using test::spill;

struct Followed {
  std::map<std::int64_t, double> losses;
  std::vector<std::int64_t> steps;
  std::vector<std::filesystem::path> saved;
  std::string warnings, notes;
  TrainResult result;
};

/// Trains, leaving after step `stop_after` (0 = to the end) as a process does that was told to stop.
Followed run(const Config& config, std::int64_t stop_after = 0) {
  Followed f;
  TrainHooks hooks;
  hooks.on_step = [&](const StepRecord& r) {
    f.losses[r.step] = r.loss;
    f.steps.push_back(r.step);
  };
  hooks.on_checkpoint = [&](const std::filesystem::path& path) { f.saved.push_back(path); };
  hooks.should_stop = [&] { return stop_after > 0 && f.steps.back() >= stop_after; };
  LogOptions log;
  log.console = false;
  log.callback = [&](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) f.warnings += std::string(line) + "\n";
    if (level == LogLevel::info) f.notes += std::string(line) + "\n";
  };
  f.result = train(config, hooks, Logger(log));
  return f;
}

/// Everything a checkpoint holds, as bytes.
std::map<std::string, std::vector<std::byte>> contents(const std::filesystem::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& tensor : reader.manifest().tensors) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.shape.numel()) * size_of(tensor.dtype));
    reader.read(tensor.name, bytes);
    all[tensor.name] = bytes;
  }
  return all;
}

std::vector<std::int64_t> steps_in(const std::filesystem::path& metrics) {
  std::ifstream in(metrics);
  std::string line;
  std::vector<std::int64_t> steps;
  while (std::getline(in, line)) steps.push_back(std::stoll(line.substr(line.find(':') + 1)));
  return steps;
}

std::vector<std::int64_t> range(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> steps;
  for (std::int64_t i = first; i <= last; ++i) steps.push_back(i);
  return steps;
}

struct Resume : test::FolderTest, ::testing::WithParamInterface<Precision> {};
INSTANTIATE_TEST_SUITE_P(Precisions, Resume, ::testing::Values(Precision::fp32, Precision::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(Resume, FortyStepsStraightAreTwentyFiveAndFifteen) {
  Config straight = run_config("straight", 0.1), broken = run_config("broken", 0.1);
  for (Config* c : {&straight, &broken}) {
    c->training.precision = GetParam();
    c->lr_schedule.style = LrStyle::cosine;
    c->lr_schedule.warmup_steps = 5;
  }
  const Followed whole = run(straight);
  EXPECT_EQ(whole.steps, range(1, 40));

  const Followed first = run(broken, 31);  // six steps after the checkpoint are lost
  EXPECT_TRUE(first.result.interrupted);
  ASSERT_EQ(first.saved.size(), 1u);
  const Followed second = run(broken);
  EXPECT_EQ(second.steps, range(26, 40));
  EXPECT_EQ(second.warnings, "");
  for (const auto& [step, loss] : whole.losses) {
    if (step <= 31) {
      EXPECT_EQ(first.losses.at(step), loss) << step;
    }
    if (step > 25) {
      EXPECT_EQ(second.losses.at(step), loss) << step;
    }
  }
  EXPECT_EQ(contents(*second.result.checkpoint), contents(*whole.result.checkpoint));
  EXPECT_EQ(steps_in(dir_ / "broken/metrics.jsonl"), range(1, 40));
}

struct Trainer : test::FolderTest {
  /// Ten steps, a checkpoint every five, all kept.
  Config short_run(const std::string& name) {
    Config c = run_config(name);
    c.training.steps = 10;
    c.checkpoint.every = 5;
    c.checkpoint.keep = 9;
    return c;
  }
  static std::filesystem::path shard_of(const std::filesystem::path& checkpoint) {
    for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
      if (entry.path().extension() == ".safetensors") return entry.path();
    }
    throw std::runtime_error("no shard in " + checkpoint.string());
  }
  static void flip_last_byte(const std::filesystem::path& file) {
    std::string bytes = slurp(file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    spill(file, bytes);
  }
};

TEST_F(Trainer, ADamagedCheckpointIsReportedAndTheOneBeforeItUsed) {
  const Config config = short_run("run");
  const Followed whole = run(config);
  ASSERT_EQ(whole.saved.size(), 2u);
  const auto good = contents(whole.saved[1]);
  flip_last_byte(shard_of(whole.saved[1]));
  const Followed again = run(config);
  EXPECT_NE(again.warnings.find("step-00000010"), std::string::npos) << again.warnings;
  EXPECT_EQ(again.steps, range(6, 10));
  EXPECT_EQ(again.losses.at(10), whole.losses.at(10));
  EXPECT_EQ(contents(whole.saved[1]), good);
  EXPECT_EQ(steps_in(dir_ / "run/metrics.jsonl"), range(1, 10));
}

TEST_F(Trainer, WhenNoCheckpointIsWholeItStopsInsteadOfBeginningAnew) {
  const Config config = short_run("run");
  for (const auto& saved : run(config).saved) flip_last_byte(shard_of(saved));
  expect_error<CheckpointError>([&] { run(config); }, "no checkpoint in", "can be used");
  EXPECT_EQ(steps_in(dir_ / "run/metrics.jsonl"), range(1, 10));
}

TEST_F(Trainer, AFinishedRunHasNothingToDoAndALongerOneGoesOn) {
  Config config = short_run("run");
  config.lr_schedule.decay_steps = 20;
  config.optimizer.lr = 1e-3;
  run(config);
  const Followed again = run(config);
  EXPECT_TRUE(again.steps.empty());
  EXPECT_EQ(again.result.step, 10);
  config.training.steps = 13;
  EXPECT_EQ(run(config).steps, range(11, 13));
}

TEST_F(Trainer, AMovedRunGoesOn) {
  Config config = short_run("run");
  run(config, 7);
  std::filesystem::rename(dir_ / "run", dir_ / "moved");
  config.logging.dir = (dir_ / "moved").string();
  EXPECT_EQ(run(config).steps, range(6, 10));
}

TEST_F(Trainer, AGivenCheckpointStartsANewFolder) {
  Config config = short_run("run");
  const Followed first = run(config);
  config.logging.dir = (dir_ / "other").string();
  config.checkpoint.resume = first.saved[0].string();
  const Followed second = run(config);
  EXPECT_EQ(second.steps, range(6, 10));
  EXPECT_EQ(second.losses.at(10), first.losses.at(10));
  config.checkpoint.resume = (dir_ / "nowhere").string();
  config.logging.dir = (dir_ / "third").string();
  expect_error<CheckpointError>([&] { run(config); }, "nowhere");
}

TEST_F(Trainer, InterruptionSavesWhenAsked) {
  Config config = short_run("run");
  config.checkpoint.on_interrupt = true;
  const Followed first = run(config, 7);
  EXPECT_TRUE(first.result.interrupted);
  // On a GPU the next step runs already when the result of the seventh is known.
  const std::int64_t last = test::on_cuda() ? 8 : 7;
  EXPECT_EQ(first.saved.back().filename(), "step-0000000" + std::to_string(last));
  EXPECT_EQ(run(config).steps, range(last + 1, 10));
}

TEST_F(Trainer, OldCheckpointsGo) {
  Config config = short_run("run");
  config.checkpoint.every = 2;
  config.checkpoint.keep = 2;
  run(config);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint_root(config))) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000008", "step-00000010"}));
}

TEST_F(Trainer, EvaluationDisturbsNothing) {
  Config quiet = short_run("quiet"), talkative = short_run("talkative");
  talkative.training.eval_interval = 3;
  talkative.training.eval_iters = 1;
  const Followed a = run(quiet), b = run(talkative);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_FALSE(a.result.eval_loss);
  ASSERT_TRUE(b.result.eval_loss);
  const std::string text = slurp(dir_ / "talkative/metrics.jsonl");
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find("eval_loss", at)) != std::string::npos; ++at) ++found;
  EXPECT_EQ(found, 4u);  // steps 3, 6, 9 and the last
}

TEST_F(Trainer, AFullDiskDuringASaveLosesNothing) {
  Config config = short_run("run");
  run(config, 5);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 40000;  // enough for a few lines of metrics, not for a checkpoint
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    run(config);
  } catch (const IoError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("checkpoints"), std::string::npos) << message;
  const Followed again = run(config);
  EXPECT_EQ(again.warnings, "");
  EXPECT_EQ(again.steps, range(6, 10));
}

TEST_F(Trainer, BadDataLeavesNoTraceThatHindersTheNextTry) {
  Config config = short_run("run");
  const Config good = config;
  config.data.path = {{1.0, (dir_ / "nowhere").string()}};
  config.training.seq_length = 7;
  expect_error<Error>([&] { run(config); }, "nowhere");
  EXPECT_EQ(run(good).steps, range(1, 10));  // another length: nothing was trained that it could contradict
}

TEST_F(Trainer, TokensBeyondTheVocabularyAreRefused) {
  Config config = short_run("run");
  config.model.vocab_size = 100;
  config.data.tokenizer = "tokenizer.json";  // the end of a document is not known
  expect_error<DataError>([&] { run(config); }, "corpus", "100");
}

TEST_F(Trainer, OneTokenBeyondTheVocabularyIsFoundBeforeTheFirstStep) {
  Config config = short_run("run");
  const std::string prefix = (dir_ / "late").string();
  {
    IndexedDatasetWriter writer(prefix, DType::u16);
    for (int document = 0; document < 20; ++document) writer.add_document(std::vector<std::int32_t>(40, 97));
    writer.add_document(
        std::vector<std::int32_t>{97, 300});  // in the part for validation, of which nothing is read
    writer.finish();
  }
  config.data.path = {{1.0, prefix}};
  config.training.eval_interval = 0;
  expect_error<DataError>([&] { run(config); }, "late.bin", "document 20", "token id 300", "vocab_size");
}

TEST_F(Trainer, ItIsSaidThatEvaluationsReadTheSameBatches) {
  Config config = short_run("run");
  config.training.eval_interval = 5;
  config.training.eval_iters = 1;
  EXPECT_NE(run(config).notes.find("each evaluation reads the same 1 batches of the validation split"),
            std::string::npos);
  config.logging.dir = (dir_ / "without").string();
  config.training.eval_interval = 0;
  EXPECT_EQ(run(config).notes.find("each evaluation"), std::string::npos);
}

TEST_F(Trainer, DataThatAreReadManyTimesAreNamedOnce) {
  Config config = short_run("run");
  EXPECT_EQ(run(config).notes.find("training tokens"), std::string::npos);
  const std::string prefix = (dir_ / "few").string();
  {
    IndexedDatasetWriter writer(prefix, DType::u16);
    for (int document = 0; document < 2; ++document) writer.add_document(std::vector<std::int32_t>(10, 97));
    writer.finish();
  }
  config.logging.dir = (dir_ / "few-run").string();
  config.data.path = {{1.0, prefix}};
  config.data.split = "100,0,0";
  config.training.eval_interval = 0;
  const auto& t = config.training;
  const std::string times = std::to_string(std::llround(t.steps * t.global_batch_size * t.seq_length / 20.0));
  const std::string said = run(config).notes;
  const auto at = said.find("few: its 20 training tokens are read " + times + " times");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("training tokens", at + 40), std::string::npos) << said;
}

struct TrainerWithTokenizer : test::FolderTest {
  std::string write_tokenizer(const std::string& name, const std::string& second) {
    const auto path = dir_ / name;
    spill(path,
          R"({"added_tokens": [{"id": 109, "content": "<|endoftext|>"}], "normalizer": null, "model": {"type":
      "WordLevel", "unk_token": "a", "vocab": {"a": 0, ")" +
              second + R"(": 1, "z": 200}}})");
    return path.string();
  }
  Config config_for(const std::string& name) {
    Config config = run_config(name);
    config.training.steps = 2;
    config.checkpoint.every = 0;
    config.data.eod_mask_loss = true;
    return config;
  }
  void record(const Config& config, const std::string& tokenizer) {
    write_dataset_record(config.data.path[0].second, {describe_tokenizer({.model = tokenizer}), true});
  }
};

TEST_F(TrainerWithTokenizer, TheTokenizerAndItsEndOfDocumentFollowFromTheData) {
  const std::string made_with = write_tokenizer("tokenizer.json", "b");
  Config config = config_for("bytes");
  const Followed bytes = run(config);  // the end of a document is taken for 256
  config = config_for("given");
  config.data.tokenizer = made_with;
  const Followed given = run(config);
  EXPECT_NE(given.losses, bytes.losses) << "the tokenizer's own end, 109, is masked";
  config = config_for("followed");
  record(config, made_with);
  const Followed followed = run(config);
  EXPECT_EQ(followed.losses, given.losses);
  EXPECT_NE(followed.notes.find("data.tokenizer: " + made_with), std::string::npos) << followed.notes;
  EXPECT_NE(slurp(dir_ / "followed" / "config.yaml").find(made_with), std::string::npos);
}

TEST_F(TrainerWithTokenizer, AnotherTokenizerThanTheDatasIsRefused) {
  const std::string made_with = write_tokenizer("made.json", "b"), other = write_tokenizer("other.json", "c");
  std::filesystem::create_directories(dir_ / "copy");
  const std::string copy = write_tokenizer("copy/tokenizer.json", "b");
  Config config = config_for("run");
  record(config, made_with);
  config.data.tokenizer = other;
  expect_error<ConfigError>([&] { run(config); }, "data.tokenizer", "other.json", "made.json");
  config.data.tokenizer = copy;
  EXPECT_EQ(run(config).result.step, 2) << "the same content elsewhere is the same tokenizer";
  Config small = config_for("small");
  small.model.vocab_size = 150;
  expect_error<ConfigError>([&] { run(small); }, "model.vocab_size", "201");
}

TEST_F(TrainerWithTokenizer, WeightsOfAnotherTokenizerThanTheDatasAreRefused) {
  const std::string made_with = write_tokenizer("made.json", "b");
  Config config = config_for("run");
  record(config, made_with);
  const auto weights = dir_ / "weights";
  const auto engine = build_engine(config);
  export_hf(weights, architecture_of(config.model), weights_of(*engine), {});
  config.model.init_from = weights.string();
  const Followed untold = run(config);
  EXPECT_EQ(untold.result.step, 2);
  EXPECT_EQ(untold.warnings, "") << "nothing says whose tokens these weights know";

  config.logging.dir = (dir_ / "alike").string();
  write_tokenizer("weights/tokenizer.json", "b");
  EXPECT_EQ(run(config).result.step, 2) << "the same content";
  write_tokenizer("weights/tokenizer.json", "c");
  EXPECT_EQ(run(config).result.step, 2) << "a run that goes on takes nothing from there";
  config.logging.dir = (dir_ / "other").string();
  expect_error<ConfigError>([&] { run(config); }, "model.init_from", "weights/tokenizer.json", "made.json",
                            "tessera preprocess --tokenizer-model", "model.reinitialize=true");
  config.model.reinitialize = true;
  const Followed taught = run(config);
  EXPECT_EQ(taught.result.step, 2);
  EXPECT_NE(taught.warnings.find("the same ids are other tokens there"), std::string::npos);
}

TEST_F(TrainerWithTokenizer, BytesOnWeightsOfALargeVocabularyAreWarnedOf) {
  Config config = config_for("run");
  write_dataset_record(config.data.path[0].second, {TokenizerRecord{}, true});
  config.model.vocab_size = 2000;
  const auto engine = build_engine(config);
  export_hf(dir_ / "weights", architecture_of(config.model), weights_of(*engine), {});
  config.model.init_from = (dir_ / "weights").string();
  const Followed told = run(config);
  EXPECT_NE(told.warnings.find("1743 of them never occur"), std::string::npos) << told.warnings;
}

TEST_F(TrainerWithTokenizer, ACheckpointKeepsItAndGoesOnWithNoOther) {
  const std::string made_with = write_tokenizer("made.json", "b"), other = write_tokenizer("other.json", "c");
  Config config = config_for("run");
  config.checkpoint.every = 1;
  record(config, made_with);
  const auto saved = run(config, 1).saved;
  ASSERT_EQ(saved.size(), 1u);
  const TokenizerRecord kept = read_run_state(CheckpointReader(saved[0])).tokenizer.value();
  EXPECT_EQ(kept, describe_tokenizer({.model = made_with}));
  EXPECT_EQ(kept.end_of_document, 109);
  record(config, other);
  expect_error<ConfigError>([&] { run(config); }, "was trained on data of", "made.json", "other.json");
  std::filesystem::create_directories(dir_ / "moved");
  std::filesystem::rename(made_with, dir_ / "moved/tokenizer.json");
  config.data.tokenizer = (dir_ / "moved/tokenizer.json").string();
  record(config, config.data.tokenizer);
  EXPECT_EQ(run(config).steps, std::vector<std::int64_t>{2}) << "the same content elsewhere";
}

TEST_F(TrainerWithTokenizer, DataOfUnknownOriginAreJudgedByTheirLargestId) {
  Config config = config_for("bytes");
  config.checkpoint.every = 2;
  const Followed bytes = run(config);
  EXPECT_EQ(read_run_state(CheckpointReader(bytes.saved.at(0))).tokenizer, TokenizerRecord{});
  EXPECT_EQ(bytes.warnings, "");
  const std::string prefix = (dir_ / "larger").string();
  {
    IndexedDatasetWriter writer(prefix, DType::u16);
    for (int document = 0; document < 60; ++document) writer.add_document(std::vector<std::int32_t>(40, 97));
    writer.add_document(std::vector<std::int32_t>(20, 300));
    writer.finish();
  }
  config.logging.dir = (dir_ / "larger-run").string();
  config.data.path = {{1.0, prefix}};
  config.model.vocab_size = 320;
  expect_error<ConfigError>([&] { run(config); }, "larger has ids up to 300", "data.tokenizer",
                            "end of a document");
  config.data.eod_mask_loss = false;
  const Followed told = run(config);
  EXPECT_NE(told.warnings.find("larger has ids up to 300, and data.tokenizer is bytes"), std::string::npos)
      << told.warnings;
  EXPECT_FALSE(read_run_state(CheckpointReader(told.saved.at(0))).tokenizer);
  // Who names it then is believed, and a tokenizer that the model has no room for is refused before the first
  // step.
  config.data.tokenizer = write_tokenizer("tokenizer.json", "b");
  config.training.steps = 3;
  EXPECT_EQ(run(config).steps, std::vector<std::int64_t>{3});
  config.logging.dir = (dir_ / "small-run").string();
  config.model.vocab_size = 150;
  expect_error<ConfigError>([&] { run(config); }, "model.vocab_size is 150", "data.tokenizer is", "201");
}

TEST_F(Trainer, ADivergedRunStopsWithAReason) {
  Config config = short_run("run");
  config.optimizer.lr = 1e30;
  config.optimizer.clip_grad = 0.0;
  config.training.max_skipped_steps = 3;
  expect_error<TrainingError>([&] { run(config); }, "not finite 3 steps in a row");
  EXPECT_NE(slurp(dir_ / "run/metrics.jsonl").find("\"loss\":null"), std::string::npos);
}

}  // namespace
}  // namespace tessera
