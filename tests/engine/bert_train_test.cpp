/// Whole runs of BERT on sentences: interrupted and resumed, on every kind of layout, with and without the
/// head for pairs; data that are refused.

#include <map>

#include "engine/run_data.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/loader.hpp"
#include "tessera/engine/plan.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;

constexpr std::int32_t kVocab = 48;

struct BertTraining : test::FolderTest {
  /// Sentences of ids 5 to 47, of which 40 to 47 go on with a word; 0 to 4 are special.
  std::string write_data(const std::string& name, std::uint32_t seed = 3) {
    const std::string prefix = (dir_ / name).string();
    std::mt19937 generator(seed);
    IndexedDatasetWriter writer(prefix, DType::u16);
    for (int document = 0; document < 30; ++document) {
      for (std::size_t sentence = 0; sentence < 1 + generator() % 6; ++sentence) {
        std::vector<std::int32_t> tokens(1 + generator() % 9);
        for (auto& t : tokens) t = static_cast<std::int32_t>(5 + generator() % 43);
        writer.add_sequence(tokens);
      }
      writer.end_document();
    }
    writer.finish();
    write_record(prefix, special());
    return prefix;
  }
  static SpecialTokens special() {
    return {.cls = 2, .sep = 3, .mask = 4, .pad = 0, .continuations = {40, 41, 42, 43, 44, 45, 46, 47}};
  }
  void write_record(const std::string& prefix, const SpecialTokens& tokens) {
    write_dataset_record(prefix, {.tokenizer = {.type = "BertWordPieceCase",
                                                .file = (dir_ / "vocab.txt").string(),
                                                .hash = "1",
                                                .vocab_size = kVocab,
                                                .end_of_document = 3},
                                  .split_sentences = true,
                                  .special = tokens});
  }

  Config bert_run(const std::string& name, double dropout = 0.0) {
    Config c = run_config(name, dropout);
    c.model = ModelSettings{.family = {"bert"},
                            .num_layers = 2,
                            .hidden_size = 16,
                            .num_heads = 2,
                            .ffn_hidden_size = 24,
                            .vocab_size = kVocab,
                            .max_positions = 24,
                            .dropout = dropout,
                            .attention_dropout = dropout};
    c.training.seq_length = 22;
    c.training.steps = 8;
    c.training.eval_interval = 4;
    c.training.eval_iters = 2;
    c.checkpoint.every = 4;
    c.data.path = {{1.0, write_data("sentences")}};
    return c;
  }
};

/// Lines of metrics.jsonl without what depends on the machine.
std::map<std::int64_t, StepRecord> train_all(const Config& config, int ranks = 1, std::int64_t stop = 0) {
  std::map<std::int64_t, StepRecord> records;
  test::run_ranks(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const bool first = world->rank() == 0;
    std::int64_t at = 0;
    TrainHooks hooks;
    hooks.on_step = [&](const StepRecord& r) { records[at = r.step] = r; };
    if (first) hooks.should_stop = [&] { return stop > 0 && at >= stop; };
    train(config, hooks, Logger::silent(), std::move(world));
  });
  return records;
}

void expect_same(const std::map<std::int64_t, StepRecord>& a, const std::map<std::int64_t, StepRecord>& b,
                 double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [step, record] : a) {
    const StepRecord& other = b.at(step);
    EXPECT_NEAR(record.loss, other.loss, tolerance) << step;
    EXPECT_NEAR(record.grad_norm, other.grad_norm, 10 * tolerance) << step;
    EXPECT_EQ(record.losses.size(), other.losses.size());
    for (std::size_t i = 0; i < record.losses.size(); ++i)
      EXPECT_NEAR(record.losses[i].second, other.losses[i].second, tolerance) << step;
    ASSERT_EQ(record.eval_loss.has_value(), other.eval_loss.has_value());
    EXPECT_NEAR(record.eval_loss.value_or(0), other.eval_loss.value_or(0), tolerance);
  }
}

