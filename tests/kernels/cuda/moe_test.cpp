/// Experts on CUDA: the CPU's choices, and its numbers but for the last bits.

#include "kernels/api/moe.hpp"

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::random_values;
using test::Twin;

struct Sizes {
  std::int64_t seq, batch, experts, topk;
  bool normalized = true;
  std::int64_t tokens() const { return seq * batch; }
};

std::ostream& operator<<(std::ostream& out, const Sizes& s) {
  return out << s.seq << "x" << s.batch << " tokens, " << s.topk << " of " << s.experts << " experts"
             << (s.normalized ? " normalized" : "");
}

constexpr Sizes kSizes[] = {{0, 1, 4, 2},    {1, 1, 1, 1},  {1, 1, 7, 2},     {5, 3, 2, 1, false},
                            {3, 2, 16, 16},  {7, 2, 17, 3}, {2, 3, 61, 61},   {13, 1, 64, 8, false},
                            {37, 3, 131, 5}, {67, 2, 8, 2}, {2, 1, 1024, 40}, {1, 1, 1500, 3, false}};

std::vector<std::int32_t> whole_numbers(std::int64_t n, std::uint32_t site, std::int64_t below) {
  std::vector<std::int32_t> all;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto word = random_block({.seed = 5, .site = site}, static_cast<std::uint64_t>(i)).word[0];
    all.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(word) % below));
  }
  return all;
}

/// Logits with ties, and by the CPU what a router makes of them; the second sample has no token that counts.
template <typename T>
struct Routed {
  Sizes s;
  Twin<T> logits;
  Twin<float> weight, lse;
  Twin<std::int32_t> expert, counted;

  static std::vector<T> logits_of(const Sizes& s) {
    std::vector<T> logits = random_values<T>(s.tokens() * s.experts, 1, 3.0f);
    for (T& x : logits) x = static_cast<T>(std::round(8.0f * static_cast<float>(x)) / 8.0f);
    return logits;
  }
  static std::vector<std::int32_t> counted_of(const Sizes& s) {
    std::vector<std::int32_t> counted = whole_numbers(s.tokens(), 2, 4);
    for (std::int64_t t = 1; t < s.tokens() && s.batch > 1; t += s.batch)
      counted[static_cast<std::size_t>(t)] = 0;
    return counted;
  }

  Routed(const DeviceStream& stream, const Sizes& s) : Routed(stream, s, logits_of(s)) {}
  Routed(const DeviceStream& stream, const Sizes& s, const std::vector<T>& values)
      : s(s),
        logits(stream, values),
        weight(stream, random_values<float>(s.tokens() * s.topk, 3)),
        lse(stream, random_values<float>(s.tokens(), 4)),
        expert(stream, whole_numbers(s.tokens() * s.topk, 5, 9)),
        counted(stream, counted_of(s)) {
    cpu::route_forward(forward(logits.host.data(), weight.host.data(), expert.host.data(), lse.host.data()),
                       {});
  }
  RouteForward forward(const T* x, float* w, std::int32_t* e, float* sum) const {
    return {s.tokens(), s.experts, s.topk, dtype_of<T>::value, x, s.normalized, w, e, sum};
  }
  void on_device(const DeviceStream& stream) {
    cuda::route_forward(
        forward(logits.device.data(), weight.device.data(), expert.device.data(), lse.device.data()),
        stream.launch());
  }
  /// What the CPU found, for backward on the device.
  void copy_to_device(const DeviceStream& stream) const {
    const auto copy = [&](const auto& twin) {
      tessera::cuda::copy(twin.device.data(), twin.host.data(), twin.host.size() * 4, stream.get());
    };
    copy(weight), copy(lse), copy(expert);
  }
};

template <typename Body>
void for_each_case(Body body) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(s);
      body(stream, Routed<decltype(t)>(stream, s));
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST(CudaMoe, Route) {
  for_each_case([](const DeviceStream& stream, auto&& routed) {
    routed.on_device(stream);
    expect_same_bits(routed.expert.device.host(), routed.expert.host, "expert");
    expect_close(routed.weight, 1e-6f, "weight");
    expect_close(routed.lse, 1e-6f, "lse");
  });
}

