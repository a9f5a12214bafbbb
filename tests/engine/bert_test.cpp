/// Bodies of families; what BERT reads and refuses. That it is Transformers' model: tests/parity.

#include "tessera/base/families.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/metrics.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/nn/bodies.hpp"
#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

using test::expect_error;

ModelConfig small(Family family) {
  return ModelSettings{.family = family,
                       .num_layers = 2,
                       .hidden_size = 16,
                       .num_heads = 2,
                       .ffn_hidden_size = 24,
                       .vocab_size = 31,
                       .max_positions = 12};
}

TEST(Bodies, EveryFamilyHasOneAndNamesNoOther) {
  for (const ModelSpec& row : families()) {
    const auto model = make_model(small(row.family), {});
    EXPECT_EQ(model->vocab_size(), 31) << row.name;
    EXPECT_FALSE(model->parameters().empty()) << row.name;
  }
  for (const Body& body : bodies()) {
    EXPECT_TRUE(std::ranges::any_of(families(), [&](const ModelSpec& row) { return row.body == body.name; }))
        << body.name;
  }
}

TEST(Bodies, RefuseWhatIsOfAnother) {
  ModelConfig config = small(Family::gpt2);
  config.token_types = 2;
  expect_error<ConfigError>([&] { make_model(config, {}); }, "model.token_types", "not of gpt2");
  config = small({"bert"});
  config.position_embedding = PositionKind::rotary;
  expect_error<ConfigError>([&] { make_model(config, {}); }, "learned positions");
  config = small({"megatron-bert"});
  config.activation = MlpActivation::swiglu;
  expect_error<ConfigError>([&] { make_model(config, {}); }, "no gate");
}

TEST(Bodies, RefuseSettingsThatNoneOfTheirBlocksReads) {
  const auto refused = [](const char* family, const char* setting, auto change) {
    ModelConfig config = small({family});
    change(config);
    expect_error<ConfigError>([&] { make_model(config, {}); }, detail::concat("model.", setting),
                              detail::concat("not of model.family ", family));
  };
  for (const char* family : {"bert", "t5", "megatron_t5"}) {
    refused(family, "qk_norm", [](ModelConfig& c) { c.qk_norm = QkNorm::head; });
    refused(family, "norm_placement", [](ModelConfig& c) { c.norm_placement = NormPlacement::sandwich; });
    refused(family, "norm_bias", [](ModelConfig& c) { c.norm_bias = c.norm != NormStyle::layernorm; });
    refused(family, "embedding_scaled", [](ModelConfig& c) { c.embedding_scaled = true; });
    refused(family, "attention_scale", [](ModelConfig& c) { c.attention_scale = 0.5; });
    refused(family, "attention_softcap", [](ModelConfig& c) { c.attention_softcap = 20.0; });
    refused(family, "window_pattern", [](ModelConfig& c) { c.window_pattern = "SF"; });
  }
  for (const char* family : {"llama", "bert"}) {
    refused(family, "relative_buckets", [](ModelConfig& c) { c.relative_buckets = 8; });
    refused(family, "scaled_head", [](ModelConfig& c) { c.scaled_head = true; });
    refused(family, "position_embedding: relative",
            [](ModelConfig& c) { c.position_embedding = PositionKind::relative; });
  }
}

Config bert_config(bool pairs) {
  Config config = test::tiny_config();
  config.model = small({"bert"});
  config.model.binary_head = pairs;
  return config;
}

Batch bert_batch() {
  Batch batch = test::random_batch(4, 11, 3, 31);
  batch.token_types.assign(batch.tokens.size(), 1);
  batch.sample_labels = {0, 1, 1, -100};
  return batch;
}

TEST(Bert, ReportsBothOfItsLosses) {
  const auto engine = build_engine(bert_config(true));
  const StepReport report = engine->step(bert_batch());
  ASSERT_EQ(report.terms.size(), 2u);
  EXPECT_EQ(report.terms[0].name, "token");
  EXPECT_EQ(report.terms[1].name, "nsp");
  EXPECT_EQ(report.terms[1].count, 3);
  EXPECT_DOUBLE_EQ(report.loss, report.terms[0].mean() + report.terms[1].mean());
  Batch unlabelled = bert_batch();
  unlabelled.sample_labels.assign(4, -100);
  EXPECT_EQ(engine->step(unlabelled).terms[1].mean(), 0.0);
}

class BertRun : public test::FolderTest {};