TEST_F(BertTraining, GoesOnBitwise) {
  const Config whole = bert_run("whole", 0.1), broken = bert_run("broken", 0.1);
  const auto reference = train_all(whole);
  ASSERT_EQ(reference.size(), 8u);
  EXPECT_EQ(reference.at(8).losses.size(), 2u);
  EXPECT_EQ(reference.at(8).eval_losses.at(1).first, "nsp");
  EXPECT_DOUBLE_EQ(*reference.at(8).eval_loss,
                   reference.at(8).eval_losses[0].second + reference.at(8).eval_losses[1].second);
  train_all(broken, 1, 6);  // two steps after the checkpoint are lost
  const auto rest = train_all(broken);
  ASSERT_EQ(rest.begin()->first, 5);
  std::map<std::int64_t, StepRecord> tail(reference.find(5), reference.end());
  expect_same(rest, tail, 0.0);
}

TEST_F(BertTraining, LayoutsSeeWhatOneProcessSees) {
  struct Layout {
    std::int64_t tensor, pipeline, data;
  };
  for (const Family family : {Family{"bert"}, Family{"megatron-bert"}}) {
    Config one = bert_run("one", 0.1);
    one.model.family = family;
    one.checkpoint.resume = "none";
    one.logging.dir = (dir_ / "one" / std::string(family.name)).string();
    const auto reference = train_all(one);
    for (const Layout& layout : {Layout{1, 1, 2}, Layout{2, 1, 1}, Layout{1, 2, 1}, Layout{2, 2, 1}}) {
      SCOPED_TRACE(testing::Message() << family.name << " tp " << layout.tensor << " pp " << layout.pipeline
                                      << " dp " << layout.data);
      Config config = one;
      config.parallel.tensor = layout.tensor;
      config.parallel.sequence = layout.tensor > 1 && layout.pipeline > 1;
      config.parallel.pipeline = layout.pipeline;
      config.parallel.data = layout.data;
      config.logging.dir = (dir_ / "layout").string();
      std::filesystem::remove_all(config.logging.dir);
      config.training.recompute = layout.pipeline > 1 ? Recompute::full : Recompute::none;
      expect_same(train_all(config, static_cast<int>(layout.tensor * layout.pipeline * layout.data)),
                  reference, 1e-5);
    }
  }
}

TEST_F(BertTraining, WithoutTheHeadForPairs) {
  Config config = bert_run("run");
  config.model.binary_head = false;
  const auto records = train_all(config);
  EXPECT_TRUE(records.at(8).losses.empty());
  EXPECT_LT(records.at(8).loss, 5);
}

/// The two data ranks' batches together are one rank's, and what is padded is hidden and not learned.
TEST_F(BertTraining, DataRanksShareOutSamples) {
  const Config config = bert_run("run");
  const RunTokenizer tokenizer = tokenizer_of_run(config, Logger::silent());
  EXPECT_EQ(tokenizer.special, special());
  EXPECT_EQ(tokenizer.ids, kVocab);
  const DatasetSplits data = open_run_data(config, tokenizer, {});
  const auto load = [&](int rank, int size) {
    return DataLoader(data.train, {.global_batch_size = 4,
                                   .micro_batch_size = 2,
                                   .data_parallel_rank = rank,
                                   .data_parallel_size = size})
        .next()
        .value();
  };
  const Batch all = load(0, 1);
  validate(all, kVocab, 24);
  validate_extras(all, 2, 2);
  bool padded = false;
  for (int rank = 0; rank < 2; ++rank) {
    const Batch part = load(rank, 2), same = slice(all, 2 * rank, 2);
    EXPECT_EQ(part.tokens, same.tokens);
    EXPECT_EQ(part.labels, same.labels);
    EXPECT_EQ(part.token_types, same.token_types);
    EXPECT_EQ(part.sample_labels, same.sample_labels);
    EXPECT_EQ(part.key_end, same.key_end);
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t s = static_cast<std::size_t>(part.key_end[i]); s < 22; ++s) {
        padded = true;
        EXPECT_EQ(part.tokens[22 * i + s], 0);
        EXPECT_EQ(part.labels[22 * i + s], kIgnoredLabel);
      }
    }
  }
  EXPECT_TRUE(padded);
}