/// With all gradients and padding, or with one of the gradients alone (3: none).
template <typename T>
void compare_gradients(const DeviceStream& stream, const Routed<T>& routed, int part) {
  SCOPED_TRACE(::testing::Message() << "part " << part);
  const Sizes& s = routed.s;
  const Twin<float> weight_grad(stream, random_values<float>(s.tokens() * s.topk, 6)),
      factor(stream, random_values<float>(s.batch * s.experts, 7)),
      balance_grad(stream, random_values<float>(s.batch, 8)),
      z_grad(stream, random_values<float>(s.tokens(), 9));
  Twin<T> grad(stream, random_values<T>(s.tokens() * s.experts, 10));
  const auto params = [&](auto side, T* out) {
    return RouteBackward{.tokens = s.tokens(),
                         .experts = s.experts,
                         .topk = s.topk,
                         .batch = s.batch,
                         .dtype = dtype_of<T>::value,
                         .logits = side(routed.logits),
                         .normalized = s.normalized,
                         .weight = side(routed.weight),
                         .expert = side(routed.expert),
                         .lse = side(routed.lse),
                         .weight_grad = part < 0 || part == 0 ? side(weight_grad) : nullptr,
                         .factor = part < 0 || part == 1 ? side(factor) : nullptr,
                         .balance_grad = part < 0 || part == 1 ? side(balance_grad) : nullptr,
                         .z_grad = part < 0 || part == 2 ? side(z_grad) : nullptr,
                         .counted = part < 0 ? side(routed.counted) : nullptr,
                         .logits_grad = out};
  };
  cpu::route_backward(params([](const auto& twin) { return twin.host.data(); }, grad.host.data()), {});
  routed.copy_to_device(stream);
  cuda::route_backward(params([](const auto& twin) { return twin.device.data(); }, grad.device.data()),
                       stream.launch());
  expect_close(grad, 2e-6f, "gradient");
}

TEST(CudaMoe, RouteGradient) {
  for_each_case([](const DeviceStream& stream, auto&& routed) { compare_gradients(stream, routed, -1); });
}

TEST(CudaMoe, RouteGradientOfEachPartAlone) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const bool normalized : {false, true}) {
    for (int part = 0; part < 4; ++part) {
      compare_gradients(stream, Routed<float>(stream, {5, 3, 40, 4, normalized}), part);
    }
  }
}

struct Sums {
  Twin<float> probability, chosen, factor, value;

  Sums(const DeviceStream& stream, const Sizes& s)
      : probability(stream, random_values<float>(s.batch * s.experts, 11)),
        chosen(stream, random_values<float>(s.batch * s.experts, 12)),
        factor(stream, random_values<float>(s.batch * s.experts, 13)),
        value(stream, random_values<float>(s.batch, 14)) {}
};

template <typename T>
RouteSums sums_of(const Sizes& s) {
  return {.tokens = s.tokens(),
          .experts = s.experts,
          .topk = s.topk,
          .batch = s.batch,
          .dtype = dtype_of<T>::value};
}

/// `routed` has the CPU's results on the device.
template <typename T>
void sum_on_device(const DeviceStream& stream, const Routed<T>& routed, const Sums& sums, bool counted) {
  RouteSums params = sums_of<T>(routed.s);
  params.logits = routed.logits.device.data();
  params.expert = routed.expert.device.data();
  params.lse = routed.lse.device.data();
  params.counted = counted ? routed.counted.device.data() : nullptr;
  params.probability = sums.probability.device.data();
  params.chosen = sums.chosen.device.data();
  cuda::route_sums(params, stream.launch());
}

