/// Engine: its parts alone and together, their order, their memory.

#include "tests/engine/engine_support.hpp"

#include <limits>

#include "tessera/nn/models/decoder.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;
using test::expect_same_gradients;
using test::gradient_of;
using test::part;
using test::random_batch;
using test::tiny_config;
using test::tiny_llama;
using test::weights_in;

std::unique_ptr<Engine> engine_with(Config config, std::int64_t micro_batch_size = 0, int threads = 1) {
  EngineOptions options = EngineOptions::from(config);
  options.micro_batch_size = micro_batch_size;
  return std::make_unique<Engine>(std::make_unique<Decoder>(config.model, numerics_of(config.training)),
                                  options, test::context(threads, 77));
}

/// d(mean cross-entropy)/d(logits), by the formula, in plain loops.
Tensor upstream_of_mean_loss(const ExecCtx& ctx, const Tensor& logits, const Batch& batch) {
  std::vector<float> g = logits.to_floats();
  const auto width = static_cast<std::size_t>(logits.size(2));
  const double n = static_cast<double>(count_targets(batch));
  for (std::size_t row = 0; row < batch.labels.size(); ++row) {
    float* x = g.data() + row * width;
    double sum = 0.0;
    for (std::size_t i = 0; i < width; ++i) sum += std::exp(static_cast<double>(x[i]));
    for (std::size_t i = 0; i < width; ++i) {
      const bool label = static_cast<std::int32_t>(i) == batch.labels[row];
      const double p = std::exp(static_cast<double>(x[i])) / sum;
      x[i] = batch.labels[row] < 0 ? 0.0f : static_cast<float>((p - (label ? 1.0 : 0.0)) / n);
    }
  }
  return Tensor::from(ctx, g, logits.shape());
}

struct Parts : ::testing::TestWithParam<bool> {
  Config config() const { return GetParam() ? tiny_llama(0.15) : tiny_config(0.15); }
  Batch batch = random_batch(5, 11, 1);
};
INSTANTIATE_TEST_SUITE_P(Models, Parts, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Llama" : "Gpt2"; });

TEST_P(Parts, ForwardAndBackwardFromLogits) {
  const auto whole = engine_with(config(), 2), parts = engine_with(config(), 2);
  const double loss = whole->forward_backward(batch);
  OpenForward forward = parts->forward(batch, Engine::Output::logits);
  const Tensor logits = forward.output;
  EXPECT_EQ(logits.shape(), (Shape{5, 11, 257}));
  forward.backward(upstream_of_mean_loss(parts->ctx(), logits, batch));
  expect_same_gradients(*parts, gradient_of(*whole), 1e-5);

  double sum = 0.0;  // and the logits are the ones the loss came from
  const std::vector<float> x = logits.to_floats();
  for (std::size_t row = 0; row < batch.labels.size(); ++row) {
    if (batch.labels[row] < 0) continue;
    double total = 0.0;
    for (std::size_t i = 0; i < 257; ++i) total += std::exp(static_cast<double>(x[row * 257 + i]));
    sum += std::log(total) - static_cast<double>(x[row * 257 + static_cast<std::size_t>(batch.labels[row])]);
  }
  EXPECT_NEAR(loss, sum / static_cast<double>(count_targets(batch)), 1e-5);
}

TEST_P(Parts, ForwardAndBackwardFromTokenLosses) {
  const auto whole = engine_with(config(), 2), parts = engine_with(config(), 2);
  const double loss = whole->forward_backward(batch);
  OpenForward forward = parts->forward(batch, Engine::Output::token_losses);
  const Tensor losses = forward.output;
  ASSERT_EQ(losses.shape(), (Shape{5, 11}));
  double sum = 0.0;
  const std::vector<float> values = losses.to_floats();
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += static_cast<double>(values[i]);
    if (batch.labels[i] < 0) {
      EXPECT_EQ(values[i], 0.0f);
    }
  }
  const auto n = static_cast<double>(count_targets(batch));
  EXPECT_NEAR(sum / n, loss, 1e-5);
  const Tensor upstream = Tensor::empty(parts->ctx(), {5, 11}, DType::f32);
  ops::fill_constant(parts->ctx(), upstream, static_cast<float>(1.0 / n));
  forward.backward(upstream);
  expect_same_gradients(*parts, gradient_of(*whole), 1e-5);
}

