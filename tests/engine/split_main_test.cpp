/// optimizer.split_main_weights: the same training in 16 bytes per parameter.

#include "tessera/engine/collect.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/state.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

Config config_of(bool split, const Overrides& layout = {}) {
  Config config = tiny_llama(0.1);
  config.model.num_heads = 4;
  config.model.ffn_hidden_size = 20;
  config.optimizer.lr = 1e-3;
  config.training.precision = Precision::bf16;
  config.optimizer.split_main_weights = split;
  config.training.seq_length = 8;
  config.training.global_batch_size = 8;
  config.training.micro_batch_size = 2;
  return with_overrides(config, layout);
}

Batch batch_of(unsigned step) { return random_batch(8, 8, 500 + step); }

/// Trains some steps; returns the losses.
std::vector<double> train(Engine& engine, unsigned first, unsigned last) {
  std::vector<double> losses;
  for (unsigned step = first; step < last; ++step) {
    const MeshCoordinates at = engine.mesh().coordinates();
    losses.push_back(engine.step(data_part(batch_of(step), at.dp, engine.mesh().shape().dp, 2)).loss);
  }
  return losses;
}

TEST(SplitMain, StepsAreThoseOfWholeMainWeights) {
  const auto whole = build_engine(config_of(false)), split = build_engine(config_of(true));
  EXPECT_EQ(whole_tensors(*split, false), whole_tensors(*whole, false));
  // No first weight is a tie, so the first gradients, and with them the first update, are the same.
  EXPECT_EQ(train(*split, 0, 1), train(*whole, 0, 1));
  EXPECT_EQ(whole_tensors(*split, false), whole_tensors(*whole, false));
  const std::vector<double> losses = train(*split, 1, 6), expected = train(*whole, 1, 6);
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]);
  std::int64_t matrices = 0;
  for (const ParamSlot& slot : split->params().slots()) {
    if (!slot.parameter->traits().reads_main) matrices += slot.parameter->shape().numel();
  }
  const auto saved = static_cast<std::int64_t>(whole->params().persistent_bytes()) -
                     static_cast<std::int64_t>(split->params().persistent_bytes());
  EXPECT_NEAR(static_cast<double>(saved), 2.0 * static_cast<double>(matrices),
              0.02 * static_cast<double>(saved));
}

TEST(SplitMain, LayoutsTrainAlike) {
  const Overrides layout = {"parallel.tensor=2", "parallel.sequence=true"};
  const auto serial = build_engine(config_of(true, {"parallel.data=1"}));
  const std::vector<double> expected = train(*serial, 0, 4);
  run_ranks(4, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config_of(true, layout), true, world);
    const std::vector<double> losses = train(*engine, 0, 4);
    for (std::size_t i = 0; i < losses.size(); ++i)
      EXPECT_NEAR(losses[i], expected[i], 2e-3 * expected[i]) << "step " << i;
    // Every rank reads what the owner of each share made of its main weights.
    for (const Parameter* p : engine->params().parameters()) {
      if (p->traits().reads_main) continue;
      const auto main = engine->params().weights().whole(*p).to_floats(), model = p->value().to_floats();
      for (std::size_t i = 0; i < main.size(); ++i) {
        const std::uint32_t rounded = (std::bit_cast<std::uint32_t>(main[i]) + 0x8000u) & 0xffff0000u;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(model[i]), rounded) << p->name() << " element " << i;
      }
    }
  });
}

class SplitMainState : public FolderTest {};

/// Checkpoints hold fp32 main weights: a run goes on from them with the setting or without.
TEST_F(SplitMainState, ARunGoesOnWithTheSettingOrWithoutIt) {
  for (const bool split : {false, true}) {
    const std::filesystem::path root = dir_ / (split ? "split" : "whole");
    WholeTensors weights;
    const auto source = build_engine(config_of(split));
    train(*source, 0, 3);
    save_engine(root, *source, {.step = 3, .consumed_samples = 24, .config = config_of(split)}, {});
    weights = whole_tensors(*source, false);
    const CheckpointReader reader(resolve_checkpoint(root));
    for (const char* name : {"adam_m.", "param."}) {
      const Manifest::Tensor* stored = reader.find(name + source->params().parameters()[0]->name());
      ASSERT_NE(stored, nullptr);
      EXPECT_EQ(stored->dtype, DType::f32);
    }
    std::vector<double> losses[2];
    for (const bool reads_split : {false, true}) {
      const auto other = build_engine(config_of(reads_split));
      load_engine(reader, *other);
      EXPECT_EQ(whole_tensors(*other, false), weights) << split << " to " << reads_split;
      other->progress().steps = 3;
      losses[reads_split] = train(*other, 3, 5);
    }
    EXPECT_EQ(losses[split], train(*source, 3, 5));
    for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(losses[0][i], losses[1][i], 1e-4 * losses[0][i]);
    run_ranks(4, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config_of(true, {"parallel.tensor=2"}), true, world);
      load_engine(reader, *engine);
      for (const Parameter* p : engine->params().parameters()) {
        const Tensor main = engine->params().weights().whole(*p);
        EXPECT_EQ(local_error(*p, main, weights.at(p->name())), 0.0) << p->name();
      }
    });
  }
}

/// What is exported, collected or handed to a tracker of weights is fp32, with every bit.
TEST(SplitMain, WeightsAreReadInFp32) {
  const auto engine = build_engine(config_of(true));
  train(*engine, 0, 2);
  const WholeTensors weights = whole_tensors(*engine, false);
  const auto expect_weights = [&](const WeightSource& source) {
    ASSERT_EQ(source.tensors().size(), weights.size());
    for (const TensorSpec& spec : source.tensors()) {
      EXPECT_EQ(spec.dtype, DType::f32);
      std::vector<float> values(static_cast<std::size_t>(spec.shape.numel()));
      source.read(spec.name, std::as_writable_bytes(std::span(values)));
      EXPECT_EQ(values, weights.at(spec.name)) << spec.name;
    }
  };
  expect_weights(weights_of(*engine));
  collect(*engine, Collected::weights, expect_weights);
}

}  // namespace
}  // namespace tessera::test
