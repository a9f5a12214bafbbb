/// Embedding and loss over a vocabulary split by rows, against the plain functions with the whole table.

#include <limits>

#include "tests/parallel/layouts.hpp"

namespace tessera {
namespace {

using test::all_layouts;
using test::expect_serial;
using test::Layout;
using test::Rank;

constexpr std::int64_t kSeq = 12, kBatch = 3, kRows = kSeq * kBatch, kWidth = 6;
/// Not divisible by 2, 3 or 4.
constexpr std::int64_t kVocab = 13;

DropoutSpec drop(float probability) {
  return {.key = {7, site_of("embedding"), 2},
          .probability = probability,
          .batch = kBatch,
          .sample0 = 5,
          .position0 = 0,
          .seq_length = kSeq};
}

Tensor ints(const Rank& r, const Shape& shape, std::int64_t step, std::int64_t modulus) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(static_cast<std::int32_t>((i * i * step + i / 3) % modulus));
  return Tensor::from(r.ctx, values, shape);
}

struct EmbeddingCase {
  bool positions = false;
  float dropout = 0.0f;
  DType out = DType::f32;
  bool trained = true;
};

void embed(Rank& r, const EmbeddingCase& c) {
  const auto table = r.parameter("table", r.split({kVocab, kWidth}, 0), 11, c.trained);
  const auto places = r.parameter("positions", r.whole({kSeq + 2, kWidth}), 13);
  const Placement stream = r.stream({kSeq, kBatch, kWidth});
  Tape tape;
  const Var tokens = tape.input(ints(r, {kSeq, kBatch}, 7, kVocab), false);
  const Var y =
      vocab_embedding(r.ctx, r.tp, tokens, *table, c.positions ? ints(r, {kRows}, 5, kSeq + 2) : Tensor(),
                      c.positions ? places.get() : nullptr, {c.out, drop(c.dropout)});
  EXPECT_EQ(y.value().shape(), stream.local());
  EXPECT_EQ(y.value().dtype(), c.out);
  r.keep("y", stream, y.value());
  if (!y.requires_grad()) return;
  const Tensor upstream = r.part(stream, 17);
  r.backward(tape, y, c.out == DType::f32 ? upstream : ops::cast(r.ctx, upstream, c.out));
  if (c.trained) r.keep_gradient(*table);
  if (c.positions) r.keep_gradient(*places, r.tp.sharded_sequence());
}

TEST(VocabEmbedding, IsSerialBitForBit) {
  for (const bool positions : {false, true}) {
    for (const float dropout : {0.0f, 0.4f}) {
      for (const DType out : {DType::f32, DType::bf16, DType::f16}) {
        const auto test = [=](Rank& r) { embed(r, {positions, dropout, out}); };
        test::Outcome serial = test::run_serial(test);
        for (const Layout& layout : all_layouts()) {
          SCOPED_TRACE(::testing::Message()
                       << layout << ", positions " << positions << ", dropout " << dropout << ", " << out);
          const auto ranks = test::run_parallel(layout, test);
          EXPECT_EQ(test::assemble(ranks, "y").back(), serial.at("y").values);
          // The rows of a table are sums in one order on every layout.
          EXPECT_EQ(test::assemble(ranks, "gradient of table").back(), serial.at("gradient of table").values);
          test::expect_serial(serial, ranks, 1e-6);
        }
      }
    }
  }
}

TEST(VocabEmbedding, FrozenTable) {
  for (const bool positions : {false, true}) {
    expect_serial(all_layouts(), [=](Rank& r) { embed(r, {positions, 0.4f, DType::f32, false}); });
  }
}

TEST(VocabEmbedding, WhatItSends) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(::testing::Message() << layout);
    test::run_parallel(layout, [&](Rank& r) {
      embed(r, {true, 0.4f, DType::bf16});
      const auto t = static_cast<std::uint64_t>(layout.size);
      const std::uint64_t whole = kRows * kWidth * 2;
      // One sum forward; with sequence parallelism the gradient is gathered for the table.
      EXPECT_EQ(r.tp.comm->stats().operations, layout.sequence ? 2u : 1u);
      EXPECT_EQ(r.tp.comm->stats().bytes_sent, 2 * (t - 1) * whole / t);
    });
  }
}