TEST_P(Parts, AnySplitIntoMicroBatchesIsTheSame) {
  const Batch four = random_batch(4, 11, 2);
  const auto whole = engine_with(config(), 4);
  const double loss = whole->forward_backward(four);
  const std::vector<float> expected = gradient_of(*whole);
  for (const std::int64_t size : {1, 2, 3}) {  // 1+1+1+1, 2+2, 3+1
    const auto split = engine_with(config(), size, 2);
    EXPECT_NEAR(split->forward_backward(four), loss, 1e-5 * loss) << size;
    expect_same_gradients(*split, expected, 1e-5);
  }
}

TEST_P(Parts, SeveralCallsAreOneCallOnTheWholeBatch) {
  // Dropout is on: later calls must draw as the later samples of one batch would.
  const auto whole = engine_with(config()), parts = engine_with(config());
  const double loss = whole->forward_backward(batch);
  const auto n = static_cast<double>(count_targets(batch));
  double sum = 0.0;
  std::int64_t first = 0;
  for (const std::int64_t count : {2, 1, 2}) {
    const Batch piece = part(batch, first, count);
    const double share = static_cast<double>(count_targets(piece)) / n;
    sum += share * parts->forward_backward(piece, share);
    first += count;
  }
  EXPECT_NEAR(sum, loss, 1e-5 * loss);
  expect_same_gradients(*parts, gradient_of(*whole), 1e-5);
  whole->update();
  parts->update();
  EXPECT_LE(test::distance(weights_in(*parts), weights_in(*whole)), 1e-4);
}

TEST_P(Parts, StepIsForwardBackwardAndUpdate) {
  const auto whole = engine_with(config()), parts = engine_with(config());
  for (unsigned i = 0; i < 3; ++i) {
    const Batch b = random_batch(3, 7, i);
    const StepReport report = whole->step(b);
    EXPECT_EQ(parts->forward_backward(b), report.loss);
    EXPECT_EQ(parts->update().grad_norm, report.update.grad_norm);
    EXPECT_EQ(report.tokens, 21);
  }
  EXPECT_EQ(weights_in(*parts), weights_in(*whole));
  EXPECT_EQ(whole->progress().steps, 3);
}

TEST_P(Parts, DropoutDrawsAnewEachStep) {
  const auto engine = engine_with(config());
  const double first = engine->forward_backward(batch);
  engine->discard();
  EXPECT_EQ(engine->forward_backward(batch), first);
  engine->discard();
  engine->progress().steps = 1;
  EXPECT_NE(engine->forward_backward(batch), first);
}

TEST_P(Parts, DiscardForgetsEverythingSinceTheUpdate) {
  const auto engine = engine_with(config()), fresh = engine_with(config());
  engine->forward_backward(random_batch(2, 9, 8));
  engine->forward_backward(random_batch(2, 9, 9), 3.0);
  engine->forward(batch, Engine::Output::logits);
  engine->discard();
  EXPECT_THROW(engine->update(), InvalidArgument);
  EXPECT_EQ(engine->step(batch).loss, fresh->step(batch).loss);
  EXPECT_EQ(weights_in(*engine), weights_in(*fresh));
}

TEST_P(Parts, EvaluationLeavesGradientsAndWeightsAlone) {
  const auto engine = engine_with(config(), 2);
  engine->forward_backward(batch);
  const auto gradient = gradient_of(*engine), weights = weights_in(*engine);
  const double loss = engine->evaluate(batch);
  EXPECT_EQ(engine->evaluate(batch), loss);  // no dropout
  EXPECT_EQ(gradient_of(*engine), gradient);
  EXPECT_EQ(weights_in(*engine), weights);
  Config plain = config();
  plain.model.dropout = plain.model.attention_dropout = 0.0;
  EXPECT_NEAR(engine_with(plain)->forward_backward(batch), loss, 1e-6 * loss);
}

