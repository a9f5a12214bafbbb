/// What an engine can do besides training steps, on several ranks: the caller's own loss, discard,
/// evaluation, skipped steps, generation.

#include <limits>

#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

using namespace edge;

/// A number for each element of an output, the same whatever rank computes it.
float weight_of(std::int64_t sample, std::int64_t i) {
  return static_cast<float>((sample * 131 + i * 17) % 29 - 14) / 29.0f;
}

/// Loss = sum of output x weight over the whole batch, divided by the data ranks' number as Engine::backward
/// averages.
Body own_loss(Engine::Output output) {
  return [output](Engine& engine) {
    std::vector<double> numbers;
    for (unsigned step = 0; step < 2; ++step) {
      if (step > 0) numbers.push_back(engine.update().grad_norm);
      const Batch whole = random_batch(8, kSeq, 60 + step, kVocab);
      const Batch own = own_part(engine, whole);
      OpenForward forward = engine.forward(own, output);
      const Tensor& value = forward.output;
      std::vector<double> sum{0.0};
      Tensor upstream;
      if (value) {
        const std::int64_t width = value.numel() / own.batch;
        std::vector<float> gradient = value.to_floats();
        for (std::int64_t i = 0; i < value.numel(); ++i) {
          const float weight = weight_of(global_sample(own, i / width), i % width);
          float& v = gradient[static_cast<std::size_t>(i)];
          sum[0] += static_cast<double>(v) * weight;
          v = weight * static_cast<float>(engine.mesh().shape().dp);
        }
        upstream = Tensor::from(engine.ctx(), gradient, value.shape());
        if (const auto& at = engine.mesh().coordinates(); at.tp + at.cp > 0) sum[0] = 0;
      }
      forward.backward(upstream);
      const Tensor total = Tensor::from(engine.ctx(), sum, {1});
      engine.mesh().world().all_reduce(engine.ctx(), total).wait(engine.ctx());
      numbers.push_back(total.to_vector<double>()[0]);
    }
    return numbers;
  };
}

TEST(LayoutEngine, TheCallersOwnLoss) {
  for (const auto output : {Engine::Output::logits, Engine::Output::token_losses}) {
    const Body body = own_loss(output);
    for (const Family family : {Family::gpt2, Family::llama}) {
      expect_serial(edge_config(family, kTp2), 2, body);
      expect_serial(edge_config(family, kTp2Sp), 2, body);
      expect_serial(edge_config(family, kPp2), 2, body);
      expect_serial(edge_config(family, kZbV), 2, body);
      expect_serial(edge_config(family, {"parallel.data=2"}), 2, body);
      expect_serial(edge_config(family, kAll), 8, body);
      expect_serial(edge_config(family, kCp2), 2, body);
      expect_serial(edge_config(family, kCp2 + Overrides{"parallel.data=2", "parallel.tensor=2"}), 8, body);
    }
    expect_serial(edge_config(Family::gpt2, {"parallel.pipeline=2", "parallel.schedule=interleaved",
                                             "parallel.virtual_stages=2", "training.recompute=full"}),
                  2, body);
    expect_serial(edge_config(Family::gpt2, {"parallel.pipeline=3", "parallel.schedule=zb-h1"}), 3, body);
  }
}

TEST(LayoutEngine, WhatWasDiscardedLeavesNothing) {
  const Body body = [](Engine& engine) {
    const Batch whole = random_batch(8, kSeq, 50, kVocab);
    std::vector<double> numbers;
    // Serial runs skip these two: they must leave no trace.
    if (engine.mesh().world().size() > 1) {
      engine.forward_backward(own_part(engine, whole), 3.0);
      engine.discard();
      engine.forward(own_part(engine, whole), Engine::Output::logits);
      engine.discard();
    }
    numbers.push_back(engine.forward_backward(own_part(engine, whole)));
    numbers.push_back(engine.update().grad_norm);
    numbers.push_back(engine.forward_backward(own_part(engine, whole)));
    return numbers;
  };
  for (const Overrides& layout : {kTp2, kPp2, kZbV, Overrides{"parallel.data=2"}})
    expect_serial(edge_config(Family::gpt2, layout), 2, body);
  expect_serial(edge_config(Family::llama, kAll), 8, body);
}