TEST_F(BertRun, MetricsNameEachLoss) {
  MetricsFile file(dir_ / "metrics.jsonl", 0);
  file.write({.step = 1, .loss = 3, .losses = {{"token", 2}, {"nsp", 1}}});
  EXPECT_NE(test::slurp(dir_ / "metrics.jsonl").find("\"token_loss\":2,\"nsp_loss\":1"), std::string::npos);
}

TEST(Bert, RefusesBatchesItCannotRead) {
  const auto engine = build_engine(bert_config(true));
  Batch batch = bert_batch();
  batch.sample_labels.clear();
  expect_error<InvalidArgument>([&] { engine->forward_backward(batch); }, "'nsp'", "sample_labels");
  batch = bert_batch();
  batch.token_types[12] = 2;
  expect_error<DataError>([&] { engine->forward_backward(batch); }, "sample 1, position 1", "token type 2");
  expect_error<InvalidArgument>([&] { engine->model().check_generates(8); }, "both sides");
  const auto masked = build_engine(bert_config(false));
  expect_error<InvalidArgument>([&] { masked->forward_backward(bert_batch()); }, "no head for whole samples");
  batch.sample_labels.clear();
  batch.token_types.clear();  // all of type 0
  EXPECT_EQ(masked->step(batch).terms.size(), 1u);
}

Config classes_config() {
  Config config = bert_config(false);
  config.model.num_labels = 3;
  return config;
}

Batch classes_batch() {
  Batch batch = bert_batch();
  batch.labels.clear();
  batch.sample_labels = {0, 2, 1, -100};
  return batch;
}

TEST(Bert, ClassifiesSamples) {
  const auto engine = build_engine(classes_config());
  const Batch batch = classes_batch();
  EXPECT_EQ(engine->forward(batch, Engine::Output::logits, false).output.shape(), Shape({4, 3}));
  const Tensor losses = engine->forward(batch, Engine::Output::token_losses, false).output;
  ASSERT_EQ(losses.shape(), Shape({4}));
  const std::vector<float> each = losses.to_floats();
  EXPECT_EQ(each[3], 0.0f);
  const StepReport report = engine->step(batch);
  ASSERT_EQ(report.terms.size(), 1u);
  EXPECT_EQ(report.terms[0].name, "class");
  EXPECT_EQ(report.terms[0].count, 3);
  EXPECT_NEAR(report.loss, (each[0] + each[1] + each[2]) / 3, 1e-5);
}

TEST(Bert, RefusesWhatAClassifierCannotRead) {
  const auto engine = build_engine(classes_config());
  expect_error<InvalidArgument>([&] { engine->step(bert_batch()); }, "labels of tokens", "no head");
  Batch batch = classes_batch();
  batch.sample_labels[2] = 3;
  expect_error<DataError>([&] { engine->step(batch); }, "sample 2", "3 is not in [0, 3)");
  batch.sample_labels.clear();
  expect_error<InvalidArgument>([&] { engine->step(batch); }, "no sample_labels");
  batch.sample_labels.assign(4, -100);
  expect_error<DataError>([&] { engine->step(batch); }, "no label of this batch counts");
  Config both = classes_config();
  both.model.binary_head = true;
  expect_error<ConfigError>([&] { build_engine(both); }, "not both");
  const auto masked = build_engine(bert_config(false));
  batch = bert_batch();
  batch.sample_labels.clear();
  expect_error<InvalidArgument>([&] { masked->forward(batch, Engine::Output::sample_logits); },
                                "logits of whole samples");
}

TEST(Bert, ACorpusHasNoClasses) {
  expect_error<ConfigError>([] { refuse_without_data(classes_config().model, "tessera train"); },
                            "model.num_labels", "tessera train does not take a classifier");
  refuse_without_data(bert_config(true).model, "tessera train");
}

TEST_F(BertRun, AClassifierBeginsWithTheWeightsOfAnotherHead) {
  const auto trained = build_engine(bert_config(false));
  trained->step([] {
    Batch batch = bert_batch();
    batch.sample_labels.clear();
    return batch;
  }());
  export_hf(dir_ / "masked", architecture_of(bert_config(false).model), weights_of(*trained), {});
  const auto engine = build_engine(classes_config());
  const WeightFit fit = load_pretrained(dir_ / "masked", classes_config().model, *engine);
  EXPECT_EQ(fit.drawn, (std::vector<std::string>{"bert.pooler.dense.weight", "bert.pooler.dense.bias",
                                                 "classifier.weight", "classifier.bias"}));
  EXPECT_EQ(fit.dropped.size(), 5u);  // cls.predictions
  const auto table = [](Engine& of) {
    for (const Parameter* each : of.params().parameters()) {
      if (each->name() == "decoder.layers.1.mlp.linear_fc1.weight")
        return of.params().weights().main(*each).to_floats();
    }
    return std::vector<float>();
  };
  EXPECT_EQ(table(*engine), table(*trained));
  Config wider = classes_config();
  wider.model.num_labels = 4;
  export_hf(dir_ / "classes", architecture_of(classes_config().model), weights_of(*engine), {});
  const auto other = build_engine(wider);
  expect_error<CheckpointError>([&] { load_pretrained(dir_ / "classes", wider.model, *other); },
                                "model.num_labels: 3 there, 4 here");
}

