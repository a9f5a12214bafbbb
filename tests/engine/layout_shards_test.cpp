/// ZeRO stages 2 and 3 beyond what the layout matrix asks: the bits of stage 1, bytes sent, memory, data
/// ranks without samples, what is frozen, and mistakes that must be seen.

#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test::edge {
namespace {

/// All weights and losses after three steps of one micro-batch per data rank. Without clipping: norms are
/// added up bucket by bucket, and buckets are not the same.
struct Trained {
  std::vector<double> losses, norms;
  WholeTensors weights;
};

void expect_bits(const Trained& a, const Trained& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_TRUE(a.weights == b.weights) << what;
  ASSERT_EQ(a.norms.size(), b.norms.size());
  for (std::size_t i = 0; i < a.norms.size(); ++i)
    EXPECT_NEAR(a.norms[i], b.norms[i], 1e-12 * b.norms[i]) << what;
}

Trained train_bits(const Overrides& overrides, int ranks) {
  Config config = edge_config(Family::gpt2, overrides);
  config.training.micro_batch_size = 4;
  config.optimizer.clip_grad = 0;
  std::map<int, Trained> of;
  std::mutex mutex;
  run_local(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    Trained trained;
    for (unsigned i = 0; i < 3; ++i) {
      const StepReport report = engine->step(own_part(*engine, random_batch(8, kSeq, 60 + i, kVocab)));
      trained.losses.push_back(report.loss);
      trained.norms.push_back(report.update.grad_norm);
    }
    trained.weights = whole_tensors(*engine, false);
    const std::lock_guard lock(mutex);
    of[world->rank()] = std::move(trained);
  });
  Trained all;
  for (auto& [rank, trained] : of) {
    all.losses.insert(all.losses.end(), trained.losses.begin(), trained.losses.end());
    all.norms.insert(all.norms.end(), trained.norms.begin(), trained.norms.end());
    for (auto& [name, values] : trained.weights) all.weights[std::to_string(rank) + name] = std::move(values);
  }
  return all;
}

Overrides stage(int zero) { return {"parallel.zero_stage=" + std::to_string(zero)}; }

TEST(LayoutShards, StagesTwoAndThreeTrainTheBitsOfStageOne) {
  if (on_cuda()) GTEST_SKIP() << "NCCL adds in an order of its own";
  const Overrides layouts[] = {
      {"parallel.data=2"},
      {"parallel.data=2", "training.precision=bf16"},
      {"parallel.data=2", "training.precision=bf16", "optimizer.split_main_weights=true"},
      {"parallel.data=2", "training.precision=fp16", "training.initial_loss_scale=1024"},
      {"parallel.data=2", "training.recompute=full", "training.recompute_layers=2"}};
  for (const Overrides& layout : layouts) {
    const Trained one = train_bits(layout + stage(1), 2);
    for (const int zero : {2, 3}) expect_bits(train_bits(layout + stage(zero), 2), one, layout.back());
    expect_bits(train_bits(layout + stage(3) + Overrides{"parallel.zero_reshard=never"}, 2), one, "never");
  }
  expect_bits(train_bits(kAll + stage(3), 8), train_bits(kAll + stage(1), 8), "tp2_sp_pp2_dp2");
}

/// Bytes that leave a data rank in a step of `micro_batches` micro-batches.
struct Sent {
  std::int64_t dp = 0, gather = 0;
};

Sent bytes_sent(const Overrides& overrides, int ranks, std::int64_t micro_batches) {
  Config config = edge_config(Family::llama, overrides + Overrides{"parallel.data=" + std::to_string(ranks)});
  config.training.micro_batch_size = 1;
  Sent sent;
  run_local(ranks, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const StepReport report =
        engine->step(own_part(*engine, random_batch(ranks * micro_batches, kSeq, 5, kVocab)));
    if (world->rank() != 0) return;
    for (const AxisTraffic& axis : report.traffic) {
      if (axis.axis == "dp") sent.dp = static_cast<std::int64_t>(axis.bytes_sent);
      if (axis.axis == "dp_gather") sent.gather = static_cast<std::int64_t>(axis.bytes_sent);
    }
  });
  return sent;
}

/// Elements of a unit as it lies in memory, in buckets of matrices and of what kernels read in fp32.
struct Padded {
  std::int64_t matrices = 0, fp32 = 0;
  std::int64_t both() const { return matrices + fp32; }
};

