/// Operations of a mixture of experts: what they refuse, and that they go together.

#include "tessera/ops/moe.hpp"

#include "tessera/ops/embedding.hpp"
#include "tests/support/device.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera {
namespace {

using test::random_tensor;

struct MoeOps : ::testing::Test {
  Tensor f32(const Shape& shape, unsigned seed = 1) const { return random_tensor(ctx, shape, seed); }
  Tensor ints(std::vector<std::int32_t> values, const Shape& shape) const {
    return Tensor::from(ctx, values, shape);
  }
  template <typename Fn>
  void refused(Fn&& fn, const std::vector<std::string>& parts) const {
    try {
      fn();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InvalidArgument& error) {
      for (const std::string& part : parts)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << "'" << part << "' is not in: " << error.what();
    }
  }
  ExecCtx ctx = test::context(2, 3);
};

TEST_F(MoeOps, RoutingRefuses) {
  const Tensor logits = f32({6, 4});
  refused([&] { ops::route(ctx, logits, {.topk = 5}); }, {"4 experts", "topk = 5"});
  refused([&] { ops::route(ctx, logits, {.topk = 0}); }, {"4 experts", "topk = 0"});
  refused([&] { ops::route(ctx, f32({6}), {}); }, {"[tokens, experts]", "[6]"});
  refused([&] { ops::route(ctx, f32({4, 6}).transpose(0, 1), {}); }, {"contiguous"});
  refused([&] { ops::route(ctx, ints({1, 2}, {1, 2}), {}); }, {"int32"});

  const ops::Routing routing = ops::route(ctx, logits, {.topk = 2});
  const auto sums = [&](const ops::Routing& r, std::int64_t batch, const Tensor& counted) {
    return [&, r, batch, counted] { ops::route_sums(ctx, logits, r, batch, counted); };
  };
  refused(sums(routing, 4, {}), {"6 tokens", "4 samples"});
  refused(sums(routing, 2, ints({1, 1}, {2})), {"counted", "6", "[2]"});
  refused(sums(routing, 2, f32({6})), {"counted", "int32", "float32"});
  refused(sums({routing.weight, routing.expert, f32({5})}, 2, {}), {"log-sum-exp", "[5]"});
  refused(sums({routing.weight, routing.expert.narrow(0, 0, 3), routing.lse}, 2, {}), {"experts", "[3, 2]"});
  refused(sums({}, 2, {}), {"[tokens, topk]"});
  refused([&] { ops::balance(ctx, {f32({2, 4}), f32({2, 3})}, 1); }, {"probabilities", "[2, 4]"});
  refused([&] { ops::balance(ctx, {f32({2, 4}), f32({2, 4})}, 5); }, {"topk = 5"});

  const auto backward = [&](const ops::RoutingGrads& grads, const Tensor& factor, std::int64_t topk = 2) {
    return [&, grads, factor, topk] {
      ops::route_backward(ctx, logits, routing, {.topk = topk}, grads, factor, {});
    };
  };
  refused(backward({}, f32({2, 4})), {"balance", "factors"});
  refused(backward({{}, f32({2}), {}}, {}), {"balance", "factors"});
  refused(backward({{}, f32({2}), {}}, f32({2, 3})), {"factors", "8", "[2, 3]"});
  refused(backward({{}, f32({4}), {}}, f32({4, 4})), {"6 tokens", "4 samples"});
  refused(backward({f32({6}), {}, {}}, {}), {"weights", "12", "[6]"});
  refused(backward({{}, {}, f32({5})}, {}), {"lse^2", "6", "[5]"});
  refused(backward({}, {}, 3), {"weights", "18", "[6, 2]"});
}

TEST_F(MoeOps, SlotsRefuse) {
  refused([&] { ops::sort_slots(ctx, ints({0, 1}, {2}), 2); }, {"[tokens, topk]", "[2]"});
  refused([&] { ops::sort_slots(ctx, f32({2, 1}), 2); }, {"int32", "float32"});
  refused([&] { ops::sort_slots(ctx, ints({0, 1}, {2, 1}), 0); }, {"0 experts"});
  refused([&] { ops::combine_slots(ctx, f32({5, 3}), ints({0, 1, 2, 3, 4}, {5}), {}, 2); }, {"[5, 3]", "2"});
  refused([&] { ops::combine_slots(ctx, f32({4, 3}), ints({0, 1}, {2}), {}, 2); }, {"rows", "[2]"});
  refused([&] { ops::combine_slots(ctx, f32({2, 3}), ints({0, 1}, {2}), f32({1}), 2); }, {"weights", "[1]"});
  refused([&] { ops::weigh_rows(ctx, f32({2, 3}), f32({3, 2}), f32({2})); }, {"[2, 3]", "[3, 2]"});
  refused([&] { ops::weigh_rows(ctx, f32({2, 3}), f32({2, 3}), f32({3})); }, {"weights", "[3]"});
  const Tensor brain = Tensor::empty(ctx, {2, 3}, DType::bf16);
  refused([&] { ops::weigh_rows(ctx, f32({2, 3}), brain, f32({2})); }, {"float32", "bfloat16"});
}

// Experts that hand on what they are given: combined with weights that add up to 1 it is what came in.
TEST_F(MoeOps, RowsGoToExpertsAndComeBack) {
  const Tensor x = f32({21, 5}), logits = f32({21, 6}, 2);
  const ops::Routing routing = ops::route(ctx, logits, {.topk = 3});
  const ops::SlotOrder order = ops::sort_slots(ctx, routing.expert, 6);
  const Tensor rows = ops::embedding(ctx, order.token, x, {}, {}, {});
  const Tensor y = ops::combine_slots(ctx, rows, order.row, routing.weight, 3);
  EXPECT_EQ(y.shape(), (Shape{21, 5}));
  EXPECT_LE(test::distance(y.to_floats(), x.to_floats()), 1e-6);
  std::int64_t slots = 0;
  for (const std::int32_t count : order.count.to_vector<std::int32_t>()) slots += count;
  EXPECT_EQ(slots, 63);
  EXPECT_EQ(
      ops::weigh_rows(ctx, rows, ops::embedding(ctx, order.token, x, {}, {}, {}),
                      ops::embedding(ctx, order.slot, routing.weight.view({63, 1}), {}, {}, {}).view({63}))
          .shape(),
      (Shape{63}));
}

TEST_F(MoeOps, NoTokensAreNoTrouble) {
  const Tensor logits = f32({0, 4});
  const ops::Routing routing = ops::route(ctx, logits, {.topk = 2});
  EXPECT_EQ(routing.expert.shape(), (Shape{0, 2}));
  const ops::Balance balance = ops::balance(ctx, ops::route_sums(ctx, logits, routing, 3, {}), 2);
  EXPECT_EQ(balance.value.to_floats(), std::vector<float>(3, 0.0f));
  EXPECT_EQ(
      ops::route_backward(ctx, logits, routing, {.topk = 2}, {{}, f32({3}), {}}, balance.factor, {}).numel(),
      0);
  const ops::SlotOrder order = ops::sort_slots(ctx, routing.expert, 4);
  EXPECT_EQ(order.count.to_vector<std::int32_t>(), std::vector<std::int32_t>(4, 0));
  EXPECT_EQ(ops::combine_slots(ctx, f32({0, 5}), order.row, routing.weight, 2).shape(), (Shape{0, 5}));
  EXPECT_EQ(ops::weigh_rows(ctx, f32({0, 5}), f32({0, 5}), f32({0})).shape(), (Shape{0}));
}

TEST(MetaMoeOps, GiveShapes) {
  const ExecCtx ctx = ExecCtx::meta();
  const Tensor logits = Tensor::empty(ctx, {6, 4}, DType::bf16);
  const ops::Routing routing = ops::route(ctx, logits, {.topk = 2});
  const ops::Balance balance = ops::balance(ctx, ops::route_sums(ctx, logits, routing, 2, {}), 2);
  const Tensor grad = ops::route_backward(ctx, logits, routing, {.topk = 2},
                                          {routing.weight, balance.value, routing.lse}, balance.factor, {});
  EXPECT_EQ(grad.shape(), logits.shape());
  EXPECT_EQ(grad.dtype(), DType::bf16);
  const ops::SlotOrder order = ops::sort_slots(ctx, routing.expert, 4);
  EXPECT_EQ(order.count.shape(), (Shape{4}));
  const Tensor rows = Tensor::empty(ctx, {12, 8}, DType::bf16);
  EXPECT_EQ(ops::combine_slots(ctx, rows, order.row, routing.weight, 2).shape(), (Shape{6, 8}));
}

}  // namespace
}  // namespace tessera
