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
  return resolve(ModelConfig{.family = family,
                             .num_layers = 2,
                             .hidden_size = 16,
                             .num_heads = 2,
                             .ffn_hidden_size = 24,
                             .vocab_size = 31,
                             .max_positions = 12});
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

}  // namespace
}  // namespace tessera
