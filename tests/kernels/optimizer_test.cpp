/// Updates against PyTorch 2's (torch.optim in float64, literal tables), and against the formulas in double.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/vector/optimizer.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_same;

constexpr int kCount = 5;
constexpr float kStart[kCount] = {0.5f, -1.25f, 2.0f, 0.0f, -0.75f};
/// Gradients of three steps; the optimizer sees half of them (grad_scale).
constexpr float kGradients[3][kCount] = {{0.1f, -0.2f, 0.3f, 1.0f, -2.0f},
                                         {0.05f, 0.4f, -0.6f, 0.001f, 1.5f},
                                         {-0.3f, 0.25f, 0.0f, -0.5f, 0.125f}};

void expect_table(const float* got, const double (&want)[kCount]) {
  for (int i = 0; i < kCount; ++i) EXPECT_NEAR(got[i], want[i], 3e-7) << "element " << i;
}

GroupRule rule_with(UpdateRates rates, double beta1 = 0.9, double beta2 = 0.999, double eps = 1e-8,
                    double momentum = 0) {
  GroupRule rule;
  rule.beta1 = beta1;
  rule.beta2 = beta2;
  rule.eps = eps;
  rule.momentum = momentum;
  rule.rates[0] = rates;
  return rule;
}

/// Decides an update at learning rate 0.05 and weight decay 0.1, the gradients halved.
GroupFactors begin(UpdateState& state, GroupRule rule, bool decoupled) {
  cpu::begin_update({.state = &state, .grad_scale = 0.5}, {});
  rule.rates[0] = {.lr = 0.05, .weight_decay = 0.1};
  GroupFactors factors;
  UpdateGroups groups{.state = &state, .factors = &factors, .decoupled = decoupled, .count = 1};
  groups.base = state.updates - 1;
  groups.rules[0] = rule;
  cpu::update_groups(groups, {});
  return factors;
}

void check_adam(const GroupRule& rule, bool decoupled, const double (&want)[kCount]) {
  float main[kCount], m[kCount] = {}, v[kCount] = {};
  std::copy(kStart, kStart + kCount, main);
  UpdateState state;
  for (const auto& gradient : kGradients) {
    const GroupFactors factors = begin(state, rule, decoupled);
    const std::uint8_t group = 0;
    cpu::adam({.n = kCount,
               .groups = {&factors, 1, &group},
               .state = &state,
               .grad = gradient,
               .main = main,
               .m = m,
               .v = v},
              {});
  }
  expect_table(main, want);
}

TEST(Adam, DecoupledEqualsTorchAdamW) {
  check_adam(rule_with({}, 0.9, 0.95, 1e-3), true,
             {0.415287230035, -1.22799759208, 1.95313141493, -0.0921020887934, -0.683020272311});
}

TEST(Adam, CoupledEqualsTorchAdam) {
  check_adam(rule_with({}, 0.8, 0.999, 1e-8), false,
             {0.399523490479, -1.1726429274, 1.90256858137, -0.0847577672526, -0.690227251486});
}

void check_sgd(double momentum, bool nesterov, const double (&want)[kCount]) {
  float main[kCount], buffer[kCount] = {};
  std::copy(kStart, kStart + kCount, main);
  UpdateState state;
  for (const auto& gradient : kGradients) {
    const GroupFactors factors = begin(state, rule_with({}, 0, 0, 1, momentum), false);
    const std::uint8_t group = 0;
    cpu::sgd({.n = kCount,
              .groups = {&factors, 1, &group},
              .nesterov = nesterov,
              .state = &state,
              .grad = gradient,
              .main = main,
              .buffer = momentum != 0 ? buffer : nullptr},
             {});
  }
  expect_table(main, want);
}

TEST(Sgd, EqualsTorch) {
  check_sgd(0, false, {0.496318625, -1.24259346875, 1.9776495625, -0.0122755, -0.72974240625});
  check_sgd(0.9, false, {0.484438625, -1.22683221875, 1.9523820625, -0.054823, -0.66868865625});
  check_sgd(0.9, true, {0.482466780125, -1.22198339591, 1.93517532419, -0.061009335625, -0.657577933219});
}

/// Four groups that have nothing in common; the last has no momentum.
const GroupFactors kFactors[4] = {
    {{0.999f, 0.0f, 0.1f, 0.95f, 0.05f, 0.05f, 3.2f, 1e-6f}, {0.01f, 0.1f, 0.9f}},
    {{1.0f, 0.02f, 0.3f, 0.9f, 0.1f, 0.01f, 1.5f, 1e-3f}, {0.3f, 0.0f, 0.5f}},
    {{0.5f, 0.1f, 0.7f, 0.5f, 0.5f, 0.2f, 1.0f, 1e-1f}, {0.0f, 1.0f, 0.2f}},
    {{0.9f, 0.0f, 1.0f, 0.0f, 1.0f, 0.4f, 2.0f, 0.5f}, {0.07f, 0.3f, 0.0f}}};