TEST(Engine, RefusesCallsInTheWrongOrder) {
  const auto engine = engine_with(tiny_config());
  const Batch batch = random_batch(2, 5, 1);
  expect_error<InvalidArgument>([&] { engine->update(); }, "no call was finished");
  expect_error<InvalidArgument>(
      [&] {
        OpenForward().backward(Tensor::empty(engine->ctx(), {2, 5}, DType::f32));
      },
      "needs a forward()");
  OpenForward forward = engine->forward(batch, Engine::Output::token_losses);
  for (const Shape& wrong : {Shape{5, 2}, Shape{3, 5}, Shape{2, 5, 257}}) {
    expect_error<InvalidArgument>([&] { forward.backward(Tensor::empty(engine->ctx(), wrong, DType::f32)); },
                                  "upstream");
  }
  expect_error<InvalidArgument>([&] { forward.backward(Tensor::empty(engine->ctx(), {10}, DType::f32)); },
                                "upstream");
  forward.backward(forward.output);  // the refused calls have broken nothing
  engine->update();
  EXPECT_EQ(engine->progress().steps, 1);
}

TEST(Engine, RefusesBatchesTheModelCannotTake) {
  const auto engine = engine_with(tiny_config());
  expect_error<InvalidArgument>([&] { engine->forward_backward(random_batch(1, 17, 1)); }, "17",
                                "the model's 16 positions");
  Batch batch = random_batch(2, 5, 1);
  batch.tokens[7] = 257;
  expect_error<DataError>([&] { engine->forward_backward(batch); }, "257", "sample 1");
  batch = random_batch(2, 5, 1);
  batch.labels.assign(10, -100);
  expect_error<DataError>([&] { engine->step(batch); }, "all are -100");
  batch.labels.clear();
  expect_error<InvalidArgument>([&] { engine->forward_backward(batch); }, "no labels");
  expect_error<InvalidArgument>([&] { engine->evaluate(batch); }, "no labels");
  EXPECT_NO_THROW(engine->forward(batch, Engine::Output::logits));
  expect_error<InvalidArgument>([&] { engine->forward_backward(Batch{}); }, "0 x 0");
}

TEST(Engine, AnInferenceEngineOnlyInfers) {
  const auto engine = build_engine(tiny_config(), false), trained = build_engine(tiny_config());
  const Batch batch = random_batch(2, 5, 1);
  EXPECT_EQ(engine->evaluate(batch), trained->evaluate(batch));
  expect_error<InvalidArgument>([&] { engine->forward_backward(batch); }, "trainable");
  expect_error<InvalidArgument>([&] { engine->update(); }, "trainable");
  expect_error<InvalidArgument>([&] { engine->update(std::vector<UpdateRates>(2)); }, "trainable");
}

TEST(Engine, UpdateReportsTheRateItUsed) {
  Config config = tiny_config();
  config.lr_schedule.warmup_steps = 4;
  const auto engine = engine_with(config);
  const Batch batch = random_batch(2, 5, 1);
  EXPECT_EQ(engine->step(batch).update.lr, 0.0);
  engine->forward_backward(batch);
  EXPECT_DOUBLE_EQ(engine->update().lr, config.optimizer.lr / 4);

  const auto before = weights_in(*engine);
  ASSERT_EQ(engine->optimizer().groups().size(), 2u);
  engine->forward_backward(batch);
  EXPECT_EQ(engine->update(std::vector<UpdateRates>(2)).lr, 0.0);
  EXPECT_EQ(weights_in(*engine), before);
  engine->forward_backward(batch);
  EXPECT_EQ(engine->update(std::vector<UpdateRates>{{0.25, 0.0}, {0.5, 0.0}}).lr, 0.25);
  EXPECT_NE(weights_in(*engine), before);

  expect_error<InvalidArgument>([&] { engine->update(std::vector<UpdateRates>(2)); }, "no call was finished");
  engine->forward_backward(batch);
  expect_error<InvalidArgument>([&] { engine->update({}); }, "one for each parameter group");
  engine->update();
  engine->launch_step(batch);
  expect_error<InvalidArgument>([&] { engine->update(); }, "1 steps are under way");
  expect_error<InvalidArgument>([&] { engine->update(std::vector<UpdateRates>(2)); },
                                "1 steps are under way");
  engine->finish_step();
}