TEST(LayoutShards, BytesSentAreThoseOfTheTable) {
  // Llama of 4 layers: each parameter starts at a multiple of 64 elements, each bucket is a multiple of 64 d.
  const std::int64_t d = 2, m = 3, h = 24, kv = 12, f = 32;
  const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  const auto sum = [&](const std::vector<std::int64_t>& sizes) {
    std::int64_t n = 0;
    for (const std::int64_t size : sizes) n += up(size, 64);
    return up(n, 64 * d);
  };
  const Padded layer{sum({(h + 2 * kv) * h, h * h, 2 * f * h, f * h}), sum({h, h})},
      embedding{0, sum({kVocab * h})}, head{sum({kVocab * h}), sum({h})};
  for (const bool bf16 : {false, true}) {
    const Overrides precision{bf16 ? "training.precision=bf16" : "training.precision=fp32"};
    const std::int64_t e = bf16 ? 2 : 4;
    const auto weights = [&](const Padded& unit) { return e * unit.matrices + 4 * unit.fp32; };
    const std::int64_t all = 4 * layer.both() + embedding.both() + head.both(),
                       read = 4 * weights(layer) + weights(embedding) + weights(head);
    const auto share = [&](std::int64_t bytes) { return bytes * (d - 1) / d; };
    // 4 m + 2: gradients each time, weights once. In stage 2 a bucket holds a whole piece.
    const std::int64_t piece_matrices = up(4 * 4032 + up(kVocab * h, 64), 64 * d),
                       piece_fp32 = up(4 * (64 + 64) + up(kVocab * h, 64) + 64, 64 * d);
    const Sent two = bytes_sent(precision + stage(2), d, m);
    EXPECT_EQ(two.dp, share(m * 4 * (piece_matrices + piece_fp32) + e * piece_matrices + 4 * piece_fp32));
    // 8 m: weights before F and before B, gradients behind it. What is read twice in a row is gathered once:
    // the head, and the first layer from one micro-batch to the next; the embedding's B reads nothing.
    const Sent three = bytes_sent(precision + stage(3), d, m);
    EXPECT_EQ(three.dp, share(m * 4 * all));
    const std::int64_t gathered =
        m * (4 * 2 * weights(layer) + weights(embedding) + weights(head)) - (m - 1) * weights(layer);
    EXPECT_EQ(three.gather, share(gathered));
    // 6 m: kept from F to B.
    const Sent kept = bytes_sent(precision + stage(3) + Overrides{"parallel.zero_reshard=never"}, d, m);
    EXPECT_EQ(kept.dp, share(m * 4 * all));
    EXPECT_EQ(kept.gather, share(m * read - (m - 1) * weights(layer)));
  }
}

TEST(LayoutShards, DataRanksWithoutSamplesTakePart) {
  for (const std::int64_t samples : {1, 2}) {
    const Body body = [samples](Engine& engine) {
      std::vector<double> numbers;
      for (unsigned i = 0; i < 2; ++i) {
        const Batch whole = random_batch(samples, kSeq, 30 + i, kVocab);
        const Part part = part_of(samples, engine.mesh().coordinates().dp, engine.mesh().shape().dp);
        Batch own = slice(whole, part.begin, part.count);
        own.global_batch = samples;
        if (i > 0) numbers.push_back(engine.update().grad_norm);
        numbers.push_back(engine.forward_backward(own));
        numbers.push_back(engine.evaluate(own));
      }
      return numbers;
    };
    for (const int zero : {2, 3}) {
      expect_serial(edge_config(Family::gpt2,
                                Overrides{"parallel.data=3", "training.global_batch_size=12"} + stage(zero)),
                    3, body);
      for (const char* schedule : {"1f1b", "zb-v"}) {
        const Overrides pipeline{"parallel.data=3", "training.global_batch_size=12", "parallel.pipeline=2",
                                 std::string("parallel.schedule=") + schedule};
        expect_serial(edge_config(Family::llama, pipeline + stage(zero)), 6, body);
      }
      // More layers than gathers and sums that may be under way.
      const Overrides deep{"parallel.data=3", "training.global_batch_size=12", "model.num_layers=7",
                           "training.recompute=selective"};
      expect_serial(edge_config(Family::llama, deep + stage(zero)), 3, body);
      expect_serial(edge_config(Family::llama, deep + stage(zero) +
                                                   Overrides{"parallel.pipeline=2", "parallel.schedule=zb-h1",
                                                             "parallel.zero_reshard=always"}),
                    6, body);
    }
  }
}

TEST(LayoutShards, WhatIsFrozenStaysAndTheRestIsTrained) {
  const Body body = [](Engine& engine) {
    std::vector<double> numbers;
    for (unsigned step = 0; step < 3; ++step) {
      std::map<std::string, std::string> frozen;
      if (step == 0) frozen["embedding.word_embeddings.weight"] = "table";
      for (const int layer : {0, 2}) {
        if (step == 2) break;
        for (const Parameter* p : engine.params().parameters()) {
          const std::string prefix = "decoder.layers." + std::to_string(layer);
          if (p->name().starts_with(prefix) && (step == 0 || p->name().ends_with("bias")))
            frozen[p->name()] = p->name();
        }
      }
      if (engine.mesh().shape().pp == 1) engine.set_frozen(frozen);
      numbers.push_back(engine.forward_backward(own_part(engine, random_batch(8, kSeq, 50 + step, kVocab))));
      if (step < 2) numbers.push_back(engine.update().grad_norm);
    }
    return numbers;
  };
  for (const int zero : {2, 3}) {
    expect_serial(edge_config(Family::gpt2, Overrides{"parallel.data=2"} + stage(zero)), 2, body);
    expect_serial(
        edge_config(Family::gpt2, Overrides{"parallel.data=2", "training.recompute=full"} + stage(zero)), 2,
        body);
  }
}