Tensor labels_of(const Rank& r, std::int64_t rows, std::int64_t vocab) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < rows; ++i)
    values.push_back(i % 5 == 3 ? -100 : static_cast<std::int32_t>(i * 7 % vocab));
  return Tensor::from(r.ctx, values, {rows});
}

void loss(Rank& r, std::int64_t vocab, float scale) {
  const Placement table = r.split({vocab, kWidth}, 0), place = r.split({kRows, vocab}, 1);
  const Tensor labels = labels_of(r, kRows, vocab);
  Tape tape;
  const Var logits = tape.input(r.part(place, 31, scale), true);
  const Var y = vocab_cross_entropy(r.ctx, r.tp, logits, table, labels);
  r.keep("loss", r.whole({kRows}), y.value());
  r.backward(tape, y, test::random_tensor(r.ctx, {kRows}, 33));
  r.keep("dlogits", place, tape.grad(logits));
}

TEST(VocabCrossEntropy, IsSerial) {
  for (const std::int64_t vocab : {4, 13, 211}) {
    for (const float scale : {1.0f, 8.0f})
      expect_serial(all_layouts(), [=](Rank& r) { loss(r, vocab, scale); });
  }
}

// The row of a label on another rank is softmax, not zeros; an ignored row is zeros everywhere.
TEST(VocabCrossEntropy, ALabelElsewhereIsNotIgnored) {
  test::run_parallel({2}, [](Rank& r) {
    const Placement table = r.split({4, 1}, 0);
    const Tensor labels = Tensor::from(r.ctx, std::vector<std::int32_t>{0, 3, -100}, {3});
    Tape tape;
    const Var logits = tape.input(Tensor::from(r.ctx, std::vector<float>(6, 2.0f), {3, 2}), true);
    const Var y = vocab_cross_entropy(r.ctx, r.tp, logits, table, labels);
    r.backward(tape, y, Tensor::from(r.ctx, std::vector<float>(3, 1.0f), {3}));
    const auto loss = y.value().to_floats();
    EXPECT_FLOAT_EQ(loss[0], std::log(4.0f));
    EXPECT_FLOAT_EQ(loss[1], std::log(4.0f));
    EXPECT_EQ(loss[2], 0.0f);
    const std::vector<float> expected = r.tp.rank() == 0
                                            ? std::vector<float>{-0.75f, 0.25f, 0.25f, 0.25f, 0.0f, 0.0f}
                                            : std::vector<float>{0.25f, 0.25f, 0.25f, -0.75f, 0.0f, 0.0f};
    const auto got = tape.grad(logits).to_floats();
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(got[i], expected[i], 1e-6f) << i;
  });
}

struct Extreme {
  float own, other;  ///< logits: the label's, and all others
  double loss;
};

TEST(VocabCrossEntropy, ConfidentAndExtremeRowsKeepTheirLoss) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<Extreme> rows = {
      {1000.0f, 990.0f, std::log1p(7 * std::exp(-10.0))},  // 3.2e-4 beside logits of 1000
      {30.0f, 10.0f, std::log1p(7 * std::exp(-20.0))},     // 1.4e-8: beyond what 1 + x can hold in fp32
      {1e30f, 0.0f, 0.0},
      {-1e30f, -1e30f, std::log(8.0)},
      {3.0f, -infinity, 0.0},
      {-50.0f, 50.0f, 100.0 + std::log(7.0)},
  };
  for (const int size : {2, 4}) {
    test::run_parallel({size}, [&](Rank& r) {
      const Placement table = r.split({8, 1}, 0);
      const std::int64_t cols = table.local()[0], first = table.segments()[0].global;
      for (const Extreme& row : rows) {
        for (std::int32_t label = 0; label < 8; ++label) {
          std::vector<float> logits;
          for (std::int64_t j = 0; j < cols; ++j) logits.push_back(first + j == label ? row.own : row.other);
          const Tensor labels = Tensor::from(r.ctx, std::vector<std::int32_t>{label}, {1});
          const Var x = Tensor::from(r.ctx, logits, {1, cols});
          const double got = vocab_cross_entropy(r.ctx, r.tp, x, table, labels).value().to_floats()[0];
          // 1e-7: terms that share a rank with the label are added to 1 in fp32, as without parts.
          EXPECT_NEAR(got, row.loss, 1e-7 + 1e-6 * row.loss) << row.own << ' ' << row.other << ' ' << label;
        }
      }
    });
  }
}

