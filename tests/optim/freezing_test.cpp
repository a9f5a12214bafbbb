/// What is trained, when that changes between calls: counts of updates, and gradients that a checkpoint gives
/// back.

#include <gtest/gtest.h>

#include "tessera/optim/optimizer.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

struct Freezing : testing::Test {
  void call(float value) {
    if (store.gradient().finished_calls() > 0) store.gradient().begin_call();
    for (Parameter* p : {&a, &b}) {
      if (!p->trained()) continue;
      p->next_beta();
      test::edit(p->grad(), [&](std::vector<float>& grad) { std::fill(grad.begin(), grad.end(), value); });
    }
    store.gradient().finish_call();
  }
  void update() {
    optimizer.launch_step([](std::int64_t) { return std::vector<UpdateRates>{{0.5, 0}, {0.5, 0}}; });
    optimizer.finish_step();
  }
  void freeze(const Parameter* one) {
    store.set_frozen([one](const Parameter& p) { return &p == one; });
  }
  std::vector<float> weight(const Parameter& p) const { return store.weights().main(p).to_vector<float>(); }

  ExecCtx ctx = test::context(1);
  Parameter a{"a", {5, 3}, Init::ones()};
  Parameter b{"b", {70}, Init::ones()};
  ParamStore store{ctx, {&a, &b}};
  OptimizerConfig config = [] {
    OptimizerConfig made;
    made.name = OptimizerName::sgd;
    made.momentum = 0;
    made.clip_grad = 0;
    return made;
  }();
  Optimizer optimizer{ctx, store, config};
};

TEST_F(Freezing, CountsUpdatesByParameter) {
  call(1), update();
  freeze(&b);
  call(1), update(), call(1), update();
  EXPECT_EQ(optimizer.updates(), 3);
  EXPECT_EQ(optimizer.updates_of(a), 3);
  EXPECT_EQ(optimizer.updates_of(b), 1);
  EXPECT_EQ(weight(b), std::vector<float>(70, 0.5f));
  freeze(nullptr);
  call(1), update();
  EXPECT_EQ(optimizer.updates_of(b), 2);
  EXPECT_EQ(weight(a), std::vector<float>(15, -1.0f));
  EXPECT_EQ(weight(b), std::vector<float>(70, 0.0f));
}

TEST_F(Freezing, KeepsTheGradientOfACallBeforeIt) {
  call(1);
  freeze(&b);
  call(1), update();
  EXPECT_EQ(optimizer.updates_of(b), 1);
  EXPECT_EQ(weight(a), std::vector<float>(15, 0.0f));  // calls add up
  EXPECT_EQ(weight(b), std::vector<float>(70, 0.5f));
  call(1), update();
  EXPECT_EQ(optimizer.updates_of(b), 1);
  EXPECT_EQ(weight(b), std::vector<float>(70, 0.5f));
}

TEST_F(Freezing, TakesCountsFromElsewhere) {
  UpdateState state = optimizer.update_state();
  state.updates = 4;
  optimizer.set_update_state(state);
  EXPECT_EQ(optimizer.updates_of(b), 4);
  optimizer.set_updates_of([&](const Parameter& p) { return &p == &a ? 4 : 1; });
  EXPECT_EQ(optimizer.updates_of(b), 1);
  call(1), update();
  EXPECT_EQ(optimizer.updates_of(a), 5);
  EXPECT_EQ(optimizer.updates_of(b), 2);
  EXPECT_THROW(optimizer.set_updates_of([](const Parameter&) { return 6; }), InvalidArgument);
  EXPECT_THROW(optimizer.set_updates_of([](const Parameter&) { return -1; }), InvalidArgument);
}

TEST_F(Freezing, RestoresAnAccumulatedGradient) {
  call(3);
  store.gradient().restore(2, [&](const Parameter& p) { return &p == &a; });
  EXPECT_EQ(store.gradient().finished_calls(), 2);
  for (const StatePiece& piece : store.gradient_pieces(PieceSet::held)) {
    if (piece.parameter != &a) continue;
    for (const auto& [place, values] : piece.boxes())
      values.write(ctx, std::vector<float>(static_cast<std::size_t>(values.numel()), 2.0f).data());
  }
  update();
  EXPECT_EQ(optimizer.updates_of(a), 1);
  EXPECT_EQ(optimizer.updates_of(b), 0);
  EXPECT_NE(weight(a), std::vector<float>(15, 1.0f));
  EXPECT_EQ(weight(b), std::vector<float>(70, 1.0f));
  EXPECT_THROW(store.gradient().restore(0, [](const Parameter&) { return true; }), InvalidArgument);
}

}  // namespace
}  // namespace tessera
