/// Updates on CUDA against the CPU's.

#include "kernels/api/optimizer.hpp"

#include <algorithm>
#include <bit>

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::random_values;

/// A CUDA run may contract a product and a sum, the CPU's may not: two units in the last place.
constexpr double kTolerance = 2.4e-7;

UpdateState state_of_an_update() {
  UpdateState state;
  state.grad_factor = 0.7;
  return state;
}

/// Groups that have nothing in common: the most there may be. The last has no momentum.
std::vector<GroupFactors> factors_of_groups() {
  std::vector<GroupFactors> factors;
  for (int group = 0; group < kMostGroups; ++group) {
    const float x = static_cast<float>(group % 7) / 8.0f;
    factors.push_back({{0.999f - 0.1f * x, 0.2f * x, 0.1f + x, 0.95f - x / 2, 0.05f + x / 2,
                        0.05f - 0.01f * x, 3.2f - x, 1e-6f * static_cast<float>(group + 1)},
                       {0.01f + x, 0.1f * x, group + 1 < kMostGroups ? 0.9f - x : 0.0f}});
  }
  return factors;
}

/// The group of each block of n elements: runs of one to three blocks, among them some of no group.
std::vector<std::uint8_t> groups_of_blocks(std::int64_t n) {
  const std::uint8_t order[] = {1, 0, kNoGroup, 254, 3, 100, kNoGroup, 7};
  std::vector<std::uint8_t> of_block;
  for (std::int64_t block = 0; block < (n + kGroupBlock - 1) / kGroupBlock; ++block)
    of_block.push_back(order[block * 5 / 9 % 8]);
  return of_block;
}

/// Everything an update reads and writes.
template <typename Model>
struct Parameters {
  explicit Parameters(std::int64_t n)
      : grad(random_values<float>(n, 1)),
        main(random_values<float>(n, 2)),
        m(random_values<float>(n, 3)),
        v(random_values<float>(n, 4, 0.5f, 0.5f)),
        model(static_cast<std::size_t>(n), Model(7.0f)),
        factors(factors_of_groups()),
        of_block(groups_of_blocks(n)) {}
  std::vector<float> grad, main, m, v;
  std::vector<Model> model;
  std::vector<GroupFactors> factors;
  std::vector<std::uint8_t> of_block;
};

template <typename Model>
struct DeviceParameters {
  DeviceParameters(const DeviceStream& stream, const Parameters<Model>& p, std::size_t offset)
      : grad(stream, p.grad, offset),
        main(stream, p.main, offset),
        m(stream, p.m, offset),
        v(stream, p.v, offset),
        model(stream, p.model, offset),
        factors(stream, p.factors),
        of_block(stream, p.of_block, offset) {}
  DeviceBuffer<float> grad, main, m, v;
  DeviceBuffer<Model> model;
  DeviceBuffer<GroupFactors> factors;
  DeviceBuffer<std::uint8_t> of_block;
};

template <typename Params, typename Memory>
void point_to(Params& params, Memory& memory, bool has_model) {
  params.grad = memory.grad.data();
  params.main = memory.main.data();
  params.model = has_model ? memory.model.data() : nullptr;
  params.groups = {memory.factors.data(), kMostGroups, memory.of_block.data()};
}

