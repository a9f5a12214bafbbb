/// Bodies of families; what BERT reads and refuses. That it is Transformers' model: tests/parity.

#include "tessera/base/families.hpp"
#include "tessera/engine/metrics.hpp"
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
  expect_error<InvalidArgument>([&] { engine->model().make_cache(engine->ctx(), 1, 8); }, "both sides");
  const auto masked = build_engine(bert_config(false));
  expect_error<InvalidArgument>([&] { masked->forward_backward(bert_batch()); }, "no head for whole samples");
  batch.sample_labels.clear();
  batch.token_types.clear();  // all of type 0
  EXPECT_EQ(masked->step(batch).terms.size(), 1u);
}

}  // namespace
}  // namespace tessera