TEST(Bert, LogitsOfSamplesBesideThoseOfTokens) {
  const auto engine = build_engine(bert_config(true));
  const Batch batch = bert_batch();
  EXPECT_EQ(engine->forward(batch, Engine::Output::sample_logits, false).output.shape(), Shape({4, 2}));
  EXPECT_EQ(engine->forward(batch, Engine::Output::logits, false).output.shape(), Shape({4, 11, 31}));
}

TEST(MicroBatch, KnowsTheRowsOfLabelsThatCount) {
  const ExecCtx ctx = ExecCtx::cpu(1);
  Batch batch{.batch = 2, .seq_length = 100};
  batch.tokens.assign(200, 1);
  EXPECT_FALSE(to_micro_batch(ctx, batch).labelled);  // there are none
  batch.labels = batch.tokens;
  EXPECT_FALSE(to_micro_batch(ctx, batch).labelled);  // all count
  std::fill(batch.labels.begin(), batch.labels.end(), kIgnoredLabel);
  EXPECT_EQ(to_micro_batch(ctx, batch).labelled.rows.numel(), 32);                       // none counts
  for (int i = 0; i < 40; ++i) batch.labels[static_cast<std::size_t>(100 + 2 * i)] = i;  // of sample 1
  const LabelledRows some = to_micro_batch(ctx, batch).labelled;
  const std::vector<std::int32_t> rows = some.rows.to_vector<std::int32_t>(),
                                  labels = some.labels.to_vector<std::int32_t>(),
                                  places = some.places.to_vector<std::int32_t>();
  ASSERT_EQ(rows.size(), 64u);  // 40, and 24 that fill up
  ASSERT_EQ(places.size(), 200u);
  int counted = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(i == 0 || rows[i] > rows[i - 1]);
    EXPECT_EQ(places[static_cast<std::size_t>(rows[i])], static_cast<std::int32_t>(i));
    const auto sample = static_cast<std::size_t>(rows[i] % 2),
               position = static_cast<std::size_t>(rows[i] / 2);
    EXPECT_EQ(labels[i], batch.labels[sample * 100 + position]);
    counted += labels[i] == kIgnoredLabel ? 0 : 1;
  }
  EXPECT_EQ(counted, 40);
  EXPECT_EQ(std::count(places.begin(), places.end(), -1), 136);
  std::fill(batch.labels.begin(), batch.labels.begin() + 100, 3);
  EXPECT_FALSE(to_micro_batch(ctx, batch).labelled);  // 140 of 200
}

/// What half of the labels teach is what they teach one sample at a time, whichever way the head is computed.
TEST(MicroBatch, LosesNoLabel) {
  Config config = bert_config(false);
  Batch batch = bert_batch();
  batch.sample_labels.clear();
  const std::int64_t rows = batch.batch * batch.seq_length;
  for (std::int64_t i = 0; i < rows; ++i)
    batch.labels[static_cast<std::size_t>(i)] = i % 9 == 4 ? 7 : kIgnoredLabel;
  ASSERT_TRUE(to_micro_batch(ExecCtx::cpu(1), batch).labelled) << rows;
  const auto engine = build_engine(config);
  const auto logits = engine->forward(batch, Engine::Output::logits, false).output.to_floats();
  const auto losses = engine->forward(batch, Engine::Output::token_losses, false).output.to_floats();
  ASSERT_EQ(losses.size(), static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < losses.size(); ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 31; ++j) sum += std::exp(static_cast<double>(logits[i * 31 + j]));
    const double expected =
        batch.labels[i] == kIgnoredLabel ? 0 : std::log(sum) - static_cast<double>(logits[i * 31 + 7]);
    EXPECT_NEAR(losses[i], expected, 1e-5) << i;
  }
}

}  // namespace
}  // namespace tessera