TEST(VocabCrossEntropy, NanReachesTheLossOfEveryRank) {
  for (const int where : {0, 5}) {
    test::run_parallel({2}, [&](Rank& r) {
      const Placement table = r.split({6, 1}, 0);
      std::vector<float> logits(3, 1.0f);
      if (where / 3 == r.tp.rank()) logits[static_cast<std::size_t>(where % 3)] = std::nanf("");
      const Tensor labels = Tensor::from(r.ctx, std::vector<std::int32_t>{1}, {1});
      const Var x = Tensor::from(r.ctx, logits, {1, 3});
      EXPECT_TRUE(std::isnan(vocab_cross_entropy(r.ctx, r.tp, x, table, labels).value().to_floats()[0]));
    });
  }
}

struct HeadCase {
  std::int64_t seq = kSeq, batch = kBatch, vocab = kVocab;
  bool x_grad = true, trained = true;
};

void head(Rank& r, const HeadCase& c) {
  const std::int64_t rows = c.seq * c.batch;
  const auto weight = r.parameter("weight", r.split({c.vocab, kWidth}, 0), 41, c.trained);
  const Placement place = r.stream({c.seq, c.batch, kWidth});
  const Tensor labels = labels_of(r, rows, c.vocab), upstream = test::random_tensor(r.ctx, {rows}, 43);
  Tape tape;
  const Var x = tape.input(r.part(place, 45), c.x_grad);
  const Var y = vocab_linear_cross_entropy(r.ctx, r.tp, x, *weight, labels, upstream);
  r.keep("loss", r.whole({rows}), y.value());
  r.backward(tape, y, upstream);
  if (c.x_grad) r.keep("dx", place, tape.grad(x));
  if (c.trained) r.keep_gradient(*weight);
  const Var plain = vocab_linear_cross_entropy(r.ctx, r.tp, x.value(), *weight, labels, {});
  EXPECT_EQ(plain.tape(), nullptr);
  EXPECT_EQ(plain.value().to_floats(), y.value().to_floats());
}

TEST(VocabLinearCrossEntropy, IsSerial) {
  expect_serial(all_layouts(), [](Rank& r) { head(r, {}); });
  // Several chunks and a rest.
  expect_serial({{2, false}, {3, true}}, [](Rank& r) {
    r.ctx.logit_bytes = 0;
    head(r, {.seq = 348, .vocab = 29});
  });
  for (const bool x_grad : {false, true})
    expect_serial(all_layouts(), [=](Rank& r) { head(r, {.x_grad = x_grad, .trained = !x_grad}); });
}

TEST(VocabLinearCrossEntropy, WhatItSends) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(::testing::Message() << layout);
    test::run_parallel(layout, [&](Rank& r) {
      const std::int64_t seq = 348, rows = seq * kBatch;
      r.ctx.logit_bytes = 0;  // 3 chunks, on CUDA too
      const auto weight = r.parameter("weight", r.split({kVocab, kWidth}, 0), 41);
      Tape tape;
      const Var x = tape.input(r.part(r.stream({seq, kBatch, kWidth}), 45), true);
      const Tensor upstream = test::random_tensor(r.ctx, {rows}, 43);
      const Var y = vocab_linear_cross_entropy(r.ctx, r.tp, x, *weight, labels_of(r, rows, kVocab), upstream);
      r.backward(tape, y, upstream);
      const auto t = static_cast<std::uint64_t>(layout.size), n = static_cast<std::uint64_t>(rows);
      const std::uint64_t activation = n * kWidth * 4;
      // x gathered and its gradient scattered, or the gradient summed; two floats a row in three exchanges.
      EXPECT_EQ(r.tp.comm->stats().operations, layout.sequence ? 5u : 4u);
      EXPECT_EQ(r.tp.comm->stats().bytes_sent, 2 * (t - 1) * activation / t + (t - 1) * 2 * n * 4);
    });
  }
}

