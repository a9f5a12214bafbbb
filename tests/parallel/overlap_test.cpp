/// Products in pieces beside communication: what is sent when, the same numbers, no more memory.

#include "parallel/overlap.hpp"

#include "tessera/device/trace.hpp"
#include "tests/parallel/layouts.hpp"
#include "tests/support/memory.hpp"

namespace tessera {
namespace {

using test::Layout;
using test::Rank;

constexpr std::int64_t kSeq = 12, kBatch = 3, kWidth = 24, kFfn = 30;

struct Mlp {
  explicit Mlp(const Rank& r, bool trained = true)
      : up(r.parameter("up", r.split({kFfn, kWidth}, 0), 1, trained)),
        up_bias(r.parameter("up bias", r.split({kFfn}, 0), 3, trained)),
        down(r.parameter("down", r.split({kWidth, kFfn}, 1), 5, trained)),
        down_bias(r.parameter("down bias", r.whole({kWidth}), 7, trained)) {}

  Var forward(const Rank& r, const Var& x) const {
    const auto gelu = ops::ActivationKind::gelu_tanh;
    LinearActivation h = column_linear_with_activation(r.ctx, r.tp, x, *up, up_bias.get(), gelu);
    return activated_row_linear(r.ctx, r.tp, h.pre, gelu, *down, down_bias.get(), std::move(h.y));
  }