template <typename Model>
void check_adam(const DeviceStream& stream, std::int64_t n, std::size_t offset, bool has_model, int skip) {
  SCOPED_TRACE(::testing::Message() << n << ", offset " << offset << ", model " << has_model << ", skip "
                                    << skip);
  Parameters<Model> host(n);
  const Parameters<Model> before = host;
  const DeviceParameters<Model> device(stream, host, offset);
  UpdateState state = state_of_an_update();
  state.skip = skip;
  const DeviceBuffer<UpdateState> device_state(stream, {state});
  Adam params{.n = n, .groups = {}, .state = &state, .model_dtype = dtype_of<Model>::value};
  point_to(params, host, has_model);
  params.m = host.m.data();
  params.v = host.v.data();
  cpu::adam(params, {});
  point_to(params, device, has_model);
  params.state = device_state.data();
  params.m = device.m.data();
  params.v = device.v.data();
  cuda::adam(params, stream.launch());
  if (skip != 0) {
    expect_same_bits(device.main.host(), before.main);
    expect_same_bits(device.m.host(), before.m);
    expect_same_bits(device.v.host(), before.v);
    expect_same_bits(device.model.host(), before.model);
    return;
  }
  expect_close(device.m.host(), host.m, kTolerance);
  expect_close(device.v.host(), host.v, kTolerance);
  expect_close(device.main.host(), host.main, kTolerance);
  expect_close(device.model.host(), host.model, kTolerance);
  std::vector<Model> rounded = before.model;
  if (has_model) {
    const std::vector<float> main = device.main.host();
    for (std::size_t i = 0; i < main.size(); ++i) {
      if (host.of_block[i / kGroupBlock] != kNoGroup) rounded[i] = Model(main[i]);
    }
  }
  expect_same_bits(device.model.host(), rounded);
}

TEST(CudaOptimizer, AdamEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    using Model = decltype(t);
    for (const std::int64_t n : {1, 4, 13, 4099}) {
      for (const std::size_t offset : {0, 1}) {
        check_adam<Model>(stream, n, offset, true, 0);
        check_adam<Model>(stream, n, offset, false, 0);
        check_adam<Model>(stream, n, offset, true, 1);
      }
    }
  });
}

TEST(CudaOptimizer, AdamOfMoreThanOneWave) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  check_adam<bfloat16>(stream, 2500003, 0, true, 0);
}

template <typename Model>
void check_sgd(const DeviceStream& stream, std::int64_t n, std::size_t offset, bool has_buffer, bool nesterov,
               int skip) {
  SCOPED_TRACE(::testing::Message() << n << ", offset " << offset << ", buffer " << has_buffer
                                    << ", nesterov " << nesterov << ", skip " << skip);
  Parameters<Model> host(n);
  const DeviceParameters<Model> device(stream, host, offset);
  UpdateState state = state_of_an_update();
  state.skip = skip;
  const DeviceBuffer<UpdateState> device_state(stream, {state});
  Sgd params{
      .n = n, .groups = {}, .nesterov = nesterov, .state = &state, .model_dtype = dtype_of<Model>::value};
  point_to(params, host, true);
  params.buffer = has_buffer ? host.m.data() : nullptr;
  cpu::sgd(params, {});
  point_to(params, device, true);
  params.state = device_state.data();
  params.buffer = has_buffer ? device.m.data() : nullptr;
  cuda::sgd(params, stream.launch());
  expect_close(device.m.host(), host.m, kTolerance);
  expect_close(device.main.host(), host.main, kTolerance);
  expect_close(device.model.host(), host.model, kTolerance);
}

TEST(CudaOptimizer, SgdEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    using Model = decltype(t);
    for (const std::int64_t n : {1, 4, 13, 4099}) {
      for (const std::size_t offset : {0, 1}) {
        check_sgd<Model>(stream, n, offset, false, false, 0);
        check_sgd<Model>(stream, n, offset, true, false, 0);
        check_sgd<Model>(stream, n, offset, true, true, 0);
        check_sgd<Model>(stream, n, offset, true, true, 1);
      }
    }
  });
}

TEST(CudaOptimizer, UpdatesDoNotDependOnTheOrderOfThreads) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::in_every_order([&] {
    check_adam<bfloat16>(stream, 3001, 0, true, 0);
    check_sgd<bfloat16>(stream, 3001, 0, true, true, 0);
  });
}