struct State {
  explicit State(std::int64_t n)
      : grad(Buffer::random(DType::f32, n, 1)),
        main(Buffer::random(DType::f32, n, 2)),
        m(Buffer::random(DType::f32, n, 3)),
        v(Buffer::random(DType::f32, n, 4, 0.5, 0.5)),
        model(DType::bf16, n) {
    // Groups in runs of one, two and three blocks, some of which belong to none.
    for (std::int64_t block = 0; block < (n + kGroupBlock - 1) / kGroupBlock; ++block) {
      const auto run = static_cast<std::uint8_t>(block * 5 / 9 % 6);
      of_block.push_back(run < 4 ? run : run == 4 ? kNoGroup : 2);
    }
  }
  Buffer grad, main, m, v, model;
  std::vector<std::uint8_t> of_block;
  UpdateState state{.grad_factor = 0.7};

  GroupsOfElements groups(std::int64_t begin) const {
    return {kFactors, 4, of_block.data() + begin / kGroupBlock};
  }
  Adam adam(std::int64_t begin, std::int64_t end) {
    return {.n = end - begin,
            .groups = groups(begin),
            .state = &state,
            .grad = grad.floats() + begin,
            .main = main.floats() + begin,
            .m = m.floats() + begin,
            .v = v.floats() + begin,
            .model = static_cast<bfloat16*>(model.data()) + begin};
  }
  Sgd sgd(std::int64_t begin, std::int64_t end) {
    return {.n = end - begin,
            .groups = groups(begin),
            .nesterov = true,
            .state = &state,
            .grad = grad.floats() + begin,
            .main = main.floats() + begin,
            .buffer = m.floats() + begin,
            .model = static_cast<bfloat16*>(model.data()) + begin};
  }
};

void expect_same_state(const State& a, const State& b) {
  expect_same(a.main, b.main);
  expect_same(a.m, b.m);
  expect_same(a.v, b.v);
  expect_same(a.model, b.model);
}

void expect_model_is_rounded_main(const State& s) {
  for (std::int64_t i = 0; i < s.main.size(); ++i) {
    ASSERT_EQ(s.model[i], static_cast<float>(bfloat16(static_cast<float>(s.main[i])))) << "element " << i;
  }
}

/// One element of Adam in double.
struct Element {
  double main, m, v;
};
Element adam_of(const State& s, std::int64_t i, const AdamFactors& f) {
  const double g = s.grad[i] * 0.7 + static_cast<double>(f.l2) * s.main[i];
  const double m = s.m[i] + static_cast<double>(f.blend1) * (g - s.m[i]);
  const double v = s.v[i] * static_cast<double>(f.beta2) + static_cast<double>(f.blend2) * g * g;
  return {s.main[i] * static_cast<double>(f.decay) -
              static_cast<double>(f.step) * m /
                  (std::sqrt(v) * static_cast<double>(f.root) + static_cast<double>(f.eps)),
          m, v};
}
/// The same of SGD; m is the momentum.
Element sgd_of(const State& s, std::int64_t i, const SgdFactors& f, bool nesterov) {
  const double mu = static_cast<double>(f.momentum);
  const double g = s.grad[i] * 0.7 + static_cast<double>(f.decay) * s.main[i];
  const double momentum = mu != 0 ? mu * s.m[i] + g : s.m[i];
  const double update = mu == 0 ? g : nesterov ? g + mu * momentum : momentum;
  return {s.main[i] - static_cast<double>(f.lr) * update, momentum, s.v[i]};
}

void expect_element(const State& s, std::int64_t i, const Element& want) {
  ASSERT_NEAR(s.m[i], want.m, 3e-7) << "element " << i;
  ASSERT_NEAR(s.v[i], want.v, 3e-7) << "element " << i;
  ASSERT_NEAR(s.main[i], want.main, 4e-7 * (1 + std::fabs(want.main))) << "element " << i;
}

TEST(Adam, EveryCopyFollowsTheFormula) {
  for (std::int64_t n : {1, 3, 16, 31, 101}) {
    for (auto [isa, adam] : TESSERA_COPIES(adam_range)) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << ", " << n);
      State s(n);
      const State before(s);
      adam(s.adam(0, n), kFactors[1].adam, 0, n);
      for (std::int64_t i = 0; i < n; ++i) expect_element(s, i, adam_of(before, i, kFactors[1].adam));
      expect_model_is_rounded_main(s);
    }
  }
}

