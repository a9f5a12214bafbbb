#include <cstring>
#include <random>

#include "tessera/comm/placement.hpp"
#include "tests/comm/conformance.hpp"

// What collectives compute.

namespace tessera::test {

void run_self(int, const CommOptions& options, const RankFunction& function) {
  function(make_self_communicator("world", options));
}

INSTANTIATE_TEST_SUITE_P(Self, Conformance, testing::Values(Backend{"self", 1, run_self}), backend_name);
INSTANTIATE_TEST_SUITE_P(Local, Conformance,
                         testing::Values(Backend{"local", 5,
                                                 [](int n, const CommOptions& options,
                                                    const RankFunction& f) { run_local(n, options, f); }}),
                         backend_name);

namespace {

TEST_P(Conformance, AllReduce) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    for (const DType dtype : reducible_dtypes()) {
      for (const std::int64_t n : kLengths) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
          const Tensor x = tensor_of(ctx, dtype, marks(comm->rank(), 0, n));
          comm->all_reduce(ctx, x, op).wait(ctx);
          EXPECT_EQ(read_values(x), reduced_marks(comm->size(), op, 0, n, dtype)) << dtype << " x " << n;
        }
      }
    }
  });
}

TEST_P(Conformance, ReduceScatter) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    const auto check = [&](DType dtype, const Counts& counts, bool give_counts, bool in_place, ReduceOp op) {
      const std::int64_t begin = sum_of(counts, rank), own = counts[static_cast<std::size_t>(rank)];
      const Tensor in = tensor_of(ctx, dtype, marks(rank, 0, sum_of(counts, n)));
      const Tensor out = in_place ? in.narrow(0, begin, own) : Tensor::empty(ctx, {own}, dtype);
      comm->reduce_scatter(ctx, in, out, give_counts ? counts : Counts{}, op).wait(ctx);
      EXPECT_EQ(read_values(out), reduced_marks(n, op, begin, own, dtype))
          << dtype << (in_place ? " in place" : "");
      // Nothing but the own block of the input may change.
      std::vector<double> left = marks(rank, 0, sum_of(counts, n)), found = read_values(in);
      if (in_place) std::copy_n(found.begin() + begin, own, left.begin() + begin);
      EXPECT_EQ(found, left);
    };
    for (const DType dtype : reducible_dtypes()) {
      for (const bool in_place : {false, true}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
          check(dtype, uneven(n), true, in_place, op);
          check(dtype, Counts(static_cast<std::size_t>(n), 5), false, in_place, op);
          check(dtype, Counts(static_cast<std::size_t>(n), 0), true, in_place, op);
        }
        check(dtype, Counts(static_cast<std::size_t>(n), 3001), true, in_place, ReduceOp::sum);
      }
    }
  });
}

TEST_P(Conformance, AllGather) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    const auto check = [&](DType dtype, const Counts& counts, bool give_counts, bool in_place) {
      const std::int64_t begin = sum_of(counts, rank), own = counts[static_cast<std::size_t>(rank)];
      const Tensor out = Tensor::empty(ctx, {sum_of(counts, n)}, dtype);
      const Tensor in = in_place ? out.narrow(0, begin, own) : Tensor::empty(ctx, {own}, dtype);
      write_values(in, marks(rank, 0, own));
      comm->all_gather(ctx, in, out, give_counts ? counts : Counts{}).wait(ctx);
      std::vector<double> expected;
      for (int r = 0; r < n; ++r) {
        for (const double value : marks(r, 0, counts[static_cast<std::size_t>(r)])) expected.push_back(value);
      }
      EXPECT_EQ(read_values(out), expected) << dtype << (in_place ? " in place" : "");
    };
    for (const DType dtype : all_dtypes()) {
      for (const bool in_place : {false, true}) {
        for (const int shift : {0, 1, 2}) check(dtype, uneven(n, shift), true, in_place);
        check(dtype, Counts(static_cast<std::size_t>(n), 5), false, in_place);
        check(dtype, Counts(static_cast<std::size_t>(n), 0), true, in_place);
        check(dtype, Counts(static_cast<std::size_t>(n), 3001), true, in_place);
      }
    }
  });
}

TEST_P(Conformance, Broadcast) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    for (const DType dtype : all_dtypes()) {
      for (const std::int64_t n : kLengths) {
        const int root = static_cast<int>(n) % comm->size();
        const Tensor x = tensor_of(ctx, dtype, marks(comm->rank(), 0, n));
        comm->broadcast(ctx, x, root).wait(ctx);
        EXPECT_EQ(read_values(x), marks(root, 0, n)) << dtype << " x " << n;
      }
    }
  });
}

TEST_P(Conformance, AllToAll) {
  on_each_size(1, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size(), rank = comm->rank();
    const auto count = [](int from, int to, int scale) {
      return static_cast<std::int64_t>(scale) * ((from * 3 + to * 2) % 4);
    };
    for (const DType dtype : all_dtypes()) {
      for (const int scale : {0, 1, 500}) {
        Counts sent, received;
        std::vector<double> values, expected;
        for (int r = 0; r < n; ++r) {
          sent.push_back(count(rank, r, scale));
          received.push_back(count(r, rank, scale));
          for (const double v : marks(rank, 100 * r, sent.back())) values.push_back(v);
          for (const double v : marks(r, 100 * rank, received.back())) expected.push_back(v);
        }
        const Tensor out = Tensor::empty(ctx, {sum_of(received, n)}, dtype);
        comm->all_to_all(ctx, tensor_of(ctx, dtype, values), out, sent, received).wait(ctx);
        EXPECT_EQ(read_values(out), expected) << dtype << " x " << scale;
      }
    }
  });
}