TEST(CudaMoe, SumsAndBalance) {
  for_each_case([]<typename T>(const DeviceStream& stream, Routed<T>&& routed) {
    const Sizes& s = routed.s;
    routed.copy_to_device(stream);
    for (const bool counted : {false, true}) {
      Sums sums(stream, s);
      RouteSums params = sums_of<T>(s);
      params.logits = routed.logits.host.data();
      params.expert = routed.expert.host.data();
      params.lse = routed.lse.host.data();
      params.counted = counted ? routed.counted.host.data() : nullptr;
      params.probability = sums.probability.host.data();
      params.chosen = sums.chosen.host.data();
      cpu::route_sums(params, {});
      sum_on_device(stream, routed, sums, counted);
      expect_close(sums.probability, 1e-6f, "probability");
      expect_same_bits(sums.chosen.device.host(), sums.chosen.host, "chosen");

      cpu::balance_forward({s.batch, s.experts, s.topk, sums.probability.host.data(), sums.chosen.host.data(),
                            sums.factor.host.data(), sums.value.host.data()},
                           {});
      cuda::balance_forward({s.batch, s.experts, s.topk, sums.probability.device.data(),
                             sums.chosen.device.data(), sums.factor.device.data(), sums.value.device.data()},
                            stream.launch());
      expect_same_bits(sums.factor.device.host(), sums.factor.host, "factor");
      expect_close(sums.value, 1e-6f, "value");
    }
  });
}

// As training must not depend on how many samples make a micro-batch.
TEST(CudaMoe, ASampleHasTheSumsItHasAlone) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  const Sizes s{700, 3, 40, 2}, alone{700, 1, 40, 2};
  const std::vector<float> logits = random_values<float>(s.tokens() * s.experts, 1);
  const Routed<float> all(stream, s, logits);
  all.copy_to_device(stream);
  const Sums together(stream, s);
  sum_on_device(stream, all, together, false);
  const std::vector<float> want = together.probability.device.host();
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    std::vector<float> own;
    for (std::int64_t i = 0; i < s.seq; ++i) {
      const auto row = logits.begin() + (i * s.batch + sample) * s.experts;
      own.insert(own.end(), row, row + s.experts);
    }
    const Routed<float> one(stream, alone, own);
    one.copy_to_device(stream);
    const Sums sums(stream, alone);
    sum_on_device(stream, one, sums, false);
    const auto first = want.begin() + sample * s.experts;
    expect_same_bits(sums.probability.device.host(), {first, first + s.experts}, "probability");
  }
}

void compare_slots(const DeviceStream& stream, std::int64_t tokens, std::int64_t topk, std::int64_t experts) {
  SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << topk << " of " << experts << " experts");
  const std::int64_t slots = tokens * topk;
  std::vector<std::int32_t> chosen = whole_numbers(slots, 15, experts);
  std::replace(chosen.begin(), chosen.end(), 1, 0);  // nobody chooses this one
  const Twin<std::int32_t> expert(stream, chosen);
  Twin<std::int32_t> row(stream, whole_numbers(slots, 16, 9)), slot(stream, whole_numbers(slots, 17, 9)),
      token(stream, whole_numbers(slots, 18, 9)), count(stream, whole_numbers(experts, 19, 9));
  cpu::sort_slots({slots, experts, topk, expert.host.data(), row.host.data(), slot.host.data(),
                   token.host.data(), count.host.data()},
                  {});
  cuda::sort_slots({slots, experts, topk, expert.device.data(), row.device.data(), slot.device.data(),
                    token.device.data(), count.device.data()},
                   stream.launch());
  expect_same_bits(row.device.host(), row.host, "row");
  expect_same_bits(slot.device.host(), slot.host, "slot");
  expect_same_bits(token.device.host(), token.host, "token");
  expect_same_bits(count.device.host(), count.host, "count");
}

TEST(CudaMoe, SlotsAreSortedStably) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t tokens : {0, 1, 31, 300, 2049}) {
    for (const std::int64_t experts : {1, 2, 7, 64}) {
      compare_slots(stream, tokens, 1, experts);
      compare_slots(stream, tokens, 3, experts);
    }
  }
  compare_slots(stream, 41, 6, 1024);
}

template <typename T>
void combine(const DeviceStream& stream, std::int64_t topk, std::int64_t cols, bool weighted,
             std::size_t offset) {
  SCOPED_TRACE(::testing::Message() << topk << " rows of " << cols << ", offset " << offset
                                    << (weighted ? ", weighted" : ""));
  constexpr std::int64_t kTokens = 11;
  const std::int64_t slots = kTokens * topk;
  const Twin<T> x(stream, random_values<T>(slots * cols, 20), offset);
  const Twin<float> weight(stream, random_values<float>(slots, 21));
  const Twin<std::int32_t> row(stream, whole_numbers(slots, 22, slots));
  Twin<T> y(stream, random_values<T>(kTokens * cols, 23), offset);
  CombineSlots params{kTokens, topk, cols, dtype_of<T>::value, x.host.data(), row.host.data()};
  params.weight = weighted ? weight.host.data() : nullptr;
  params.y = y.host.data();
  cpu::combine_slots(params, {});
  params.x = x.device.data();
  params.row = row.device.data();
  params.weight = weighted ? weight.device.data() : nullptr;
  params.y = y.device.data();
  cuda::combine_slots(params, stream.launch());
  expect_close(y, 1e-6f, "y");
}