void put(Engine& engine, float value) {
  test::edit(engine.params().weights().main_buffer(), [&](auto& main) { main[0] = value; });
}

TEST(Engine, NonFiniteGradientsAreSkippedCountedAndFinallyStop) {
  Config config = tiny_config();
  config.training.max_skipped_steps = 3;
  const auto engine = engine_with(config);
  const Batch batch = random_batch(2, 5, 1);
  engine->step(batch);
  const auto good = weights_in(*engine);
  const float first = good[0];
  for (int round = 0; round < 2; ++round) {  // two in a row, then a good one: the row begins anew
    put(*engine, std::nanf(""));
    for (int i = 0; i < 2; ++i) {
      const StepReport report = engine->step(batch);
      EXPECT_TRUE(report.update.skipped);
      EXPECT_FALSE(std::isfinite(report.update.grad_norm));
    }
    put(*engine, first);
    if (round == 0) {
      EXPECT_EQ(weights_in(*engine), good);
      EXPECT_EQ(engine->optimizer().updates(), 1);
    }
    EXPECT_FALSE(engine->step(batch).update.skipped);
  }
  EXPECT_EQ(engine->progress().steps, 7);
  EXPECT_EQ(engine->progress().skipped, 4);
  EXPECT_EQ(engine->optimizer().updates(), 3);
  put(*engine, std::nanf(""));
  engine->step(batch);
  engine->step(batch);
  expect_error<TrainingError>([&] { engine->step(batch); }, "step 10", "3 steps in a row");
}

TEST(Engine, StepsLaunchedAheadOfTheirResultsAreTheSame) {
  Config config = tiny_config(0.1);
  config.lr_schedule.warmup_steps = 4;
  const auto waits = engine_with(config, 2), ahead = engine_with(config, 2);
  std::vector<StepReport> a, b;
  for (unsigned i = 0; i < 5; ++i) {
    const Batch batch = random_batch(4, 7, i);
    a.push_back(waits->step(batch));
    ahead->launch_step(batch);
    if (i > 0) b.push_back(ahead->finish_step());
  }
  EXPECT_THROW(ahead->step(random_batch(4, 7, 9)), InvalidArgument);
  b.push_back(ahead->finish_step());
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].loss, b[i].loss);
    EXPECT_EQ(a[i].update.grad_norm, b[i].update.grad_norm);
    EXPECT_EQ(a[i].update.lr, b[i].update.lr);
  }
  EXPECT_EQ(weights_in(*waits), weights_in(*ahead));
  EXPECT_THROW(ahead->finish_step(), InvalidArgument);
}

TEST(Engine, SteadyStateAsksTheSystemForNothing) {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    Config config = tiny_llama(0.1);
    config.training.precision = precision;
    const auto engine = engine_with(config, 2);
    engine->step(random_batch(4, 11, 0));
    engine->step(random_batch(4, 11, 1));
    const AllocatorStats before = engine->ctx().allocator->stats();
    for (unsigned i = 2; i < 8; ++i) {
      engine->step(random_batch(4, 11, i));
      const AllocatorStats now = engine->ctx().allocator->stats();
      EXPECT_EQ(now.system_allocations, before.system_allocations);
      EXPECT_EQ(now.used_bytes, before.used_bytes);
    }
  }
}

TEST(Engine, EveryPrecisionLearns) {
  for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp16}) {
    for (Config config : {tiny_config(), tiny_llama()}) {
      config.training.precision = precision;
      config.training.initial_loss_scale = 65536;
      const auto engine = engine_with(config, 2);
      const Batch batch = random_batch(4, 11, 3);
      const double before = engine->evaluate(batch);
      for (int i = 0; i < 30; ++i) engine->step(batch);
      EXPECT_LT(engine->evaluate(batch), 0.5 * before);
    }
  }
}