/// Split main weights, and what an update makes of them.
struct SplitParts {
  SplitParts(const DeviceStream& stream, const std::vector<float>& main, std::size_t offset)
      : n(static_cast<std::int64_t>(main.size())),
        whole(stream, main, offset),
        model(stream, std::vector<bfloat16>(main.size(), bfloat16(7.0f)), offset),
        low(stream, std::vector<std::uint16_t>(main.size(), 7), offset) {
    cuda::split_main({n, whole.data(), model.data(), low.data()}, stream.launch());
  }
  std::vector<float> joined(const DeviceStream& stream) const {
    cuda::join_main({n, model.data(), low.data(), whole.data()}, stream.launch());
    return whole.host();
  }
  std::int64_t n;
  DeviceBuffer<float> whole;
  DeviceBuffer<bfloat16> model;
  DeviceBuffer<std::uint16_t> low;
};

TEST(CudaOptimizer, SplitAndJoinEqualTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  // Zeros, denormals, ties, carries, what rounds to infinity, infinities, NaNs.
  std::vector<float> special;
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (const std::uint32_t word :
         {0u, 1u, 0x8000u, 0x8001u, 0x18000u, 0x7fffffu, 0x3f808000u, 0x3f818000u, 0x3f817fffu, 0x7f7f7fffu,
          0x7f7f8000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu})
      special.push_back(std::bit_cast<float>(sign | word));
  }
  for (const std::size_t n : {1, 4, 30, 4099}) {
    for (const std::size_t offset : {0, 1}) {
      SCOPED_TRACE(::testing::Message() << n << ", offset " << offset);
      std::vector<float> main = random_values<float>(static_cast<std::int64_t>(n), 2);
      std::copy_n(special.begin(), std::min(n, special.size()), main.begin());
      std::vector<bfloat16> model(n);
      std::vector<std::uint16_t> low(n);
      cpu::split_main({static_cast<std::int64_t>(n), main.data(), model.data(), low.data()}, {});
      const SplitParts parts(stream, main, offset);
      expect_same_bits(parts.model.host(), model);
      expect_same_bits(parts.low.host(), low);
      std::vector<float> joined(n);
      cpu::join_main({static_cast<std::int64_t>(n), model.data(), low.data(), joined.data()}, {});
      expect_same_bits(parts.joined(stream), joined);
    }
  }
}

/// An update of split main weights and one of whole ones: every bit of weights and state.
template <typename Params, typename Update>
void check_split(const DeviceStream& stream, std::int64_t n, std::size_t offset, Params params,
                 Update update) {
  SCOPED_TRACE(::testing::Message() << n << ", offset " << offset);
  const Parameters<bfloat16> before(n);
  const DeviceBuffer<UpdateState> state(stream, {state_of_an_update()});
  const DeviceParameters<bfloat16> whole(stream, before, offset), split(stream, before, offset);
  const SplitParts parts(stream, before.main, offset);
  params.n = n;
  params.state = state.data();
  point_to(params, whole, true);
  update(params, whole);
  point_to(params, split, true);
  params.main = nullptr;
  params.model = parts.model.data();
  params.low = parts.low.data();
  update(params, split);
  expect_same_bits(parts.joined(stream), whole.main.host());
  expect_same_bits(split.m.host(), whole.m.host());
  expect_same_bits(split.v.host(), whole.v.host());
  std::vector<bfloat16> model = parts.model.host();
  const std::vector<float> main = whole.main.host();
  for (std::size_t i = 0; i < main.size(); ++i)
    ASSERT_EQ(model[i].bits, SplitWeight::split(main[i]).model.bits) << "element " << i;
}

TEST(CudaOptimizer, UpdatesOfSplitWeightsAreThoseOfWholeOnes) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {1, 4, 13, 4099}) {
    for (const std::size_t offset : {0, 1}) {
      check_split(stream, n, offset, Adam{}, [&](Adam p, const auto& memory) {
        p.m = memory.m.data();
        p.v = memory.v.data();
        cuda::adam(p, stream.launch());
      });
      for (const bool has_buffer : {false, true}) {
        check_split(stream, n, offset, Sgd{.nesterov = has_buffer}, [&](Sgd p, const auto& memory) {
          p.buffer = has_buffer ? memory.m.data() : nullptr;
          cuda::sgd(p, stream.launch());
        });
      }
    }
  }
}