TEST(LayoutShards, WeightsAreThereInPassesAndWhileTheyAreHeld) {
  const Batch whole = random_batch(8, kSeq, 1, kVocab);
  run_local(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine =
        build_engine(edge_config(Family::gpt2, Overrides{"parallel.data=2"} + stage(3)), true, world);
    const Parameter& first = *engine->params().parameters().front();
    const auto used = [&] { return engine->ctx().allocator->stats().used_bytes; };
    engine->step(own_part(*engine, whole));
    const auto before = used();
    expect_error<InvalidArgument>([&] { first.value(); }, "parallel.zero_stage 3", "WeightWalk::Hold");
    {
      const auto held = hold_weights(*engine);
      const auto again = hold_weights(*engine);
      EXPECT_EQ(first.value().to_floats(), engine->params().weights().whole(first).to_floats());
      EXPECT_GT(used(), before);
    }
    EXPECT_EQ(used(), before);
    expect_error<InvalidArgument>([&] { first.value(); }, "parallel.zero_stage 3");
    engine->step(own_part(*engine, whole));
  });
}

/// Ranks add gradients of which each was rounded once, and round the sum once: with u the unit of rounding
/// and g_r what rank r sends, an element is wrong by at most u (sum of |g_r| + |sum|), numbers too small for
/// fp16 aside.
TEST(LayoutShards, GradientsThatTravelInSixteenBitsAreRoundedTwice) {
  if (on_cuda()) GTEST_SKIP() << "NCCL rounds once per rank";
  const auto gradients = [](const Overrides& more) {
    Config config = edge_config(Family::gpt2, Overrides{"parallel.data=2"} + more);
    config.training.micro_batch_size = 4;
    WholeTensors whole;
    run_local(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(config, true, world);
      engine->forward_backward(own_part(*engine, random_batch(8, kSeq, 9, kVocab)));
      WholeTensors own = whole_tensors(*engine, true);
      if (world->rank() == 0) whole = std::move(own);
    });
    return whole;
  };
  const WholeTensors exact = gradients({});
  for (const auto& [dtype, unit] : {std::pair("bf16", 0x1p-8), std::pair("fp16", 0x1p-11)}) {
    const Overrides sent{std::string("parallel.gradient_dtype=") + dtype};
    WholeTensors first;
    for (const int zero : {0, 1, 2, 3}) {
      const WholeTensors rounded = gradients(sent + stage(zero));
      if (zero == 0) first = rounded;
      EXPECT_TRUE(rounded == first) << dtype << ", zero_stage " << zero;
    }
    double error = 0, norm = 0;
    for (const auto& [name, values] : exact) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        error += std::pow(static_cast<double>(first.at(name)[i]) - values[i], 2);
        norm += std::pow(static_cast<double>(values[i]), 2);
      }
    }
    EXPECT_LT(std::sqrt(error / norm), 2 * unit) << dtype;
    EXPECT_GT(std::sqrt(error / norm), unit / 50) << dtype;
  }
}

/// Peak of a step over what stays, at `layers` layers: it does not grow with them.
std::int64_t peak_over_rest(const Overrides& overrides, std::int64_t layers) {
  Config config = edge_config(Family::llama, overrides + Overrides{"parallel.data=2"});
  config.model.num_layers = layers;
  config.training.recompute = Recompute::full;
  std::int64_t over = 0;
  run_local(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const Batch own = own_part(*engine, random_batch(4, kSeq, 1, kVocab));
    engine->step(own);
    engine->ctx().allocator->reset_peak();
    const auto rest = static_cast<std::int64_t>(engine->ctx().allocator->stats().used_bytes);
    engine->step(own);
    if (world->rank() == 0)
      over = static_cast<std::int64_t>(engine->ctx().allocator->stats().peak_used_bytes) - rest;
  });
  return over;
}

TEST(LayoutShards, NoMoreUnitsAreWholeThanTheOneInUseAndTheNext) {
  // A layer's weights and gradients are 4 (48 + 24 + 64 + 32) 24 bytes each: 12 more layers would show.
  const std::int64_t layer = 4 * (48 + 24 + 64 + 32) * 24, input = 4 * kSeq * 24;
  const std::int64_t growth = peak_over_rest(stage(3), 16) - peak_over_rest(stage(3), 4);
  EXPECT_LT(growth, 12 * (input + 1024));
  EXPECT_LT(growth, layer);
}

}  // namespace
}  // namespace tessera::test::edge