TEST(LayoutEngine, EvaluationEqualsTheSerialRun) {
  const Body body = [](Engine& engine) {
    const Batch whole = padded_and_packed(40);
    std::vector<double> numbers{engine.evaluate(own_part(engine, whole))};
    engine.step(own_part(engine, random_batch(8, kSeq, 41, kVocab)));
    const LossTerm sum = engine.evaluate_terms(own_part(engine, whole)).at(0);
    numbers.insert(numbers.end(), {engine.evaluate(own_part(engine, whole)), sum.sum, sum.count});
    return numbers;
  };
  expect_serial(edge_config(Family::gpt2, kAll), 8, body);
  expect_serial(edge_config(Family::llama, {"parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2",
                                            "parallel.schedule=zb-v"}),
                8, body);
  expect_serial(edge_config(Family::llama, kCp2 + kAll), 16, body);
  Config uneven = edge_config(Family::gpt2, kZbV);
  uneven.training.micro_batch_size = 3;
  expect_serial(uneven, 2, body);
}

TEST(LayoutEngine, AGradientThatIsNotFiniteOnOneRankSkipsTheStepOnAll) {
  for (const char* zero : {"parallel.zero_stage=0", "parallel.zero_stage=1"}) {
    const Config config = edge_config(Family::llama, kAll + Overrides{zero});
    for (const int culprit : {0, 3, 6}) {
      std::atomic<int> skipped = 0;
      run_ranks(8, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
        const auto engine = build_engine(config, true, world);
        const Batch own = own_part(*engine, random_batch(8, kSeq, 30, kVocab));
        const WholeTensors before = whole_tensors(*engine, false);
        const double loss = engine->forward_backward(own);
        if (world->rank() == culprit) {
          // Elements only this rank counts in the norm: of a linear layer.
          for (const Parameter* p : engine->params().parameters()) {
            if (!p->name().ends_with("linear_fc2.weight")) continue;
            const ParamSlot& slot = engine->params().slots()[engine->params().layout().index_of(*p)];
            const Range own_run = overlap(slot.run(), engine->params().shards().share(slot.bucket));
            if (own_run.count > 0) {
              test::edit(engine->params().gradient().latest_call().on_device().narrow(0, own_run.begin, 1),
                         [](auto& grad) { grad[0] = std::numeric_limits<float>::infinity(); });
            }
          }
        }
        const UpdateResult result = engine->update();
        EXPECT_TRUE(result.skipped) << "rank " << world->rank();
        EXPECT_FALSE(std::isfinite(result.grad_norm));
        EXPECT_EQ(engine->progress().skipped, 1);
        EXPECT_EQ(whole_tensors(*engine, false), before);
        skipped += result.skipped ? 1 : 0;
        const UpdateResult next = engine->step(own).update;
        EXPECT_FALSE(next.skipped);
        EXPECT_TRUE(std::isfinite(loss));
      });
      EXPECT_EQ(skipped, 8) << zero << ", rank " << culprit;
    }
  }
}

TEST(LayoutEngine, EnginesShareAMesh) {
  const Config config = edge_config(
      Family::gpt2, kTp2 + Overrides{"parallel.data=2", "parallel.zero_stage=3", "device.type=cpu"});
  run_local(4, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto losses_on = [&](std::shared_ptr<ProcessMesh> mesh) {
      const auto engine = build_engine(config, true, world, {}, {}, mesh);
      if (mesh) {
        EXPECT_EQ(&engine->mesh(), mesh.get());
      }
      const Batch own = own_part(*engine, random_batch(8, kSeq, 7, kVocab));
      const double first = engine->step(own).loss;
      return std::pair(first, engine->step(own).loss);
    };
    const auto mesh = std::make_shared<ProcessMesh>(world, MeshShape{.tp = 2, .dp = 2});
    const auto expected = losses_on(nullptr);
    EXPECT_EQ(losses_on(mesh), expected);
    EXPECT_EQ(losses_on(mesh), expected);
    const auto other = std::make_shared<ProcessMesh>(world, MeshShape{.dp = 4});
    expect_error<InvalidArgument>([&] { losses_on(other); }, "the mesh given is not that");
  });
}

TEST(LayoutEngine, NamesOfAllStagesCountForNoDecay) {
  run_ranks(2, {.timeout_s = 60}, [](std::shared_ptr<Communicator> world) {
    Config config = edge_config(Family::gpt2, kPp2);
    config.optimizer.no_decay = {"decoder.layers.0.*", "decoder.layers.3.*"};  // one of each stage
    build_engine(config, true, world);
    config.optimizer.no_decay.emplace_back("decoder.layers.4.*");
    expect_error<ConfigError>([&] { build_engine(config, true, world); }, "optimizer.no_decay",
                              "\"decoder.layers.4.*\" matches no parameter");
  });
}

}  // namespace
}  // namespace tessera::test
