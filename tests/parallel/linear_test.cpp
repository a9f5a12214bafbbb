/// Column and row linear, alone and together, against plain linear with the whole weights.

#include "tests/parallel/layouts.hpp"
#include "tests/support/timeline.hpp"

namespace tessera {
namespace {

using ops::ActivationKind;
using test::all_layouts;
using test::all_layouts_in_pieces;
using test::expect_serial;
using test::Layout;
using test::Rank;

constexpr std::int64_t kSeq = 12, kBatch = 3;

/// y = column_linear(x): gradients of x, weight and bias.
void column(Rank& r, std::int64_t in, std::int64_t out, bool with_bias, std::int64_t padding, bool recipe,
            std::int64_t seq = kSeq, bool trained = true) {
  const auto weight = r.parameter("weight", r.split({out, in}, 0), 11, trained);
  const auto bias = r.parameter("bias", r.split({out}, 0), 13);
  const Placement x_place = r.stream({seq, kBatch, in}), y_place = r.split({seq, kBatch, out}, 2);
  Tape tape;
  Var x = tape.input(r.part(x_place, 5), true);
  if (recipe) {
    x.set_recipe([place = x_place, &r](const ExecCtx&) { return r.part(place, 5); });
  }
  const Var y = column_linear(r.ctx, r.tp, x, *weight, with_bias ? bias.get() : nullptr, padding);
  r.keep("y", y_place, y.value());
  r.backward(tape, y, r.part(y_place, 7).view(y.value().shape()));
  EXPECT_EQ(tape.grad(x).shape(), x_place.local());
  r.keep("dx", x_place, tape.grad(x));
  if (trained) r.keep_gradient(*weight);
  if (with_bias) r.keep_gradient(*bias);
}

TEST(ColumnLinear, IsSerial) {
  for (const std::int64_t padding : {1, 32}) {
    for (const bool recipe : {false, true}) {
      expect_serial(all_layouts(), [=](Rank& r) { column(r, 7, 13, true, padding, recipe); });
    }
  }
  expect_serial(all_layouts(), [](Rank& r) { column(r, 1, 5, false, 1, false); });
}

// Results wide enough for pieces of columns; with and without a product that could hide the sum.
TEST(ColumnLinear, InPiecesIsSerial) {
  for (const Layout& layout : all_layouts_in_pieces()) {
    for (const bool trained : {false, true}) {
      expect_serial({layout}, [=](Rank& r) { column(r, 26, 13, true, 1, false, kSeq, trained); });
      // One position of each rank, and of all.
      const std::int64_t least = layout.sequence ? layout.size : 1;
      expect_serial({layout}, [=](Rank& r) { column(r, 26, 13, false, 1, false, least, trained); });
    }
    expect_serial({layout}, [](Rank& r) { column(r, 26, 13, true, 32, true); });
  }
}

/// Kinds of row_linear: alone, after an activation, after SwiGLU.
enum class Before { nothing, gelu, swiglu };

Var row_of(Rank& r, const Var& x, Before before, Parameter& weight, Parameter* bias) {
  if (before == Before::nothing) return row_linear(r.ctx, r.tp, x, weight, bias);
  if (before == Before::swiglu)
    return activated_row_linear(r.ctx, r.tp, x, ActivationKind::swiglu, weight, bias);
  return activated_row_linear(r.ctx, r.tp, x, ActivationKind::gelu_tanh, weight, bias);
}

/// A tensor whose last dimension holds own parts of two halves.
Placement feature_halves(const Rank& r, const Shape& shape) {
  const Part part = part_of(shape[2] / 2, r.tp.rank(), r.tp.size());
  return Placement::segmented(
      shape, 2,
      {{.local = 0, .global = part.begin, .count = part.count},
       {.local = part.count, .global = shape[2] / 2 + part.begin, .count = part.count}});
}

void row(Rank& r, std::int64_t in, std::int64_t out, bool with_bias, Before before, bool recipe,
         std::int64_t seq = kSeq) {
  const auto weight = r.parameter("weight", r.split({out, in}, 1), 21);
  const auto bias = r.parameter("bias", r.whole({out}), 23);
  const Shape x_shape{seq, kBatch, before == Before::swiglu ? 2 * in : in};
  const Placement x_place = before == Before::swiglu ? feature_halves(r, x_shape) : r.split(x_shape, 2);
  const Placement y_place = r.stream({seq, kBatch, out});
  Tape tape;
  Var x = tape.input(r.part(x_place, 25, 2.0f), true);
  if (recipe) {
    x.set_recipe([place = x_place, &r](const ExecCtx&) { return r.part(place, 25, 2.0f); });
  }
  const Var y = row_of(r, x, before, *weight, with_bias ? bias.get() : nullptr);
  EXPECT_EQ(y.value().shape(), y_place.local());
  r.keep("y", y_place, y.value());
  r.backward(tape, y, r.part(y_place, 27));
  r.keep("dx", x_place, tape.grad(x));
  r.keep_gradient(*weight);
  if (with_bias) r.keep_gradient(*bias);  // whole on every rank
}

TEST(RowLinear, IsSerial) {
  for (const Before before : {Before::nothing, Before::gelu, Before::swiglu}) {
    for (const bool recipe : {false, true}) {
      expect_serial(all_layouts(), [=](Rank& r) { row(r, 13, 7, true, before, recipe); });
    }
    expect_serial(all_layouts(), [=](Rank& r) { row(r, 5, 1, false, before, false); });
  }
}

TEST(RowLinear, InPiecesIsSerial) {
  for (const Layout& layout : all_layouts_in_pieces()) {
    for (const Before before : {Before::nothing, Before::gelu, Before::swiglu}) {
      expect_serial({layout}, [=](Rank& r) { row(r, 13, 26, true, before, false); });
      const std::int64_t least = layout.sequence ? layout.size : 1;
      expect_serial({layout}, [=](Rank& r) { row(r, 5, 26, false, before, true, least); });
    }
  }
}

/// An MLP whose activation is made by the first product, or by the second one's function.
void mlp(Rank& r, ActivationKind kind, bool at_once) {
  const auto up = r.parameter("up", r.split({9, 6}, 0), 81),
             up_bias = r.parameter("up bias", r.split({9}, 0), 83),
             down = r.parameter("down", r.split({5, 9}, 1), 85);
  const Placement x_place = r.stream({kSeq, kBatch, 6}), y_place = r.stream({kSeq, kBatch, 5});
  Tape tape;
  const Var x = tape.input(r.part(x_place, 87, 2.0f), true);
  LinearActivation h = at_once ? column_linear_with_activation(r.ctx, r.tp, x, *up, up_bias.get(), kind)
                               : LinearActivation{column_linear(r.ctx, r.tp, x, *up, up_bias.get()), {}};
  const Var y = activated_row_linear(r.ctx, r.tp, h.pre, kind, *down, nullptr, std::move(h.y));
  r.keep("y", y_place, y.value());
  r.backward(tape, y, r.part(y_place, 89));
  r.keep("dx", x_place, tape.grad(x));
  for (const auto* p : {&up, &up_bias, &down}) r.keep_gradient(**p);
}

TEST(ParallelLinear, AnMlpIsSerial) {
  for (const ActivationKind kind :
       {ActivationKind::gelu_tanh, ActivationKind::gelu_erf, ActivationKind::relu}) {
    expect_serial(all_layouts(), [=](Rank& r) { mlp(r, kind, true); });
    expect_serial(all_layouts_in_pieces(), [=](Rank& r) { mlp(r, kind, true); });
    const test::Outcome apart = test::run_serial([=](Rank&r) { mlp(r, kind, false); }),
                        at_once = test::run_serial([=](Rank&r) { mlp(r, kind, true); });
    for (const auto& [name, expected] : apart)
      EXPECT_LE(test::distance(at_once.at(name).values, expected.values), 2e-6) << name;
  }
}

TEST(ParallelLinear, WithoutATapeAnMlpDoesNotKeepWhatIsActivated) {
  for (const auto& layouts : {all_layouts(), all_layouts_in_pieces()}) {
    for (const auto kind : {ActivationKind::gelu_tanh, ActivationKind::relu}) {
      expect_serial(layouts, [=](Rank& r) {
        const auto up = r.parameter("up", r.split({9, 6}, 0), 81),
                   down = r.parameter("down", r.split({5, 9}, 1), 85);
        LinearActivation h = column_linear_with_activation(
            r.ctx, r.tp, r.part(r.stream({kSeq, kBatch, 6}), 87, 2.0f), *up, nullptr, kind);
        EXPECT_FALSE(h.pre);
        const Var y = activated_row_linear(r.ctx, r.tp, h.pre, kind, *down, nullptr, std::move(h.y));
        EXPECT_EQ(y.tape(), nullptr);
        r.keep("y", r.stream({kSeq, kBatch, 5}), y.value());
      });
    }
  }
}

/// The linears of a block with residuals, a norm's place taken by an activation.
struct Block {
  explicit Block(const Rank& r, std::int64_t width = 8, std::int64_t ffn = 12)
      : qkv(r.parameter("qkv", r.split({3 * width, width}, 0), 31)),
        qkv_bias(r.parameter("qkv bias", r.split({3 * width}, 0), 33)),
        out(r.parameter("out", r.split({width, 3 * width}, 1), 35)),
        out_bias(r.parameter("out bias", r.whole({width}), 37)),
        up(r.parameter("up", r.halves({2 * ffn, width}), 39)),
        down(r.parameter("down", r.split({width, ffn}, 1), 41)),
        down_bias(r.parameter("down bias", r.whole({width}), 43)) {}