void expect_same_state(const UpdateState& got, const UpdateState& want) {
  EXPECT_EQ(got.squares, want.squares);
  EXPECT_EQ(got.skip, want.skip);
  if (std::isnan(want.grad_norm)) {
    EXPECT_TRUE(std::isnan(got.grad_norm));
  } else {
    EXPECT_EQ(got.grad_norm, want.grad_norm);
  }
  EXPECT_EQ(got.grad_factor, want.grad_factor);
  EXPECT_EQ(got.clip_factor, want.clip_factor);
  EXPECT_EQ(got.updates, want.updates);
  EXPECT_EQ(got.loss_scale, want.loss_scale);
  EXPECT_EQ(got.good_steps, want.good_steps);
  EXPECT_EQ(got.hysteresis, want.hysteresis);
}

TEST(CudaOptimizer, BeginUpdateEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  UpdateState host;
  host.loss_scale = 1024.0f;
  host.hysteresis = 2;
  UpdateState device = host;
  BeginUpdate params{.grad_scale = 0.25,
                     .clip_grad = 1.0,
                     .loss_scale = {.smallest = 256.0f, .growth_interval = 3, .hysteresis = 2}};
  // Small norms, clipped ones, overflows in a row down to the smallest scale, growth again.
  const double squares[] = {1.0, 1e9, INFINITY, NAN, 4.0, INFINITY, INFINITY, 1e12, 0.0, 1.0, 1.0};
  for (const double value : squares) {
    SCOPED_TRACE(value);
    host.squares = device.squares = value;
    const DeviceBuffer<UpdateState> memory(stream, {device});
    params.state = memory.data();
    cuda::begin_update(params, stream.launch());
    device = memory.host()[0];
    params.state = &host;
    cpu::begin_update(params, {});
    expect_same_state(device, host);
  }
}

TEST(CudaOptimizer, UpdateGroupsEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const int skip : {0, 1}) {
    UpdateState state;
    state.updates = 9;
    state.skip = skip;
    const DeviceBuffer<UpdateState> device_state(stream, {state});
    std::vector<GroupFactors> factors(UpdateGroups::kMost, GroupFactors{{5, 5, 5, 5, 5, 5, 5, 5}, {5, 5, 5}});
    const std::vector<GroupFactors> before = factors;
    const DeviceBuffer<GroupFactors> device(stream, factors);
    UpdateGroups params{.state = &state,
                        .factors = factors.data(),
                        .decoupled = true,
                        .base = 7,
                        .num_rates = 2,
                        .count = UpdateGroups::kMost - 1};
    for (int group = 0; group < UpdateGroups::kMost; ++group) {
      GroupRule& rule = params.rules[group];
      rule.beta1 = 0.9 - 0.01 * group;
      rule.beta2 = 0.999 - 0.01 * group;
      rule.eps = 1e-8 * (group + 1);
      rule.momentum = 0.02 * group;
      rule.rates[1] = {1e-3 * (group + 1), 0.1 * group};
    }
    cpu::update_groups(params, {});
    params.state = device_state.data();
    params.factors = device.data();
    cuda::update_groups(params, stream.launch());
    const std::vector<GroupFactors> got = device.host();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const bool untouched = skip != 0 || i + 1 == got.size();
      EXPECT_EQ(factors[i].adam.eps == before[i].adam.eps, untouched) << i;
      // The power is the only function here that devices may round differently.
      for (std::size_t j = 0; j < sizeof(GroupFactors) / sizeof(float) - 1; ++j) {
        const auto value = [j](const GroupFactors& f) { return (j < 8 ? &f.adam.decay : &f.sgd.lr - 8)[j]; };
        EXPECT_FLOAT_EQ(value(got[i]), value(factors[i])) << "group " << i << ", factor " << j;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
