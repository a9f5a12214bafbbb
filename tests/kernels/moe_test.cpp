/// Routing to experts, and the way of rows to them and back, against plain loops in double.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "kernels/cpu/vector/moe.hpp"
#include "tests/kernels/moe_problem.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;
using testing::index;
using testing::RouteProblem;
using testing::RouteUpstream;

/// One and two threads, then each copy for an instruction set in two parts.
template <typename P>
struct Way {
  std::string name;
  std::function<void(const P&)> run;
};

template <typename P, typename Copies, typename Rows>
std::vector<Way<P>> ways(void (*launcher)(const P&, const Launch&), const Copies& copies, Rows rows) {
  std::vector<Way<P>> all;
  for (const int threads : {1, 2}) {
    all.push_back(
        {std::to_string(threads) + " threads", [=](const P& p) { launcher(p, {.threads = threads}); }});
  }
  for (auto [isa, function] : copies) {
    all.push_back({cpu::isa_name(isa), [function = function, rows](const P& p) {
                     function(p, 0, rows(p) / 2);
                     function(p, rows(p) / 2, rows(p));
                   }});
  }
  return all;
}

template <typename Body>
void for_each_problem(Body body) {
  struct Sizes {
    std::int64_t seq, batch, experts, topk;
  };
  for (const Sizes& s :
       {Sizes{1, 1, 1, 1}, Sizes{1, 1, 7, 2}, Sizes{5, 3, 2, 1}, Sizes{3, 2, 16, 16}, Sizes{7, 2, 17, 3},
        Sizes{2, 3, 61, 61}, Sizes{13, 1, 64, 8}, Sizes{37, 3, 131, 5}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const bool normalized : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << s.seq << "x" << s.batch << " tokens, " << s.topk << " of " << s.experts
                     << " experts, " << dtype << (normalized ? " normalized" : ""));
        body(RouteProblem(s.seq, s.batch, s.experts, s.topk, normalized, dtype));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

struct Routed {
  Buffer weight, lse;
  std::vector<std::int32_t> expert;
};

Routed routed(const RouteProblem& p, const std::function<void(const RouteForward&)>& run) {
  Routed out{Buffer(DType::f32, p.tokens() * p.topk), Buffer(DType::f32, p.tokens()),
             std::vector<std::int32_t>(index(p.tokens() * p.topk), -1)};
  run({.tokens = p.tokens(),
       .experts = p.experts,
       .topk = p.topk,
       .dtype = p.logits.dtype(),
       .logits = p.logits.data(),
       .normalized = p.normalized,
       .weight = out.weight.floats(),
       .expert = out.expert.data(),
       .lse = out.lse.floats()});
  return out;
}
Routed routed(const RouteProblem& p) {
  return routed(p, [](const RouteForward& params) { cpu::route_forward(params, {}); });
}

TEST(Moe, Route) {
  const auto all = ways(&cpu::route_forward, TESSERA_COPIES(route_forward_rows),
                        [](const RouteForward& p) { return p.tokens; });
  for_each_problem([&](const RouteProblem& p) {
    const std::vector<std::int32_t> chosen = choices(p);
    const std::vector<double> weight = weights(p, p.logits.values(), chosen);
    std::vector<double> lse;
    for (std::int64_t t = 0; t < p.tokens(); ++t) lse.push_back(log_sum_exp(p, p.logits.values(), t));
    const Routed one = routed(p, all[0].run), two = routed(p, all[1].run);
    expect_same(one.weight, two.weight);
    expect_same(one.lse, two.lse);
    for (const auto& way : all) {
      SCOPED_TRACE(way.name);
      const Routed got = routed(p, way.run);
      ASSERT_EQ(got.expert, chosen);
      expect_close(got.weight, weight, 5e-7);
      expect_close(got.lse, lse, 5e-7);
    }
  });
}

/// Which of the upstream gradients there are.
struct Parts {
  bool weight, balance, z, counted;
};

Buffer gradient(const RouteProblem& p, const RouteUpstream& up, const Parts& parts,
                const std::function<void(const RouteBackward&)>& run) {
  Routed forward = routed(p);
  Buffer out(p.logits.dtype(), p.logits.size(), std::nan(""));
  run({.tokens = p.tokens(),
       .experts = p.experts,
       .topk = p.topk,
       .batch = p.batch,
       .dtype = p.logits.dtype(),
       .logits = p.logits.data(),
       .normalized = p.normalized,
       .weight = forward.weight.floats(),
       .expert = forward.expert.data(),
       .lse = forward.lse.floats(),
       .weight_grad = parts.weight ? static_cast<const float*>(up.weight.data()) : nullptr,
       .factor = parts.balance ? static_cast<const float*>(up.factor.data()) : nullptr,
       .balance_grad = parts.balance ? static_cast<const float*>(up.balance.data()) : nullptr,
       .z_grad = parts.z ? static_cast<const float*>(up.z.data()) : nullptr,
       .counted = parts.counted ? p.counted.data() : nullptr,
       .logits_grad = out.data()});
  return out;
}

TEST(Moe, RouteGradientIsThatOfDifferences) {
  const auto all = ways(&cpu::route_backward, TESSERA_COPIES(route_backward_rows),
                        [](const RouteBackward& p) { return p.tokens; });
  for_each_problem([&](const RouteProblem& p) {
    const RouteUpstream up(p);
    const std::vector<double> want = differences(p, up);
    const Parts every{true, true, true, true};
    expect_same(gradient(p, up, every, all[0].run), gradient(p, up, every, all[1].run));
    for (const auto& way : all) {
      SCOPED_TRACE(way.name);
      expect_close(gradient(p, up, every, way.run), want, 2e-6);
    }
  });
}

TEST(Moe, RouteGradientOfEachPartAlone) {
  const auto run = [](const RouteBackward& params) { cpu::route_backward(params, {}); };
  for (const bool normalized : {false, true}) {
    for (const bool counted : {false, true}) {
      for (int part = 0; part < 4; ++part) {  // the last: none
        SCOPED_TRACE(::testing::Message()
                     << "part " << part << (normalized ? " normalized" : "") << (counted ? " counted" : ""));
        RouteProblem p(5, 3, 9, 4, normalized, DType::f32);
        RouteUpstream up(p);
        const Parts parts{part == 0, part == 1, part == 2, counted};
        if (part != 0) up.weight = Buffer(DType::f32, up.weight.size());
        if (part != 1) up.balance = Buffer(DType::f32, up.balance.size());
        if (part != 2) up.z = Buffer(DType::f32, up.z.size());
        if (!counted) p.counted.assign(p.counted.size(), 1);
        expect_close(gradient(p, up, parts, run), differences(p, up), 2e-6);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Moe, ASureRouterKeepsItsSmallGradients) {
  RouteProblem p(1, 1, 3, 2, true, DType::f32);
  for (std::int64_t e = 0; e < 3; ++e) p.logits.set(e, e == 1 ? 20.0 : 0.0);
  const RouteUpstream up(p);
  const Buffer got = gradient(p, up, {true, false, false, false},
                              [](const RouteBackward& params) { cpu::route_backward(params, {}); });
  const double small = std::exp(-20.0), difference = up.weight[1] - up.weight[0];
  EXPECT_NEAR(got[0], small * difference, 1e-4 * small);
  EXPECT_EQ(got[2], 0.0);
}

struct Sums {
  Buffer probability, chosen, factor, value;
};

Sums sums(const RouteProblem& p, const std::function<void(const RouteSums&)>& run) {
  Routed forward = routed(p);
  const std::int64_t n = p.batch * p.experts;
  Sums out{Buffer(DType::f32, n, -1.0), Buffer(DType::f32, n, -1.0), Buffer(DType::f32, n, -1.0),
           Buffer(DType::f32, p.batch, -1.0)};
  run({.tokens = p.tokens(),
       .experts = p.experts,
       .topk = p.topk,
       .batch = p.batch,
       .dtype = p.logits.dtype(),
       .logits = p.logits.data(),
       .expert = forward.expert.data(),
       .lse = forward.lse.floats(),
       .counted = p.counted.data(),
       .probability = out.probability.floats(),
       .chosen = out.chosen.floats()});
  cpu::balance_forward({.batch = p.batch,
                        .experts = p.experts,
                        .topk = p.topk,
                        .probability = out.probability.floats(),
                        .chosen = out.chosen.floats(),
                        .factor = out.factor.floats(),
                        .value = out.value.floats()},
                       {});
  return out;
}

void check_balance(const RouteProblem& p, const Sums& got) {
  for (std::int64_t sample = 0; sample < p.batch; ++sample) {
    double choices = 0.0, value = 0.0;
    for (std::int64_t e = 0; e < p.experts; ++e) choices += got.chosen[sample * p.experts + e];
    for (std::int64_t e = 0; e < p.experts; ++e) {
      const std::int64_t i = sample * p.experts + e;
      const double evenly = choices / static_cast<double>(p.experts);
      const double factor =
          choices == 0.0 ? 0.0 : got.chosen[i] / evenly * static_cast<double>(p.topk) / choices;
      ASSERT_NEAR(got.factor[i], factor, 1e-6 * factor);
      value += factor * got.probability[i];
    }
    ASSERT_NEAR(got.value[sample], value, 1e-6 * value);
  }
}

TEST(Moe, SumsAndBalance) {
  std::vector<Way<RouteSums>> all;
  for (const int threads : {1, 2}) {
    all.push_back({std::to_string(threads) + " threads",
                   [=](const RouteSums& p) { cpu::route_sums(p, {.threads = threads}); }});
  }
  for (auto [isa, function] : TESSERA_COPIES(route_sums_columns)) {
    all.push_back({cpu::isa_name(isa), [function = function](const RouteSums& p) {
                     for (std::int64_t sample = 0; sample < p.batch; ++sample) {
                       function(p, sample, 0, p.experts / 2);
                       function(p, sample, p.experts / 2, p.experts);
                     }
                   }});
  }
  for_each_problem([&](const RouteProblem& p) {
    const std::vector<double> probability = sums_of_probabilities(p, p.logits.values()),
                              chosen = sums_of_choices(p, choices(p));
    expect_same(sums(p, all[0].run).probability, sums(p, all[1].run).probability);
    for (const auto& way : all) {
      SCOPED_TRACE(way.name);
      const Sums got = sums(p, way.run);
      expect_close(got.probability, probability, 1e-6);
      expect_close(got.chosen, chosen, 0.0);
      check_balance(p, got);
    }
  });
}

TEST(Moe, AnEvenChoiceHasABalanceOfOne) {
  Buffer probability(DType::f32, 6, 2.5), chosen(DType::f32, 6, 5.0), factor(DType::f32, 6),
      value(DType::f32, 1);
  // 15 tokens choose 2 of 6 experts each.
  cpu::balance_forward({1, 6, 2, probability.floats(), chosen.floats(), factor.floats(), value.floats()}, {});
  EXPECT_NEAR(value[0], 1.0, 1e-7);
}

TEST(Moe, SlotsAreSortedStably) {
  for (const std::int64_t experts : {1, 2, 7, 64, 1024}) {
    for (const std::int64_t topk : {1, 3}) {
      for (const std::int64_t tokens : {0, 1, 5, 211}) {
        SCOPED_TRACE(::testing::Message()
                     << tokens << " tokens, " << topk << " of " << experts << " experts");
        const std::int64_t slots = tokens * topk;
        std::vector<std::int32_t> expert, count(index(experts), -1), want_count(index(experts));
        for (std::int64_t i = 0; i < slots; ++i) {
          expert.push_back(static_cast<std::int32_t>((i * i * 31 + i) % 997 % experts));
          if (expert.back() == 1) expert.back() = 0;  // nobody chooses this one
          ++want_count[index(expert.back())];
        }
        std::vector<std::int32_t> order(index(slots)), row(index(slots), -1), slot(index(slots), -1),
            token(index(slots), -1);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](std::int32_t a, std::int32_t b) { return expert[index(a)] < expert[index(b)]; });
        cpu::sort_slots(
            {slots, experts, topk, expert.data(), row.data(), slot.data(), token.data(), count.data()},
            {.threads = 2});
        EXPECT_EQ(slot, order);
        EXPECT_EQ(count, want_count);
        for (std::int64_t i = 0; i < slots; ++i) {
          ASSERT_EQ(row[index(slot[index(i)])], i);
          ASSERT_EQ(token[index(i)], slot[index(i)] / topk);
        }
      }
    }
  }
}

constexpr std::int64_t kCols[] = {1, 3, 16, 37, 65, 4099};

TEST(Moe, CombinesSlots) {
  const auto all = ways(&cpu::combine_slots, TESSERA_COPIES(combine_slots_rows),
                        [](const CombineSlots& p) { return p.tokens; });
  constexpr std::int64_t kTokens = 5;
  for (const std::int64_t topk : {1, 2, 7}) {
    for (const std::int64_t cols : kCols) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const bool weighted : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << topk << " rows of " << cols << " " << dtype << (weighted ? " weighted" : ""));
          const std::int64_t slots = kTokens * topk;
          const Buffer x = Buffer::random(dtype, slots * cols, 1);
          Buffer weight = Buffer::random(DType::f32, slots, 2);
          std::vector<std::int32_t> row;
          for (std::int64_t i = 0; i < slots; ++i)
            row.push_back(static_cast<std::int32_t>((i * 3 + 1) % slots));
          std::vector<double> want(index(kTokens * cols));
          for (std::int64_t i = 0; i < slots * cols; ++i) {
            const std::int64_t s = i / cols, c = i % cols;
            want[index(s / topk * cols + c)] += (weighted ? weight[s] : 1.0) * x[row[index(s)] * cols + c];
          }
          for (const auto& way : all) {
            SCOPED_TRACE(way.name);
            Buffer y(dtype, kTokens * cols);
            way.run({kTokens, topk, cols, dtype, x.data(), row.data(), weighted ? weight.floats() : nullptr,
                     y.data()});
            expect_close(y, want, 1e-6);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Moe, WeighsRows) {
  const auto all =
      ways(&cpu::weigh_rows, TESSERA_COPIES(weigh_rows_rows), [](const WeighRows& p) { return p.rows; });
  constexpr std::int64_t kRows = 5;
  for (const std::int64_t cols : kCols) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << "rows of " << cols << " " << dtype);
      const Buffer x = Buffer::random(dtype, kRows * cols, 1), y = Buffer::random(dtype, kRows * cols, 2);
      Buffer weight = Buffer::random(DType::f32, kRows, 3);
      std::vector<double> dot(kRows), want_x, want_y;
      for (std::int64_t i = 0; i < kRows * cols; ++i) {
        dot[index(i / cols)] += x[i] * y[i];
        want_x.push_back(weight[i / cols] * x[i]);
        want_y.push_back(weight[i / cols] * y[i]);
      }
      for (const auto& way : all) {
        SCOPED_TRACE(way.name);
        Buffer got_x = x, got_y = y, got(DType::f32, kRows);
        way.run({kRows, cols, dtype, got_x.data(), got_y.data(), weight.floats(), got.floats()});
        expect_close(got_x, want_x, 1e-6);
        expect_close(got_y, want_y, 1e-6);
        expect_close(got, dot, 1e-6 * std::sqrt(static_cast<double>(cols)));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A run that has diverged must be seen in its loss; experts stay ones that there are.
TEST(Moe, NanReachesTheWeights) {
  for (const std::int64_t where : {0, 2, 8}) {
    for (const bool normalized : {false, true}) {
      RouteProblem p(1, 1, 9, 3, normalized, DType::f32);
      p.logits.set(where, std::nan(""));
      const Routed got = routed(p);
      EXPECT_EQ(got.expert[0], where);
      EXPECT_TRUE(std::isnan(got.weight[0]) && std::isnan(got.weight[2]) && std::isnan(got.lse[0]));
    }
  }
}

TEST(Moe, LargeLogits) {
  for (const double huge : {1e30, -1e30}) {
    RouteProblem p(1, 1, 5, 2, true, DType::f32);
    for (std::int64_t e = 0; e < 5; ++e)
      p.logits.set(e, e == 3 ? -std::numeric_limits<double>::infinity() : huge);
    const Routed got = routed(p);
    EXPECT_EQ(got.expert, (std::vector<std::int32_t>{0, 1}));
    EXPECT_EQ(got.weight[0], 0.5);
    EXPECT_EQ(got.weight[1], 0.5);
  }
}

}  // namespace
}  // namespace tessera::kernels