TEST(VocabLinearCrossEntropy, RefusesAnotherUpstreamAndATableNotSplit) {
  test::run_parallel({2}, [](Rank& r) {
    const auto weight = r.parameter("weight", r.split({kVocab, kWidth}, 0), 41);
    const auto whole = r.parameter("whole", r.whole({kVocab, kWidth}), 41);
    const Tensor labels = labels_of(r, kRows, kVocab), upstream = test::random_tensor(r.ctx, {kRows}, 43);
    Tape tape;
    const Var x = tape.input(r.part(r.whole({kRows, kWidth}), 45), true);
    const Var y = vocab_linear_cross_entropy(r.ctx, r.tp, x, *weight, labels, upstream);
    EXPECT_THROW(tape.backward(r.ctx, y, test::random_tensor(r.ctx, {kRows}, 43)), InvalidArgument);
    EXPECT_THROW(vocab_linear_cross_entropy(r.ctx, r.tp, x.value(), *whole, labels, {}), InvalidArgument);
    const Tensor logits = r.part(r.whole({kRows, 3}), 1);
    EXPECT_THROW(vocab_cross_entropy(r.ctx, r.tp, logits, weight->placement(), labels), InvalidArgument);
  });
}

/// The head on the rows of some labels alone: losses and gradients as with all rows, and no more products.
void labelled_head(Rank& r, bool softcap) {
  const std::int64_t seq = 1404, rows = seq * kBatch;
  const auto weight = r.parameter("weight", r.split({kVocab, kWidth}, 0), 41);
  const auto bias = r.parameter("bias", r.split({kVocab}, 0), 47);
  const Placement place = r.stream({seq, kBatch, kWidth});
  std::vector<std::int32_t> labels(static_cast<std::size_t>(rows), -100), chosen, chosen_labels, places;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (i % 7 == 2) labels[i] = static_cast<std::int32_t>(i * 7 % kVocab);
    const bool taken = i % 7 == 2 || i == 5;  // one that does not count among them
    places.push_back(taken ? static_cast<std::int32_t>(chosen.size()) : -1);
    if (taken) chosen.push_back(static_cast<std::int32_t>(i));
    if (taken) chosen_labels.push_back(labels[i]);
  }
  const auto ints_of = [&](const std::vector<std::int32_t>& values) {
    return Tensor::from(r.ctx, values, {static_cast<std::int64_t>(values.size())});
  };
  const LabelledRows labelled{ints_of(chosen), ints_of(chosen_labels), ints_of(places)};
  const Tensor upstream = test::random_tensor(r.ctx, {rows}, 43), all = ints_of(labels);
  std::vector<std::vector<float>> found[2];
  for (const bool some : {false, true}) {
    weight->clear_grad();
    bias->clear_grad();
    Tape tape;
    const Var x = tape.input(r.part(place, 45), true);
    const Var y = vocab_linear_cross_entropy(r.ctx, r.tp, x, *weight, all, upstream, bias.get(),
                                             softcap ? 3.0f : 0.0f, some ? labelled : LabelledRows());
    r.backward(tape, y, upstream);
    found[some ? 1 : 0] = {y.value().to_floats(), tape.grad(x).to_floats(), weight->grad().to_floats(),
                           bias->grad().to_floats()};
    if (!some) continue;
    r.keep("loss", r.whole({rows}), y.value());
    r.keep("dx", place, tape.grad(x));
    r.keep_gradient(*weight);
    const Var plain = vocab_linear_cross_entropy(r.ctx, r.tp, x.value(), *weight, all, {}, bias.get(),
                                                 softcap ? 3.0f : 0.0f, labelled);
    EXPECT_EQ(plain.value().to_floats(), y.value().to_floats());
  }
  for (std::size_t what = 0; what < found[0].size(); ++what) {
    ASSERT_EQ(found[0][what].size(), found[1][what].size());
    for (std::size_t i = 0; i < found[0][what].size(); ++i)
      ASSERT_NEAR(found[0][what][i], found[1][what][i], 1e-5) << "value " << what << " at " << i;
  }
}

