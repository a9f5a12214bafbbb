/// Gradients that wait for their factor, several forwards, a loss asked micro-batch by micro-batch, batches
/// that do not divide, and whole weights on rank 0: on several ranks against one.

#include "tessera/engine/collect.hpp"
#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

using namespace edge;

const Overrides kDp2{"parallel.data=2"}, kDp2Zero0{"parallel.data=2", "parallel.zero_stage=0"},
    kDp2Zero2{"parallel.data=2", "parallel.zero_stage=2"},
    kDp2Zero3{"parallel.data=2", "parallel.zero_stage=3"}, kZero3{"parallel.zero_stage=3"},
    kInterleaved{"parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"};

/// Samples [begin, end) of `whole` that this data rank has, in one run, parts as even as possible.
Batch contiguous_part(const Engine& engine, const Batch& whole) {
  const Part part = part_of(whole.batch, engine.mesh().coordinates().dp, engine.mesh().shape().dp);
  Batch own = slice(whole, part.begin, part.count);
  own.global_batch = whole.batch;
  return own;
}

TEST(LayoutCalls, FactorsCanComeLaterAndInAnyOrder) {
  const Body body = [](Engine& engine) {
    const Batch first = own_part(engine, random_batch(8, kSeq, 1, kVocab));
    const Batch second = own_part(engine, random_batch(8, kSeq, 2, kVocab));
    std::vector<double> numbers;
    if (engine.mesh().world().size() == 1) {  // what the calls below amount to
      const double one = engine.forward_backward(first, 0.5);
      numbers = {one, engine.forward_backward(second, -2.0)};
      engine.forward_backward(first, 0.0);
      numbers.push_back(engine.update().grad_norm);
      engine.forward_backward(second, 3.0);
      return numbers;
    }
    OpenCall a = engine.open_call(first), b = engine.open_call(second);
    engine.open_call(first);  // and dropped
    b.add(-2.0);
    a.add(0.5);
    expect_error<InvalidArgument>([&] { a.add(); }, "added before");
    numbers = {a.loss(), b.loss(), engine.update().grad_norm};
    OpenCall stale = engine.open_call(first), last = engine.open_call(second);
    last.add(3.0);
    engine.params().gradient().forget();
    engine.open_call(second).add(3.0);
    stale = {};
    return numbers;
  };
  Config config = edge_config(Family::gpt2, {});
  for (const Overrides& layout : {kDp2, kDp2Zero0, kDp2Zero2, kDp2Zero3, kTp2Sp, kPp2, kInterleaved, kZbV}) {
    config = edge_config(Family::gpt2, layout);
    // The steps' samples are counted differently on the two ways.
    config.model.dropout = config.model.attention_dropout = 0;
    expect_serial(config, 2, body);
  }
}

TEST(LayoutCalls, AnUpdateForgetsWhatWasComputedBeforeIt) {
  const auto engine = build_engine(edge_config(Family::gpt2, {}));
  const Batch batch = random_batch(2, kSeq, 1, kVocab);
  OpenCall call = engine->open_call(batch);
  OpenForward forward = engine->forward(batch, Engine::Output::logits);
  engine->forward_backward(batch);
  engine->update();
  expect_error<InvalidArgument>([&] { call.add(); }, "update() was called");
  expect_error<InvalidArgument>([&] { forward.backward(forward.output); }, "since the last update()");
  call = {};
  engine->step(batch);
}

TEST(LayoutCalls, WhatIsOpenMayOutliveItsEngine) {
  const Batch batch = random_batch(2, kSeq, 1, kVocab);
  OpenCall call;
  OpenForward forward, copy;
  {
    const auto engine = build_engine(edge_config(Family::gpt2, {}));
    call = engine->open_call(batch);
    copy = forward = engine->forward(batch, Engine::Output::logits);
  }
  expect_error<InvalidArgument>([&] { call.add(); }, "added before");
  expect_error<InvalidArgument>([&] { copy.backward(forward.output); }, "an engine that is still there");
}

/// The mean over this data rank's samples of squares of their logits, of two forwards out of three.
Body squares_of_logits(std::int64_t samples) {
  return [samples](Engine& engine) {
    engine.set_micro_batches(3);
    std::vector<OpenForward> forwards;
    std::int64_t own = 0;
    for (unsigned i = 0; i < 3; ++i) {
      const Batch batch = contiguous_part(engine, random_batch(samples, kSeq, 10 + i, kVocab));
      own = batch.batch;
      forwards.push_back(engine.forward(batch, Engine::Output::logits));
    }
    forwards[1] = {};
    for (const std::size_t i : {2u, 0u}) {
      Tensor upstream;
      const Tensor& output = forwards[i].output;
      if (output && own > 0) {
        std::vector<float> values = output.to_floats();
        for (float& v : values) v /= static_cast<float>(8 * own);
        upstream = Tensor::from(engine.ctx(), values, output.shape());
      }
      forwards[i].backward(upstream);
    }
    return std::vector<double>{};
  };
}

TEST(LayoutCalls, SeveralForwardsEachWithItsBackward) {
  for (const Overrides& layout : {kDp2, kDp2Zero2, kDp2Zero3, kTp2, kPp2, kZbV, kCp2})
    expect_serial(edge_config(Family::llama, layout), 2, squares_of_logits(8));
  for (const Overrides& more : {Overrides{}, kZero3})
    expect_serial(edge_config(Family::gpt2, kAll + more), 8, squares_of_logits(8));
}