  Var forward(const ExecCtx& ctx, const TensorParallel& tp, const Var& x) const {
    const auto gelu = ActivationKind::gelu_erf;
    LinearActivation a = column_linear_with_activation(ctx, tp, activation(ctx, x, ActivationKind::silu),
                                                       *qkv, qkv_bias.get(), gelu);
    const Var mid =
        add(ctx, x, activated_row_linear(ctx, tp, a.pre, gelu, *out, out_bias.get(), std::move(a.y)));
    const Var b = column_linear(ctx, tp, activation(ctx, mid, ActivationKind::silu), *up, nullptr);
    return add(ctx, mid, activated_row_linear(ctx, tp, b, ActivationKind::swiglu, *down, down_bias.get()));
  }
  std::vector<Parameter*> parameters() const {
    return {qkv.get(), qkv_bias.get(), out.get(), out_bias.get(), up.get(), down.get(), down_bias.get()};
  }

  std::unique_ptr<Parameter> qkv, qkv_bias, out, out_bias, up, down, down_bias;
};

void block(Rank& r, std::int64_t width = 8) {
  const Block layers(r, width);
  const Placement place = r.stream({kSeq, kBatch, width});
  Tape tape;
  const Var x = tape.input(r.part(place, 45), true);
  const Var y = layers.forward(r.ctx, r.tp, x);
  r.keep("y", place, y.value());
  r.backward(tape, y, r.part(place, 47));
  r.keep("dx", place, tape.grad(x));
  for (const Parameter* p : layers.parameters()) r.keep_gradient(*p);
}

TEST(ParallelLinear, ABlockIsSerial) {
  expect_serial(all_layouts(), [](Rank& r) { block(r); });
  expect_serial(all_layouts_in_pieces(), [](Rank& r) { block(r, 24); });
}

void expect_as_close_as_serial_bf16(const std::vector<Layout>& layouts, const test::RankTest& test) {
  const test::Outcome exact = test::run_serial(test), serial = test::run_serial(test, DType::bf16);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(::testing::Message() << layout);
    const auto ranks = test::run_parallel(layout, test, DType::bf16);
    for (const auto& [name, expected] : exact) {
      const double allowed = 1.5 * test::distance(serial.at(name).values, expected.values);
      for (const auto& whole : test::assemble(ranks, name))
        EXPECT_LE(test::distance(whole, expected.values), allowed) << name;
    }
  }
}

TEST(ParallelLinear, ABlockInBf16IsAsCloseAsSerialBf16) {
  expect_as_close_as_serial_bf16(all_layouts(), [](Rank& r) { block(r); });
  expect_as_close_as_serial_bf16(all_layouts_in_pieces(), [](Rank& r) { block(r, 24); });
}

TEST(ParallelLinear, ASecondContributionIsAdded) {
  expect_serial(all_layouts(), [](Rank& r) {
    const Block layers(r);
    for (const unsigned micro_batch : {0u, 1u}) {
      const Placement place = r.stream({kSeq, 1, 8});
      Tape tape;
      const Var x = tape.input(r.part(place, 51 + micro_batch), true);
      const Var y = layers.forward(r.ctx, r.tp, x);
      r.backward(tape, y, r.part(place, 53 + micro_batch));
    }
    for (const Parameter* p : layers.parameters()) r.keep_gradient(*p);
  });
}

TEST(ParallelLinear, FrozenWeightsAndConstantInputs) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(::testing::Message() << layout);
    const auto test = [](Rank& r) {
      const auto frozen = r.parameter("frozen", r.split({7, 5}, 0), 61, false);
      const auto trained = r.parameter("trained", r.split({5, 7}, 1), 63);
      const Placement place = r.stream({kSeq, 1, 5});
      Tape tape;
      const Var x = tape.input(r.part(place, 65), false);
      const Var h = column_linear(r.ctx, r.tp, x, *frozen, nullptr);
      EXPECT_FALSE(h.requires_grad());
      const Var y = row_linear(r.ctx, r.tp, h, *trained, nullptr);
      r.keep("y", place, y.value());
      r.backward(tape, y, r.part(place, 67));
      r.keep_gradient(*trained);
      const Var plain =
          row_linear(r.ctx, r.tp, column_linear(r.ctx, r.tp, x.value(), *frozen, nullptr), *trained, nullptr);
      EXPECT_EQ(plain.tape(), nullptr);
      EXPECT_EQ(plain.value().to_floats(), y.value().to_floats());
    };
    expect_serial({layout}, test);
  }
}