TEST(VocabLinearCrossEntropy, OfSomeRowsIsThatOfAll) {
  for (const bool softcap : {false, true})
    expect_serial(all_layouts(), [=](Rank& r) { labelled_head(r, softcap); });
}

/// Embedding, two linears and the loss by the same table: both its gradients in one.
void tied(Rank& r) {
  const auto table = r.parameter("table", r.split({kVocab, kWidth}, 0), 51);
  const auto places = r.parameter("positions", r.whole({kSeq, kWidth}), 53);
  const auto up = r.parameter("up", r.split({10, kWidth}, 0), 55);
  const auto down = r.parameter("down", r.split({kWidth, 10}, 1), 57);
  const Tensor upstream = test::random_tensor(r.ctx, {kRows}, 59);
  Tape tape;
  const Var e = vocab_embedding(r.ctx, r.tp, tape.input(ints(r, {kSeq, kBatch}, 7, kVocab), false), *table,
                                ints(r, {kRows}, 5, kSeq), places.get(), {r.dtype, drop(0.25f)});
  const Var h = column_linear(r.ctx, r.tp, e, *up, nullptr);
  const Var x =
      add(r.ctx, e, activated_row_linear(r.ctx, r.tp, h, ops::ActivationKind::gelu_tanh, *down, nullptr));
  const Tensor labels = labels_of(r, kRows, kVocab);
  const Var fused = vocab_linear_cross_entropy(r.ctx, r.tp, x, *table, labels, upstream);
  r.keep("loss", r.whole({kRows}), fused.value());
  r.backward(tape, fused, upstream);
  for (const Parameter* p : {table.get(), up.get(), down.get()}) r.keep_gradient(*p);
  r.keep_gradient(*places, r.tp.sharded_sequence());
}

TEST(VocabLinearCrossEntropy, ATiedModelIsSerial) { expect_serial(all_layouts(), tied); }

TEST(VocabLinearCrossEntropy, ATiedModelInBf16IsAsCloseAsSerialBf16) {
  const test::Outcome exact = test::run_serial(tied), serial = test::run_serial(tied, DType::bf16);
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(::testing::Message() << layout);
    const auto ranks = test::run_parallel(layout, tied, DType::bf16);
    for (const auto& [name, expected] : exact) {
      const double allowed = 1.5 * test::distance(serial.at(name).values, expected.values);
      for (const auto& whole : test::assemble(ranks, name))
        EXPECT_LE(test::distance(whole, expected.values), allowed) << name;
    }
  }
}

// column_linear and vocab_cross_entropy: the pair that the fused loss replaces.
TEST(VocabCrossEntropy, WithPaddedRowsOfLogits) {
  expect_serial(all_layouts(), [](Rank& r) {
    const auto weight = r.parameter("weight", r.split({kVocab, kWidth}, 0), 61);
    const Placement place = r.stream({kSeq, kBatch, kWidth});
    Tape tape;
    const Var x = tape.input(r.part(place, 63), true);
    Var logits = column_linear(r.ctx, r.tp, x, *weight, nullptr, 32);
    const Var y =
        vocab_cross_entropy(r.ctx, r.tp, std::move(logits), weight->placement(), labels_of(r, kRows, kVocab));
    r.keep("loss", r.whole({kRows}), y.value());
    r.backward(tape, y, test::random_tensor(r.ctx, {kRows}, 65));
    r.keep("dx", place, tape.grad(x));
    r.keep_gradient(*weight);
  });
}

}  // namespace
}  // namespace tessera