  std::unique_ptr<Parameter> up, up_bias, down, down_bias;
};

void mlp(Rank& r) {
  const Mlp layers(r);
  const Placement place = r.stream({kSeq, kBatch, kWidth});
  Tape tape;
  const Var x = tape.input(r.part(place, 9), true);
  const Var y = layers.forward(r, x);
  r.keep("y", place, y.value());
  r.backward(tape, y, r.part(place, 11));
  r.keep("dx", place, tape.grad(x));
  for (const auto* p : {&layers.up, &layers.up_bias, &layers.down, &layers.down_bias}) r.keep_gradient(**p);
}

/// What one rank does in order, of products and of communication: "GEMM", "start all_reduce world", ...
std::vector<std::string> own_work(const Trace& trace) {
  std::vector<std::string> names;
  const std::vector<TraceLane> lanes = trace.lanes();
  for (const TimedWork& timed : lanes.front().work) {
    if (timed.work.kind == WorkKind::gemm) names.emplace_back("product");
    if (timed.work.kind == WorkKind::communication) names.push_back(timed.work.name);
  }
  return names;
}

using Names = std::vector<std::string>;

/// What a rank does in forward and in backward.
struct Order {
  Names forward, backward;
};

Order order_of(const Layout& layout, int rank, bool trained) {
  Order order;
  test::run_parallel(layout, [&](Rank& r) {
    const Mlp layers(r, trained);
    const Placement place = r.stream({kSeq, kBatch, kWidth});
    const Tensor upstream = r.part(place, 11);
    Tape tape;
    const Var x = tape.input(r.part(place, 9), true);
    const auto record = [&](const std::function<void()>& work) {
      const auto trace = std::make_shared<Trace>(*r.ctx.stream);
      r.ctx.stream->set_trace(trace);
      work();
      r.ctx.stream->set_trace(nullptr);
      return own_work(*trace);
    };
    Var y;
    const Names forward = record([&] { y = layers.forward(r, x); });
    const Names backward = record([&] { tape.backward(r.ctx, y, upstream); });
    if (r.tp.rank() == rank) order = {forward, backward};
  });
  return order;
}

TEST(Overlap, ASumTravelsWhileTheNextPieceIsMultiplied) {
  const Names sums{"product",
                   "start all_reduce world",
                   "product",
                   "start all_reduce world",
                   "product",
                   "start all_reduce world",
                   "wait all_reduce world",
                   "wait all_reduce world",
                   "wait all_reduce world"};
  Names forward{"product"};  // the column linear sends nothing
  forward.insert(forward.end(), sums.begin(), sums.end());
  EXPECT_EQ(order_of({.size = 2, .chunks = 3}, 0, true).forward, forward);
  // Frozen weights leave nothing else to hide dx behind.
  Names backward{"product"};
  backward.insert(backward.end(), sums.begin(), sums.end());
  EXPECT_EQ(order_of({.size = 2, .chunks = 3}, 0, false).backward, backward);
}

TEST(Overlap, OwnPositionsAreMultipliedWhileOthersTravel) {
  const Layout layout{.size = 3, .sequence = true, .chunks = 2};
  const Names sums{"product",
                   "start reduce_scatter world",
                   "product",
                   "start reduce_scatter world",
                   "wait reduce_scatter world",
                   "wait reduce_scatter world"};
  for (const int rank : {0, 1, 2}) {
    const Names gather{"start all_to_all world",
                       "start all_to_all world",
                       "product",
                       "wait all_to_all world",
                       "product",
                       "wait all_to_all world",
                       "product"};
    Names forward = gather;
    forward.insert(forward.end(), sums.begin(), sums.end());
    const Order order = order_of(layout, rank, true);
    EXPECT_EQ(order.forward, forward) << rank;
    // The gradient of the row linear's result is gathered like an input.
    EXPECT_EQ(
        Names(order.backward.begin(), order.backward.begin() + static_cast<std::ptrdiff_t>(gather.size())),
        gather)
        << rank;
  }
}

TEST(Overlap, OneChunkIsProductThenSum) {
  EXPECT_EQ(order_of({.size = 2}, 0, true).forward,
            (Names{"product", "product", "start all_reduce world", "wait all_reduce world"}));
  EXPECT_EQ(order_of({.size = 2, .sequence = true}, 0, true).forward,
            (Names{"start all_gather world", "wait all_gather world", "product", "product",
                   "start reduce_scatter world", "wait reduce_scatter world"}));
}

// To rounding: a product of another shape may add up in another order.
TEST(Overlap, PiecesGiveTheSameNumbers) {
  for (Layout layout : test::all_layouts()) {
    const auto whole = test::run_parallel(layout, mlp);
    for (layout.chunks = 2; layout.chunks <= 5; ++layout.chunks) {
      SCOPED_TRACE(::testing::Message() << layout);
      const auto pieces = test::run_parallel(layout, mlp);
      for (std::size_t rank = 0; rank < whole.size(); ++rank) {
        for (const auto& [name, found] : whole[rank])
          EXPECT_LE(test::distance(pieces[rank].at(name).values, found.values), 1e-6) << name;
      }
    }
  }
}

TEST(Overlap, PiecesSendTheSameBytes) {
  for (Layout layout : test::all_layouts()) {
    const auto bytes = [&] {
      std::uint64_t sent = 0;
      test::run_parallel(layout, [&](Rank& r) {
        mlp(r);
        if (r.tp.rank() == 0) sent = r.tp.comm->stats().bytes_sent;
      });
      return sent;
    };
    const std::uint64_t whole = bytes();
    layout.chunks = 3;
    EXPECT_EQ(bytes(), whole) << layout;
  }
}

TEST(Overlap, PiecesNeedNoMoreMemory) {
  constexpr std::int64_t kRows = 192, kIn = 120, kOut = 96;  // bytes that no rounding of the allocator hides
  for (Layout layout : test::all_layouts()) {
    for (layout.chunks = 1; layout.chunks <= 4; ++layout.chunks) {
      SCOPED_TRACE(::testing::Message() << layout);
      test::run_parallel(layout, [&](Rank& r) {
        const auto weight = r.parameter("weight", r.split({kOut, kIn}, 1), 1);
        const Tensor x = r.part(r.split({kRows / 4, 4, kIn}, 2), 3);
        const std::size_t peak = test::peak_bytes(r.ctx, [&] {
          Tensor activated = ops::contiguous(r.ctx, x);
          activated_row_linear(r.ctx, r.tp, x, ops::ActivationKind::gelu_tanh, *weight, nullptr,
                               std::move(activated));
        });
        // The product and what it is of; then, which is less here, the product and own positions of the sum.
        EXPECT_EQ(peak, static_cast<std::size_t>(4 * kRows * (kIn / layout.size + kOut)));
      });
    }
  }
}

// A sum of 4096 positions of width 4096 has 4 pieces; one of 512, and each smaller one, has 1.
TEST(Overlap, AutomaticPiecesFillAGpu) {
  const TensorParallel tp{.chunks = 0};
  EXPECT_EQ(detail::pieces_of_sum(tp, {4096, 1, 4096}), 4);
  EXPECT_EQ(detail::pieces_of_sum(tp, {2048, 1, 4096}), 2);
  EXPECT_EQ(detail::pieces_of_sum(tp, {512, 2, 4096}), 1);
  EXPECT_EQ(detail::pieces_of_sum(tp, {1024, 1, 1024}), 1);
  EXPECT_EQ(detail::pieces_of_sum(tp, {65536, 8, 8192}), 4);
  EXPECT_EQ(detail::pieces_of_sum(tp, {0, 1, 8}), 1);
  // Small ones are not cut.
  EXPECT_EQ(order_of({.size = 2, .sequence = true, .chunks = 0}, 0, true).forward,
            order_of({.size = 2, .sequence = true}, 0, true).forward);
}

}  // namespace
}  // namespace tessera