TEST(Sgd, EveryCopyFollowsTheFormula) {
  for (std::int64_t n : {1, 3, 16, 31, 101}) {
    for (auto [isa, sgd] : TESSERA_COPIES(sgd_range)) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << ", " << n);
      State s(n);
      const State before(s);
      sgd(s.sgd(0, n), kFactors[0].sgd, 0, n);
      for (std::int64_t i = 0; i < n; ++i) expect_element(s, i, sgd_of(before, i, kFactors[0].sgd, true));
      expect_model_is_rounded_main(s);
    }
  }
}

TEST(Optimizers, EachBlockIsUpdatedAsItsGroupIs) {
  const std::int64_t n = 9001;
  State adam(n), sgd(n);
  const State before(n);
  ASSERT_EQ(std::count(before.of_block.begin(), before.of_block.end(), kNoGroup), 23);
  cpu::adam(adam.adam(0, n), {.threads = 2});
  cpu::sgd(sgd.sgd(0, n), {.threads = 2});
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint8_t group = before.of_block[static_cast<std::size_t>(i / kGroupBlock)];
    if (group == kNoGroup) {
      for (const State* s : {&adam, &sgd}) {
        ASSERT_TRUE(s->main[i] == before.main[i] && s->m[i] == before.m[i] && s->v[i] == before.v[i] &&
                    s->model[i] == before.model[i])
            << "element " << i;
      }
      continue;
    }
    expect_element(adam, i, adam_of(before, i, kFactors[group].adam));
    expect_element(sgd, i, sgd_of(before, i, kFactors[group].sgd, true));
    ASSERT_EQ(adam.model[i], static_cast<float>(bfloat16(static_cast<float>(adam.main[i]))));
    ASSERT_EQ(sgd.model[i], static_cast<float>(bfloat16(static_cast<float>(sgd.main[i]))));
  }
}

TEST(Optimizers, NeitherThreadsNorShardsChangeABit) {
  const std::int64_t n = 20011;
  State one(n), two(n), shards(n);
  cpu::adam(one.adam(0, n), {.threads = 1});
  cpu::sgd(one.sgd(0, n), {.threads = 1});
  cpu::adam(two.adam(0, n), {.threads = 2});
  cpu::sgd(two.sgd(0, n), {.threads = 2});
  const std::int64_t cuts[] = {0, 64, 192, 640, 4992, 5056, 12352, n};  // whole blocks
  for (int i = 0; i < 7; ++i) {
    cpu::adam(shards.adam(cuts[i], cuts[i + 1]), {});
    cpu::sgd(shards.sgd(cuts[i], cuts[i + 1]), {});
  }
  expect_same_state(one, two);
  expect_same_state(one, shards);
}

TEST(Optimizers, ASkippedUpdateChangesNothing) {
  State s(67);
  const State before(s);
  s.state.skip = 1;
  cpu::adam(s.adam(0, 67), {});
  cpu::sgd(s.sgd(0, 67), {});
  expect_same_state(s, before);
}

/// Every kind of float: ties both ways, both zeros, denormals, carries into the next exponent, what rounds to
/// infinity, infinities; then words at random, NaNs among them left out.
std::vector<float> many_floats() {
  std::vector<std::uint32_t> words;
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (const std::uint32_t word : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x10000u, 0x18000u,
                                     0x7fffffu, 0x800000u, 0x3f7fffffu, 0x3f800000u, 0x3f808000u, 0x3f818000u,
                                     0x3f817fffu, 0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0x7f800000u})
      words.push_back(sign | word);
  }
  for (std::uint64_t i = 0; words.size() < 20011; ++i) {
    const std::uint32_t word = random_block({.seed = 5, .site = 1}, i).word[0];
    if ((word & 0x7f800000u) != 0x7f800000u) words.push_back(word);
  }
  std::vector<float> values(words.size());
  std::memcpy(values.data(), words.data(), 4 * words.size());
  return values;
}

std::uint32_t word_of(float x) {
  std::uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  return word;
}

/// Rounded to nearest, ties away from zero.
bfloat16 rounded_away(float main) {
  bfloat16 model;
  model.bits = static_cast<std::uint16_t>((word_of(main) + 0x8000u) >> 16);
  return model;
}

struct SplitParts {
  explicit SplitParts(std::size_t n) : model(n), low(n) {}
  std::vector<bfloat16> model;
  std::vector<std::uint16_t> low;
};

