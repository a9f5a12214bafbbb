/// Whole runs of T5 on sentences: interrupted and resumed, on every kind of layout; data that are refused.

#include <map>

#include "engine/run_data.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/indexed_writer.hpp"
#include "tessera/data/loader.hpp"
#include "tessera/data/t5_dataset.hpp"
#include "tessera/engine/plan.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;
using Records = std::map<std::int64_t, StepRecord>;

constexpr std::int32_t kVocab = 48;

struct T5Training : test::FolderTest {
  /// Sentences of ids 5 to 47, of which 40 to 47 go on with a word.
  std::string write_data() {
    const std::string prefix = (dir_ / "sentences").string();
    std::mt19937 generator(3);
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
    write_record(prefix, {.pad = 0, .continuations = {40, 41, 42, 43, 44, 45, 46, 47}});
    return prefix;
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

  Config t5_run(const std::string& name) {
    Config c = run_config(name, 0.1);
    c.model = ModelSettings{.family = {"t5"},
                            .num_layers = 4,
                            .hidden_size = 16,
                            .num_heads = 2,
                            .ffn_hidden_size = 24,
                            .vocab_size = 60,
                            .max_positions = 24,
                            .dropout = 0.1,
                            .attention_dropout = 0.1};
    c.training.seq_length = 22;
    c.training.decoder_seq_length = 10;
    c.training.steps = 8;
    c.training.eval_interval = 4;
    c.training.eval_iters = 2;
    c.checkpoint.every = 4;
    c.data.path = {{1.0, write_data()}};
    c.data.vocab_extra_ids = 8;
    return c;
  }
};

/// Lines of metrics.jsonl; rank 0 stops after step `stop`.
Records train_all(const Config& config, int ranks = 1, std::int64_t stop = 0) {
  Records records;
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

void expect_same(const Records& a, const Records& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [step, record] : a) {
    const StepRecord& other = b.at(step);
    EXPECT_NEAR(record.loss, other.loss, tolerance) << step;
    EXPECT_NEAR(record.grad_norm, other.grad_norm, 10 * tolerance) << step;
    ASSERT_EQ(record.eval_loss.has_value(), other.eval_loss.has_value());
    EXPECT_NEAR(record.eval_loss.value_or(0), other.eval_loss.value_or(0), tolerance);
  }
}

TEST_F(T5Training, GoesOnBitwise) {
  const Config whole = t5_run("whole"), broken = t5_run("broken");
  const Records reference = train_all(whole);
  ASSERT_EQ(reference.size(), 8u);
  EXPECT_LT(reference.at(8).loss, reference.at(1).loss);
  train_all(broken, 1, 6);  // two steps after the checkpoint are lost
  const Records rest = train_all(broken);
  ASSERT_EQ(rest.begin()->first, 5);
  expect_same(rest, Records(reference.find(5), reference.end()), 0.0);
}

TEST_F(T5Training, LayoutsSeeWhatOneProcessSees) {
  struct Layout {
    std::int64_t tensor, pipeline, data;
  };
  Config one = t5_run("one");
  one.checkpoint.resume = "none";
  const Records reference = train_all(one);
  for (const Layout& layout : {Layout{1, 1, 2}, Layout{2, 1, 1}, Layout{1, 2, 1}, Layout{2, 2, 1}}) {
    SCOPED_TRACE(testing::Message() << "tp " << layout.tensor << " pp " << layout.pipeline << " dp "
                                    << layout.data);
    Config config = one;
    config.parallel.tensor = layout.tensor;
    config.parallel.sequence = layout.tensor > 1 && layout.pipeline > 1;
    config.parallel.pipeline = layout.pipeline;
    config.parallel.data = layout.data;
    config.logging.dir = (dir_ / "layout").string();
    std::filesystem::remove_all(config.logging.dir);
    config.training.recompute = layout.pipeline > 1 ? Recompute::full : Recompute::none;
    expect_same(train_all(config, static_cast<int>(layout.tensor * layout.pipeline * layout.data)), reference,
                1e-5);
  }
}

/// The two data ranks' batches together are one rank's.
TEST_F(T5Training, DataRanksShareOutSamples) {
  const Config config = t5_run("run");
  const RunTokenizer tokenizer = tokenizer_of_run(config, Logger::silent());
  EXPECT_EQ(tokenizer.ids, 58);  // [BOS], [EOS] and eight sentinels
  EXPECT_EQ(tokenizer.special.bos, 48);
  EXPECT_EQ(tokenizer.special.sentinels, sentinels_between(50, 57));
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
  validate(all, 60);
  EXPECT_EQ(all.seq_length, 10);
  EXPECT_EQ(all.encoder_seq_length, 22);
  for (int rank = 0; rank < 2; ++rank) {
    const Batch part = load(rank, 2), same = slice(all, 2 * rank, 2);
    EXPECT_EQ(part.tokens, same.tokens);
    EXPECT_EQ(part.labels, same.labels);
    EXPECT_EQ(part.encoder_tokens, same.encoder_tokens);
    EXPECT_EQ(part.encoder_key_end, same.encoder_key_end);
  }
}

TEST_F(T5Training, IsPlannedToTheByte) {
  Config config = t5_run("run");
  config.training.eval_interval = 0;
  config.training.steps = 1;
  config.parallel.tensor = 2;
  config.parallel.pipeline = 2;
  const Plan plan = make_plan(config);
  std::map<std::string, std::int64_t> planned;
  for (const auto& entry : plan.ranks[0].traffic)
    planned[entry.axis] += static_cast<std::int64_t>(entry.bytes);
  const Records records = train_all(config, 4);
  for (const auto& traffic : records.at(1).traffic)
    EXPECT_EQ(traffic.bytes, planned[traffic.axis]) << traffic.axis;
}

TEST_F(T5Training, RefusesDataWithoutWhatItNeeds) {
  Config config = t5_run("run");
  config.training.steps = 1;
  const auto refuses = [&](const auto&... parts) {
    expect_error<Error>([&] { train(config, {}, Logger::silent()); }, parts...);
  };
  config.data.vocab_extra_ids = 0;
  refuses("<extra_id_0>", "data.vocab_extra_ids");
  config.data.vocab_extra_ids = 11;
  refuses("model.vocab_size is 60", "11 sentinels", "61 tokens");
  config.data.vocab_extra_ids = 0;
  config.data.sentinel_ids = {59, 50};
  refuses("[EOS]", "data.eos_id");
  config.data.eos_id = 4;
  train(config, {}, Logger::silent());  // [PAD] begins
}

TEST(T5Config, RefusesKeysThatDoNotFit) {
  const auto refuses = [](const std::string& more, const auto&... parts) {
    expect_error<ConfigError>(
        [&] {
          parse_config(
              "model: {family: t5, num_layers: 2, hidden_size: 8, num_heads: 2, vocab_size: 48, "
              "max_positions: 64}\n" +
                  more,
              "here");
        },
        parts...);
  };
  refuses("training: {seq_length: 3}\ndata: {path: d}", "training.seq_length (3) is too short");
  refuses("training: {seq_length: 8}\ndata: {path: d}", "data.mask_prob (0.15) of the 6 tokens",
          "nothing would be masked");
  refuses("training: {seq_length: 62, decoder_seq_length: 10}\ndata: {path: d}",
          "training.decoder_seq_length (10)", "no room for the 9 tokens");
  refuses("training: {seq_length: 22}\ndata: {eos_id: 48}", "data.eos_id (48)", "model.vocab_size (48)");
  refuses("training: {seq_length: 22}\ndata: {sentinel_ids: [40]}", "two ids, [FIRST, LAST], not 1");
  refuses("training: {seq_length: 22}\ndata: {sentinel_ids: [48, 40]}", "data.sentinel_ids (48)");
  refuses("training: {seq_length: 22}\ndata: {sentinel_ids: [40, 47], vocab_extra_ids: 3}", "give one");
  refuses("training: {seq_length: 22}\ndata: {reset_position_ids: true}", "ends of documents");
  expect_error<ConfigError>([] { parse_config("training: {decoder_seq_length: 5}", "here"); },
                            "training.decoder_seq_length is for models with an encoder and a decoder",
                            "gpt2");
}

}  // namespace
}  // namespace tessera