template <typename T>
void weigh(const DeviceStream& stream, std::int64_t cols, std::size_t offset) {
  SCOPED_TRACE(::testing::Message() << "rows of " << cols << ", offset " << offset);
  constexpr std::int64_t kRows = 7;
  Twin<T> x(stream, random_values<T>(kRows * cols, 24), offset),
      y(stream, random_values<T>(kRows * cols, 25), offset);
  const Twin<float> weight(stream, random_values<float>(kRows, 26));
  Twin<float> dot(stream, random_values<float>(kRows, 27));
  cpu::weigh_rows(
      {kRows, cols, dtype_of<T>::value, x.host.data(), y.host.data(), weight.host.data(), dot.host.data()},
      {});
  cuda::weigh_rows({kRows, cols, dtype_of<T>::value, x.device.data(), y.device.data(), weight.device.data(),
                    dot.device.data()},
                   stream.launch());
  expect_same_bits(x.device.host(), x.host, "x");
  expect_same_bits(y.device.host(), y.host, "y");
  expect_close(dot, 1e-6f * std::sqrt(static_cast<float>(cols)), "dot");
}

TEST(CudaMoe, RowsAreCombinedAndWeighed) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    for (const std::int64_t cols : {1, 3, 31, 64, 257, 768, 1600, 5120}) {
      for (const std::size_t offset : {0, 1}) {
        weigh<decltype(t)>(stream, cols, offset);
        for (const std::int64_t topk : {1, 2, 5}) combine<decltype(t)>(stream, topk, cols, topk != 2, offset);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TEST(CudaMoe, NothingToDo) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  cuda::combine_slots({.topk = 2, .cols = 8}, stream.launch());
  cuda::weigh_rows({.cols = 8}, stream.launch());
  stream.synchronize();
}

// A run that has diverged must be seen in its loss.
TEST(CudaMoe, ValuesThatAreNotFinite) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const float value : {NAN, -NAN, INFINITY, -INFINITY, -0.0f}) {
    for (const std::size_t where : {0, 2, 36}) {
      for (const bool normalized : {false, true}) {
        std::vector<float> logits(37, value == 0.0f ? 0.0f : -1e30f);
        logits[where] = value;
        Routed<float> routed(stream, {1, 1, 37, 3, normalized}, logits);
        routed.on_device(stream);
        expect_same_bits(routed.expert.device.host(), routed.expert.host, "expert");
        expect_close(routed.weight, 1e-6f, "weight");
        expect_close(routed.lse, 1e-6f, "lse");
      }
    }
  }
}

TEST(CudaMoe, TheOrderOfThreadsChangesNothing) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  const Sizes s{37, 3, 70, 5};
  test::in_every_order([&] {
    Routed<float> routed(stream, s);
    routed.on_device(stream);
    expect_same_bits(routed.expert.device.host(), routed.expert.host, "expert");
    expect_close(routed.weight, 1e-6f, "weight");
    compare_gradients(stream, routed, -1);
    compare_slots(stream, 300, 3, 5);
    weigh<float>(stream, 768, 0);
  });
  const Routed<float> routed(stream, s);
  routed.copy_to_device(stream);
  const Sums want(stream, s);
  sum_on_device(stream, routed, want, true);
  test::in_every_order([&] {
    const Sums sums(stream, s);
    sum_on_device(stream, routed, sums, true);
    expect_same_bits(sums.probability.device.host(), want.probability.device.host(), "probability");
    expect_same_bits(sums.chosen.device.host(), want.chosen.device.host(), "chosen");
  });
}

}  // namespace
}  // namespace tessera::kernels