TEST(SplitMain, EveryCopyKeepsEveryBit) {
  const std::vector<float> main = many_floats();
  for (const std::int64_t n : {1, 3, 16, 31, 20011}) {
    const auto copies = TESSERA_COPIES(split_main_range);
    for (std::size_t copy = 0; copy < copies.size(); ++copy) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(copies[copy].isa) << ", " << n);
      SplitParts parts(static_cast<std::size_t>(n));
      std::vector<float> joined(static_cast<std::size_t>(n), 7.0f);
      copies[copy].function({n, main.data(), parts.model.data(), parts.low.data()}, 0, n);
      TESSERA_COPIES(join_main_range)
      [copy].function({n, parts.model.data(), parts.low.data(), joined.data()}, 0, n);
      for (std::size_t i = 0; i < joined.size(); ++i) {
        ASSERT_EQ(parts.model[i].bits, rounded_away(main[i]).bits) << main[i];
        ASSERT_EQ(parts.low[i], word_of(main[i]) & 0xffffu) << main[i];
        ASSERT_EQ(word_of(joined[i]), word_of(main[i])) << main[i];
        const SplitWeight one = SplitWeight::split(main[i]);
        ASSERT_TRUE(one.model.bits == parts.model[i].bits && one.low == parts.low[i] &&
                    word_of(one.join()) == word_of(main[i]))
            << main[i];
      }
    }
  }
}

TEST(SplitMain, NaNStaysNaNInBothParts) {
  for (const std::uint32_t word :
       {0x7f800001u, 0x7f808000u, 0x7fffffffu, 0x7fc00000u, 0xff800001u, 0xffffffffu}) {
    float main[17], joined[17];
    for (float& x : main) std::memcpy(&x, &word, sizeof x);
    SplitParts parts(17);
    cpu::split_main({17, main, parts.model.data(), parts.low.data()}, {.threads = 2});
    cpu::join_main({17, parts.model.data(), parts.low.data(), joined}, {.threads = 2});
    const SplitWeight one = SplitWeight::split(main[0]);
    for (std::size_t i = 0; i < 17; ++i) {
      EXPECT_TRUE(std::isnan(static_cast<float>(parts.model[i]))) << word;
      EXPECT_TRUE(std::isnan(joined[i])) << word;
      EXPECT_EQ(parts.model[i].bits, one.model.bits);
      EXPECT_EQ(parts.low[i], one.low);
    }
  }
}

/// Splits the main weights of `s` and calls update(params) with them; returns what they are joined to.
template <typename Params, typename Update>
std::vector<float> updated_when_split(State& s, Params params, Update update) {
  SplitParts parts(static_cast<std::size_t>(params.n));
  cpu::split_main({params.n, s.main.floats(), parts.model.data(), parts.low.data()}, {});
  params.main = nullptr;
  params.model = parts.model.data();
  params.low = parts.low.data();
  update(params);
  std::vector<float> joined(static_cast<std::size_t>(params.n));
  cpu::join_main({params.n, parts.model.data(), parts.low.data(), joined.data()}, {});
  for (std::size_t i = 0; i < joined.size(); ++i)
    EXPECT_EQ(parts.model[i].bits, rounded_away(joined[i]).bits) << "element " << i;
  return joined;
}

TEST(SplitMain, UpdatesAreThoseOfWholeWeights) {
  for (const std::int64_t n : {1, 67, 9001}) {
    State whole(n), split(n);
    cpu::adam(whole.adam(0, n), {.threads = 2});
    std::vector<float> main =
        updated_when_split(split, split.adam(0, n), [](const Adam& p) { cpu::adam(p, {.threads = 2}); });
    EXPECT_EQ(std::memcmp(main.data(), whole.main.floats(), 4 * main.size()), 0) << n;
    expect_same(split.m, whole.m);
    expect_same(split.v, whole.v);
    whole = split = State(n);
    cpu::sgd(whole.sgd(0, n), {.threads = 2});
    main = updated_when_split(split, split.sgd(0, n), [](const Sgd& p) { cpu::sgd(p, {.threads = 2}); });
    EXPECT_EQ(std::memcmp(main.data(), whole.main.floats(), 4 * main.size()), 0) << n;
    expect_same(split.m, whole.m);
  }
}