TEST_F(BertTraining, IsPlannedToTheByte) {
  Config config = bert_run("run");
  config.training.eval_interval = 0;
  config.training.steps = 1;
  config.parallel.tensor = 2;
  config.parallel.pipeline = 2;
  const Plan plan = make_plan(config);
  std::map<std::string, std::int64_t> planned;
  for (const auto& entry : plan.ranks[0].traffic)
    planned[entry.axis] += static_cast<std::int64_t>(entry.bytes);
  const auto records = train_all(config, 4);
  for (const auto& traffic : records.at(1).traffic)
    EXPECT_EQ(traffic.bytes, planned[traffic.axis]) << traffic.axis;
}

TEST_F(BertTraining, RefusesDataWithoutWhatItNeeds) {
  Config config = bert_run("run");
  const std::string prefix = config.data.path.front().second;
  const auto refuses = [&](const auto&... parts) {
    expect_error<Error>([&] { train(config, {}, Logger::silent()); }, parts...);
  };
  SpecialTokens tokens = special();
  tokens.mask = -1;
  write_record(prefix, tokens);
  refuses("[MASK]", "data.mask_id");
  config.data.mask_id = 4;
  config.training.steps = 1;
  train(config, {}, Logger::silent());  // its id is all that was missing

  std::filesystem::remove(dataset_record_path(prefix));
  config.logging.dir = (dir_ / "unknown").string();
  refuses("which tokens go on with the word", "data.tokenizer", "masking_do_full_word");
  config.data.masking_do_full_word = false;
  refuses("[CLS]", "data.cls_id");
  config.data.cls_id = 2;
  config.data.sep_id = 3;
  config.data.pad_id = 0;
  train(config, {}, Logger::silent());

  config = bert_run("run2");
  IndexedDatasetWriter writer((dir_ / "single").string(), DType::u16);
  for (int document = 0; document < 9; ++document)
    writer.add_document(std::vector<std::int32_t>{7, 8, 9, 10});
  writer.finish();
  config.data.path = {{1.0, (dir_ / "single").string()}};
  write_record(config.data.path.front().second, special());
  refuses("have fewer than 2 sentences", "--split-sentences");
}

TEST(BertConfig, RefusesKeysThatDoNotFit) {
  const auto refuses = [](const std::string& more, const auto&... parts) {
    expect_error<ConfigError>(
        [&] {
          parse_config(
              "model: {family: bert, num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 48, "
              "max_positions: 64}\n" +
                  more,
              "here");
        },
        parts...);
  };
  refuses("training: {seq_length: 4}\ndata: {path: d}", "training.seq_length (4) is too short", "[CLS]");
  refuses("training: {seq_length: 9}\ndata: {path: d}", "data.mask_prob (0.15) of the 6 tokens",
          "nothing would be masked");
  refuses("training: {seq_length: 16}\ndata: {mask_prob: 0}", "data.mask_prob must be above 0");
  refuses("training: {seq_length: 16}\ndata: {mask_prob: 1.0}", "data.mask_prob must be below 1");
  refuses("training: {seq_length: 16}\ndata: {short_seq_prob: 1.5}", "data.short_seq_prob");
  refuses("training: {seq_length: 16}\ndata: {masking_max_ngram: 0}", "data.masking_max_ngram");
  refuses("training: {seq_length: 16}\ndata: {mask_id: 48}", "data.mask_id (48)", "model.vocab_size (48)");
  refuses("training: {seq_length: 16}\ndata: {eod_mask_loss: true}", "eod_mask_loss",
          "ends of documents within a sample");
  refuses("training: {seq_length: 65}", "training.seq_length (65)", "model.max_positions");
}

}  // namespace
}  // namespace tessera