TEST(LayoutCalls, ALossOnLogitsCountsEachSampleOfADataRankAlike) {
  for (const std::int64_t samples : {1, 5}) {
    for (const Overrides& layout : {kDp2, kDp2Zero0, kDp2Zero3})
      expect_serial(edge_config(Family::gpt2, layout), 2, squares_of_logits(samples));
    expect_serial(edge_config(Family::llama, kAll), 8, squares_of_logits(samples));
    expect_serial(edge_config(Family::llama, kCp2 + kDp2Zero3), 4, squares_of_logits(samples));
  }
}

/// Loss of a micro-batch: the mean over its samples of squares of its outputs, weighted by the sample.
Body asked_loss(Engine::Output output, std::int64_t samples_of_all) {
  return [output, samples_of_all](Engine& engine) {
    engine.set_micro_batches(samples_of_all == 8 ? 0 : 2);
    const Batch own = contiguous_part(engine, random_batch(samples_of_all, kSeq, 20, kVocab));
    double sum = 0;
    const auto loss = [&](int, const Part& samples, const Tensor& value) {
      std::vector<float> values = value.to_floats();
      const std::int64_t width = value.numel() / samples.count;
      for (std::int64_t i = 0; i < value.numel(); ++i) {
        const float weight = static_cast<float>(global_sample(own, samples.begin + i / width) + 1);
        float& v = values[static_cast<std::size_t>(i)];
        sum += static_cast<double>(v) * v * weight;
        v = 2 * v * weight / static_cast<float>(samples.count);
      }
      return Tensor::from(engine.ctx(), values, value.shape());
    };
    engine.open_call(own, output, loss).add(0.25);
    if (const auto& at = engine.mesh().coordinates(); at.tp + at.cp > 0) sum = 0;
    const Tensor total = Tensor::from(ExecCtx::cpu(1), std::vector<double>{sum}, {1});
    engine.mesh().world().all_reduce(ExecCtx::cpu(1), total).wait(ExecCtx::cpu(1));
    return std::vector<double>{total.to_vector<double>()[0]};
  };
}

TEST(LayoutCalls, TheCallersLossMicroBatchByMicroBatch) {
  for (const auto output : {Engine::Output::logits, Engine::Output::token_losses}) {
    for (const std::int64_t samples : {8, 5, 1}) {
      const Body body = asked_loss(output, samples);
      for (const Overrides& layout : {kDp2, kDp2Zero2, kDp2Zero3, kTp2Sp, kPp2, kInterleaved, kZbV, kCp2})
        expect_serial(edge_config(Family::gpt2, layout), 2, body);
      expect_serial(edge_config(Family::llama, kAll), 8, body);
    }
  }
}

TEST(LayoutCalls, BatchesThatDivideNeitherByDataRanksNorByMicroBatches) {
  for (const std::int64_t samples : {1, 2, 5, 7}) {
    const Body body = [samples](Engine& engine) {
      engine.set_micro_batches(4);
      std::vector<double> numbers;
      for (unsigned i = 0; i < 2; ++i) {
        const Batch own = contiguous_part(engine, random_batch(samples, kSeq, 30 + i, kVocab));
        if (i > 0) numbers.push_back(engine.update().grad_norm);
        numbers.push_back(engine.forward_backward(own));
        numbers.push_back(engine.evaluate(own));
      }
      return numbers;
    };
    for (const Overrides& layout : {kDp2, kDp2Zero0, kDp2Zero2, kDp2Zero3, kPp2, kInterleaved, kZbV})
      expect_serial(edge_config(Family::gpt2, layout), 2, body);
    for (const Overrides& more : {Overrides{}, kZero3})
      expect_serial(edge_config(Family::llama, kAll + more), 8, body);
  }
}

TEST(LayoutCalls, RankZeroCollectsWholeWeightsAndGradients) {
  const Batch whole = random_batch(8, kSeq, 40, kVocab);
  const auto values_of = [](Engine& engine, Collected what) {
    std::map<std::string, std::vector<float>> values;
    collect(engine, what, [&](const WeightSource& source) {
      for (const TensorSpec& spec : source.tensors()) {
        std::vector<float>& own = values[spec.name];
        own.resize(static_cast<std::size_t>(spec.shape.numel()));
        source.read(spec.name, std::as_writable_bytes(std::span(own)));
      }
    });
    return values;
  };
  for (const Family family : {Family::gpt2, Family::llama}) {
    const Overrides layout = family == Family::gpt2 ? kAll : kAll + kZero3;
    const auto serial = build_engine(edge_config(family, {}));
    serial->forward_backward(whole, 0.5);
    const auto weights = values_of(*serial, Collected::weights),
               gradients = values_of(*serial, Collected::gradients);
    EXPECT_EQ(weights.size(), serial->params().parameters().size());
    run_local(8, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(edge_config(family, layout), true, world);
      engine->forward_backward(own_part(*engine, whole), 0.5);
      const auto own = values_of(*engine, Collected::weights),
                 grads = values_of(*engine, Collected::gradients);
      const auto fails = [&] {
        collect(*engine, Collected::weights, [](const WeightSource&) { throw DataError("disk full"); });
      };
      if (world->rank() == 0) expect_error<DataError>(fails, "disk full");
      if (world->rank() > 0) expect_error<CommunicationError>(fails, "rank 0 failed", "disk full");
      if (world->rank() > 0) {
        EXPECT_TRUE(own.empty() && grads.empty());
        return;
      }
      EXPECT_EQ(own, weights);
      for (const auto& [name, expected] : gradients) {
        float largest = 0, error = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          largest = std::max(largest, std::abs(expected[i]));
          error = std::max(error, std::abs(grads.at(name)[i] - expected[i]));
        }
        EXPECT_LE(error, 1e-5f * largest) << name;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::test