/// Values of very different size: any other order of the additions would give other bits.
TEST_P(Conformance, SumsAreInRankOrderBitForBit) {
  if (!GetParam().rank_order) GTEST_SKIP() << "adds in an order of its own";
  constexpr std::int64_t kLength = 1003;
  const auto values_of = [](int rank) {
    std::mt19937 generator(static_cast<unsigned>(rank) + 1);
    std::vector<float> values;
    for (std::int64_t i = 0; i < kLength; ++i) {
      const float fraction = static_cast<float>(generator() >> 8) * 0x1p-23f - 1.0f;
      values.push_back(std::ldexp(fraction, static_cast<int>(generator() % 40)));
    }
    return values;
  };
  on_each_size(1, 5, [&](const auto& comm) {
    const ExecCtx ctx = context();
    std::vector<float> expected = values_of(0);
    for (int r = 1; r < comm->size(); ++r) {
      const std::vector<float> values = values_of(r);
      for (std::size_t i = 0; i < values.size(); ++i) expected[i] = expected[i] + values[i];
    }
    Counts counts;
    for (int r = 0; r < comm->size(); ++r) counts.push_back(part_of(kLength, r, comm->size()).count);
    for (int repetition = 0; repetition < 3; ++repetition) {
      const Tensor x = Tensor::from(ctx, values_of(comm->rank()), {kLength});
      const Tensor y = Tensor::from(ctx, values_of(comm->rank()), {kLength});
      const Part part = part_of(kLength, comm->rank(), comm->size());
      const Tensor own = y.narrow(0, part.begin, part.count);
      comm->all_reduce(ctx, x).wait(ctx);
      comm->reduce_scatter(ctx, y, own, counts).wait(ctx);
      EXPECT_EQ(std::memcmp(x.raw(), expected.data(), x.nbytes()), 0);
      EXPECT_EQ(std::memcmp(own.raw(), expected.data() + part.begin, own.nbytes()), 0);
    }
  });
}

/// Sums that fp32 holds exactly: one rounding gives the nearest 16-bit value, a rounding per addition does
/// not.
TEST_P(Conformance, SixteenBitSumsAreRoundedOnce) {
  if (!GetParam().rank_order) GTEST_SKIP() << "rounds after each addition";
  on_each_size(2, 5, [](const auto& comm) {
    const ExecCtx ctx = context();
    const int n = comm->size();
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const int bits = dtype == DType::bf16 ? 7 : 10;
      const auto value = [&](int rank, int i) {  // an odd last bit and very small terms beside it
        const double large = std::ldexp(1.0, bits) + 1 + i % 50;
        return rank == 0 ? large : (rank % 2 ? 0.25 : 0.5) * (1 + (i + rank) % 3) * (i % 7 == 3 ? -1 : 1);
      };
      std::vector<double> own, expected;
      bool matters = false;
      for (int i = 0; i < 200; ++i) {
        double exact = value(0, i), each_time = value(0, i);
        for (int r = 1; r < n; ++r) {
          exact += value(r, i);
          each_time = rounded(each_time + value(r, i), dtype);
        }
        own.push_back(value(comm->rank(), i));
        expected.push_back(rounded(exact, dtype));
        matters = matters || expected.back() != each_time;
      }
      EXPECT_TRUE(matters || n == 2);
      const Tensor x = tensor_of(ctx, dtype, own);
      comm->all_reduce(ctx, x).wait(ctx);
      EXPECT_EQ(read_values(x), expected) << dtype;
      const Tensor in = tensor_of(ctx, dtype, own), out = Tensor::empty(ctx, {n == 1 ? 200 : 40}, dtype);
      Counts counts(static_cast<std::size_t>(n), 40);
      comm->reduce_scatter(ctx, in.narrow(0, 0, 40 * n), out, counts).wait(ctx);
      const auto first = expected.begin() + 40 * comm->rank();
      EXPECT_EQ(read_values(out), std::vector<double>(first, first + 40)) << dtype;
    }
  });
}

TEST_P(Conformance, MaximumOfNanIsNan) {
  if (!GetParam().rank_order) GTEST_SKIP() << "does not say what the maximum with a NaN is";
  on_each_size(1, 3, [](const auto& comm) {
    const ExecCtx ctx = context();
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      for (int where = 0; where < comm->size(); ++where) {
        const double own = comm->rank() == where ? std::nan("") : 5.0;
        const Tensor x = tensor_of(ctx, dtype, {own, -1.0});
        comm->all_reduce(ctx, x, ReduceOp::max).wait(ctx);
        EXPECT_TRUE(std::isnan(read_values(x)[0])) << dtype << " on rank " << where;
        EXPECT_EQ(read_values(x)[1], -1.0);
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test