TEST(BeginUpdate, NormAndClipping) {
  UpdateState state{.squares = 400.0, .updates = 7, .loss_scale = 4.0f};
  cpu::begin_update({.state = &state, .grad_scale = 0.5, .clip_grad = 1.0}, {});
  EXPECT_EQ(state.skip, 0);
  EXPECT_EQ(state.squares, 0.0);
  EXPECT_DOUBLE_EQ(state.grad_norm, 20.0 * 0.5 / 4.0);
  EXPECT_DOUBLE_EQ(state.clip_factor, 1.0 / (2.5 + 1e-6));
  EXPECT_DOUBLE_EQ(state.grad_factor, 0.125 / (2.5 + 1e-6));
  EXPECT_EQ(state.updates, 8);
}

TEST(UpdateGroups, EachTakesItsOwnRatesOfTheUpdateThatComes) {
  UpdateState state{.updates = 8};
  GroupFactors factors[2];
  UpdateGroups params{
      .state = &state, .factors = factors, .decoupled = true, .base = 6, .num_rates = 2, .count = 2};
  params.rules[0] = rule_with({.lr = 1.0, .weight_decay = 0.1}, 0.9, 0.99, 1e-6, 0.7);
  params.rules[0].rates[1] = {.lr = 2.0, .weight_decay = 0.2};  // one update after base: the second
  params.rules[1] = rule_with({.lr = 3.0, .weight_decay = 0.3}, 0.5, 0.75, 1e-4, 0.6);
  params.rules[1].rates[1] = {.lr = 4.0, .weight_decay = 0.05};
  cpu::update_groups(params, {});
  const auto expect_group = [&](int group, double lr, double decay, double beta1, double beta2, double eps) {
    const AdamFactors& f = factors[group].adam;
    EXPECT_EQ(f.decay, static_cast<float>(1 - lr * decay));
    EXPECT_EQ(f.l2, 0.0f);
    EXPECT_EQ(f.blend1, static_cast<float>(1 - beta1));
    EXPECT_EQ(f.beta2, static_cast<float>(beta2));
    EXPECT_EQ(f.blend2, static_cast<float>(1 - beta2));
    EXPECT_FLOAT_EQ(f.step, static_cast<float>(lr / (1 - std::pow(beta1, 8))));
    EXPECT_FLOAT_EQ(f.root, static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, 8))));
    EXPECT_EQ(f.eps, static_cast<float>(eps));
    EXPECT_EQ(factors[group].sgd.lr, static_cast<float>(lr));
    EXPECT_EQ(factors[group].sgd.decay, static_cast<float>(decay));
  };
  expect_group(0, 2.0, 0.2, 0.9, 0.99, 1e-6);
  expect_group(1, 4.0, 0.05, 0.5, 0.75, 1e-4);
  EXPECT_EQ(factors[0].sgd.momentum, 0.7f);
  EXPECT_EQ(factors[1].sgd.momentum, 0.6f);
  params.decoupled = false;
  cpu::update_groups(params, {});
  EXPECT_EQ(factors[0].adam.decay, 1.0f);
  EXPECT_EQ(factors[0].adam.l2, 0.2f);

  // Rates before the first and beyond the last are those; a skipped update leaves the factors alone.
  state.updates = 6;
  cpu::update_groups(params, {});
  EXPECT_EQ(factors[0].sgd.lr, 1.0f);
  state.updates = 60;
  cpu::update_groups(params, {});
  EXPECT_EQ(factors[0].sgd.lr, 2.0f);
  state.updates = 7;
  state.skip = 1;
  cpu::update_groups(params, {});
  EXPECT_EQ(factors[0].sgd.lr, 2.0f);
}

TEST(BeginUpdate, WhatIsNotFiniteIsSkipped) {
  for (const double squares : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    UpdateState state{.squares = squares, .grad_factor = 0.5, .updates = 3};
    cpu::begin_update({.state = &state, .clip_grad = 1.0}, {});
    EXPECT_EQ(state.skip, 1);
    EXPECT_EQ(state.updates, 3);
    EXPECT_EQ(state.squares, 0.0);
    EXPECT_FALSE(std::isfinite(state.grad_norm));
    EXPECT_EQ(state.grad_factor, 0.5);
  }
}

TEST(Optimizers, ModelCopyIsOptional) {
  const std::int64_t n = 67;
  State with(n), without(n);
  cpu::adam(with.adam(0, n), {});
  cpu::sgd(with.sgd(0, n), {});
  Adam adam = without.adam(0, n);
  adam.model = nullptr;
  cpu::adam(adam, {});
  Sgd sgd = without.sgd(0, n);
  sgd.model = nullptr;
  cpu::sgd(sgd, {});
  expect_same(with.main, without.main);
  for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(without.model[i], 0.0);
}

}  // namespace
}  // namespace tessera::kernels