TEST(Engine, ALossScaleThatIsTooLargeFallsUntilGradientsAreFinite) {
  Config config = tiny_config();
  config.training.precision = Precision::fp16;
  config.training.max_skipped_steps = 3;  // does not count while the scale falls
  const auto engine = engine_with(config, 2);
  const Batch batch = random_batch(4, 11, 3);
  double scale = config.training.initial_loss_scale;
  int skipped = 0;
  for (int i = 0; i < 25; ++i) {
    const StepReport report = engine->step(batch);
    EXPECT_LE(report.update.loss_scale, scale);
    scale = report.update.loss_scale;
    skipped += report.update.skipped ? 1 : 0;
  }
  EXPECT_GT(skipped, 5);
  EXPECT_LT(skipped, 25);
  EXPECT_EQ(engine->progress().skipped, skipped);
  EXPECT_EQ(engine->optimizer().updates(), 25 - skipped);
  EXPECT_EQ(scale, std::ldexp(1.0, 32 - (skipped - 1)));  // hysteresis 2: the first one is forgiven
}

TEST(Engine, Bf16StartsCloseToFp32) {
  Config config = tiny_llama();
  const Batch batch = random_batch(4, 11, 3);
  const double exact = engine_with(config)->forward_backward(batch);
  config.training.precision = Precision::bf16;
  EXPECT_NEAR(engine_with(config)->forward_backward(batch), exact, 1e-3 * exact);
  config.training.fp32_residual = false;
  EXPECT_NEAR(engine_with(config)->forward_backward(batch), exact, 5e-3 * exact);
}

TEST(Engine, InitialValuesBelongToNamesNotToPlaces) {
  // The same parameter of a deeper model, with the same std, starts with the same numbers.
  const Config shallow = tiny_config();
  Config deep = shallow;
  deep.model.num_layers = 5;
  const auto a = build_engine(shallow), b = build_engine(deep);
  int compared = 0;
  for (const Parameter* p : a->params().parameters()) {
    for (const Parameter* q : b->params().parameters()) {
      if (p->name() != q->name() || p->init().std != q->init().std) continue;
      EXPECT_EQ(a->params().weights().main(*p).to_floats(), b->params().weights().main(*q).to_floats())
          << p->name();
      ++compared;
    }
  }
  EXPECT_EQ(compared, 2 + 2 * 10 + 2);  // all but the weights of linear_proj and linear_fc2
  Config other = shallow;
  other.training.seed = 4321;
  EXPECT_NE(weights_in(*build_engine(other)), weights_in(*a));
  EXPECT_EQ(weights_in(*build_engine(shallow)), weights_in(*a));
}

TEST(Engine, InitialValuesHaveTheirStandardDeviation) {
  Config config = tiny_config();
  config.model.hidden_size = 100;
  config.model.ffn_hidden_size = 80;
  config.model.num_layers = 2;
  const auto engine = build_engine(config);
  for (const Parameter* p : engine->params().parameters()) {
    if (p->init().kind != Init::Kind::normal) continue;
    const auto values = engine->params().weights().main(*p).to_floats();
    double sum = 0.0, squares = 0.0;
    for (const float v : values) sum += v, squares += static_cast<double>(v) * v;
    const auto n = static_cast<double>(values.size());
    const bool output = p->name().find("linear_proj") != std::string::npos ||
                        p->name().find("linear_fc2") != std::string::npos;
    const double std = output ? 0.1 / 2.0 : 0.1;  // sqrt(2 * 2 layers) = 2
    EXPECT_NEAR(sum / n, 0.0, 5.0 * std / std::sqrt(n)) << p->name();
    EXPECT_NEAR(std::sqrt(squares / n), std, 4.0 * std / std::sqrt(2.0 * n)) << p->name();
  }
}

}  // namespace
}  // namespace tessera