// 4 all-reduces, or 6 all-gathers and 4 reduce-scatters, of one activation each; exact to the byte.
TEST(ParallelLinear, WhatABlockSends) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Layout& layout : all_layouts()) {
      SCOPED_TRACE(::testing::Message() << layout << ' ' << dtype);
      run_parallel(
          layout,
          [&](Rank& r) {
            r.tp.comm->reset_stats();
            block(r);
            const auto t = static_cast<std::uint64_t>(layout.size);
            const std::uint64_t whole = kSeq * kBatch * 8 * size_of(dtype);
            const CommStats stats = r.tp.comm->stats();
            EXPECT_EQ(stats.operations, layout.sequence ? 10u : 4u);
            EXPECT_EQ(stats.bytes_sent, (layout.sequence ? 10 : 4 * 2) * (t - 1) * whole / t);
          },
          dtype);
    }
  }
}

// The weight gradient asks for its input when dx is on its way and nobody has waited for it.
TEST(ColumnLinear, TheInputGradientTravelsDuringTheWeightGradient) {
  if (test::on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  test::run_on_device(2, {.timeout_s = 60, .delay_s = 0.05}, [](const std::shared_ptr<Communicator>& comm) {
    Rank r({comm.get(), false});
    const auto weight = r.parameter("weight", r.split({6, 4}, 0), 1);
    const Tensor value = r.part(r.whole({3, 1, 4}), 2);
    int asked = 0;
    Tape tape;
    Var x = tape.input(value, true);
    x.set_recipe([&](const ExecCtx&) {
      ++asked;
      EXPECT_EQ(comm->stats().operations, 1u);
      EXPECT_EQ(comm->stats().wait_s, 0.0);
      return value;
    });
    const Var y = column_linear(r.ctx, r.tp, x, *weight, nullptr);
    tape.backward(r.ctx, y, r.part(r.split({3, 1, 6}, 2), 3));
    EXPECT_EQ(asked, 1);
    EXPECT_GT(comm->stats().wait_s, 0.0);
  });
}

// First the input is gathered, then dx is scattered: both before the weight gradient needs the first.
TEST(ColumnLinear, OrderOfCommunicationWithSequenceParallelism) {
  test::Timeline timeline;
  test::run_on_device(2, {.timeout_s = 60}, [&](const std::shared_ptr<Communicator>& comm) {
    Rank r({comm.get(), true});
    r.ctx.stream->set_trace(timeline.start(comm->rank(), *r.ctx.stream));
    column(r, 7, 13, true, 1, false);
  });
  for (const int rank : {0, 1}) {
    std::vector<std::string> operations;
    for (const TimedWork& each : timeline.of(rank, "world")) operations.push_back(each.work.name);
    EXPECT_EQ(operations,
              (std::vector<std::string>{"all_gather world", "all_gather world", "reduce_scatter world"}));
  }
}

TEST(ParallelLinear, PositionsMustDivide) {
  test::run_parallel({2, true}, [](Rank& r) {
    const auto weight = r.parameter("weight", r.split({4, 4}, 1), 1);
    const Tensor x = r.part(r.split({5, 1, 4}, 2), 2);
    EXPECT_THROW(row_linear(r.ctx, r.tp, x, *weight, nullptr), InvalidArgument);
    EXPECT_THROW(scatter_sequence(r.ctx, r.tp, x), InvalidArgument);
  });
}

// One rank: the plain function itself.
TEST(ParallelLinear, OneRankIsPlain) {
  test::run_parallel({1, true}, [](Rank& r) {
    const Block layers(r);
    const Tensor x = r.part(r.whole({kSeq, kBatch, 8}), 71);
    EXPECT_EQ(layers.forward(r.ctx, r.tp, x).value().to_floats(),
              layers.forward(r.ctx, {}, x).value().to_floats());
    EXPECT_EQ(r.tp.comm->stats().operations, 0u);
  });
}

}  // namespace
}  // namespace tessera
