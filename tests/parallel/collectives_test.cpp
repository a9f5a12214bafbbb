/// The conjugate pairs against central differences taken over all ranks together.

#include "tests/parallel/layouts.hpp"

namespace tessera {
namespace {

using test::Rank;

constexpr std::int64_t kSeq = 12;

/// A pair as a function of a group: who holds which input, and whose results a loss sees.
struct Pair {
  const char* name;
  std::function<Var(Rank&, const Var&)> apply;
  bool input_replicated;   ///< one input, held by all; else each rank has its own
  bool input_split;        ///< own positions only
  bool result_replicated;  ///< all ranks have the same result, which a loss sees once
};

std::vector<std::int64_t> feature_counts(const Rank& r) {
  std::vector<std::int64_t> counts;
  for (int i = 0; i < r.tp.size(); ++i) counts.push_back(1 + i % 2);
  return counts;
}

std::vector<Pair> pairs() {
  return {
      {"copy", [](Rank& r, const Var& x) { return copy_to_tensor_ranks(r.ctx, r.tp, x); }, true, false,
       false},
      {"reduce", [](Rank& r, const Var& x) { return reduce_from_tensor_ranks(r.ctx, r.tp, x); }, false, false,
       true},
      {"scatter", [](Rank& r, const Var& x) { return scatter_sequence(r.ctx, r.tp, x); }, true, false, false},
      {"gather", [](Rank& r, const Var& x) { return gather_sequence(r.ctx, r.tp, x); }, false, true, false},
      {"reduce-scatter", [](Rank& r, const Var& x) { return reduce_scatter_sequence(r.ctx, r.tp, x); }, false,
       false, false},
      {"features",
       [](Rank& r, const Var& x) {
         // An activation on both sides, so that a wrong place of a value shows.
         return activation(r.ctx, gather_features(r.ctx, r.tp, x, feature_counts(r)),
                           ops::ActivationKind::silu);
       },
       false, false, true},
      {"first",
       [](Rank& r, const Var& x) {
         TensorParallel split = r.tp;
         split.sequence = true;
         return first_position(r.ctx, split, x);
       },
       false, true, true},
  };
}

Shape input_shape(const Rank& r, const Pair& pair) {
  const bool features = std::string(pair.name) == "features";
  return {pair.input_split ? kSeq / r.tp.size() : kSeq, 1,
          features ? feature_counts(r)[static_cast<std::size_t>(r.tp.rank())] : 2};
}

/// Every rank's share of the scalar, for each input element moved up and down: shares[rank][2 i + down].
struct Numeric {
  std::vector<std::vector<double>> shares;
  std::vector<std::vector<float>> analytic;
  std::vector<std::int64_t> inputs;  ///< elements per rank
};

void measure(Rank& r, const Pair& pair, Numeric& out) {
  const auto own = static_cast<std::size_t>(r.tp.rank());
  const unsigned seed = pair.input_replicated ? 81 : 81 + static_cast<unsigned>(r.tp.rank());
  const Tensor x = test::random_tensor(r.ctx, input_shape(r, pair), seed);
  Tape tape;
  const Var in = tape.input(x, true);
  const Var y = pair.apply(r, in);
  const Tensor upstream = test::random_tensor(
      r.ctx, y.value().shape(), pair.result_replicated ? 91 : 91 + static_cast<unsigned>(r.tp.rank()));
  tape.backward(r.ctx, y, upstream);
  const Tensor& gradient = tape.grad(in);  // undefined where there is none
  out.analytic[own] =
      gradient ? gradient.to_floats() : std::vector<float>(static_cast<std::size_t>(x.numel()));

  const auto u = upstream.to_floats();
  const bool counts = !pair.result_replicated || r.tp.rank() == 0;
  const auto share = [&] {
    const auto values = pair.apply(r, x).value().to_floats();
    double sum = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i)
      sum += static_cast<double>(values[i]) * static_cast<double>(u[i]);
    return counts ? sum : 0.0;
  };
  // Every rank calls as often as the others, moving its input only in its turn.
  for (int turn = 0; turn < r.tp.size(); ++turn) {
    const bool moves = pair.input_replicated ? turn >= 0 : turn == r.tp.rank();
    if (pair.input_replicated && turn > 0) break;
    for (std::int64_t i = 0; i < out.inputs[static_cast<std::size_t>(turn)]; ++i) {
      for (const float step : {0.5f, -0.5f}) {
        const std::vector<float> kept = x.to_floats();
        if (moves) {
          std::vector<float> moved = kept;
          moved[static_cast<std::size_t>(i)] += step * 0.0625f;
          x.copy_from_host(moved.data());
        }
        out.shares[own].push_back(share());
        if (moves) x.copy_from_host(kept.data());
      }
    }
  }
}

TEST(Collectives, PairsAgainstDifferences) {
  for (const int size : {2, 3, 4}) {
    for (const Pair& pair : pairs()) {
      SCOPED_TRACE(::testing::Message() << pair.name << " on " << size << " ranks");
      const auto n = static_cast<std::size_t>(size);
      Numeric out{std::vector<std::vector<double>>(n), std::vector<std::vector<float>>(n), {}};
      out.inputs.resize(n);
      test::run_parallel({size, true}, [&](Rank& r) {
        out.inputs[static_cast<std::size_t>(r.tp.rank())] = input_shape(r, pair).numel();
        r.tp.comm->barrier(r.ctx);
        measure(r, pair, out);
      });
      std::vector<double> numeric;
      for (std::size_t i = 0; i < out.shares[0].size(); i += 2) {
        double up = 0.0, down = 0.0;
        for (const auto& shares : out.shares) up += shares[i], down += shares[i + 1];
        numeric.push_back((up - down) / 0.0625);
      }
      std::vector<float> analytic = out.analytic[0];
      for (std::size_t r = 1; r < n; ++r) {
        if (pair.input_replicated) {
          EXPECT_EQ(out.analytic[r], out.analytic[0]);
        } else {
          analytic.insert(analytic.end(), out.analytic[r].begin(), out.analytic[r].end());
        }
      }
      EXPECT_LE(test::distance(analytic, numeric), 1e-3);
    }
  }
}

TEST(Collectives, OneRankGivesTheInputBack) {
  test::run_parallel({1, true}, [](Rank& r) {
    const Var x = test::random_tensor(r.ctx, {3, 1, 1}, 1);
    for (const Pair& pair : pairs()) {
      if (std::string(pair.name) == "first") continue;  // of one rank too a part
      if (std::string(pair.name) != "features") {
        EXPECT_EQ(pair.apply(r, x).value().raw(), x.value().raw()) << pair.name;
      }
    }
    const std::vector<std::int64_t> counts{1};
    EXPECT_EQ(gather_features(r.ctx, r.tp, x, counts).value().raw(), x.value().raw());
  });
}

TEST(Collectives, ValuesOfThePairs) {
  test::run_parallel({3, true}, [](Rank& r) {
    const auto rank = static_cast<float>(r.tp.rank());
    const Tensor x = Tensor::from(r.ctx, std::vector<float>{rank, rank + 10, rank + 20}, {3, 1, 1});
    const auto values = [](const Var& v) { return v.value().to_floats(); };
    using Floats = std::vector<float>;
    EXPECT_EQ(values(copy_to_tensor_ranks(r.ctx, r.tp, x)), x.to_floats());
    EXPECT_EQ(values(reduce_from_tensor_ranks(r.ctx, r.tp, x)), (Floats{3, 33, 63}));
    EXPECT_EQ(values(scatter_sequence(r.ctx, r.tp, x)), (Floats{rank + 10 * rank}));
    EXPECT_EQ(values(gather_sequence(r.ctx, r.tp, x)), (Floats{0, 10, 20, 1, 11, 21, 2, 12, 22}));
    EXPECT_EQ(values(reduce_scatter_sequence(r.ctx, r.tp, x)), (Floats{3 + 30 * rank}));
    const std::vector<std::int64_t> counts{1, 1, 1};
    EXPECT_EQ(values(gather_features(r.ctx, r.tp, x, counts)), (Floats{0, 1, 2, 10, 11, 12, 20, 21, 22}));
    EXPECT_EQ(x.to_floats(), (Floats{rank, rank + 10, rank + 20})) << "the input was written to";
  });
}

}  // namespace
}  // namespace tessera
