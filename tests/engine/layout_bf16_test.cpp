/// bf16: a layout adds no more rounding noise to a gradient than the serial bf16 run has.

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

/// The errors of one batch are a lottery (1.9 for a bias, 1.16 for all tensors, where many batches give 1.14
/// and 1.07), so squares are summed over these.
constexpr unsigned kBatches = 24;

Config config_of(Family family, const std::vector<std::string>& overrides) {
  Settings c;
  c.model = {.family = family,
             .num_layers = 4,
             .hidden_size = 48,
             .num_heads = 12,
             .ffn_hidden_size = 64,
             .vocab_size = 211,
             .max_positions = 16,
             .dropout = 0.1,
             .attention_dropout = 0.1,
             .init_std = 0.1};
  if (family == Family::llama) c.model.num_kv_heads = 4;
  c.training.seq_length = 16;
  c.training.global_batch_size = 8;
  c.training.micro_batch_size = 2;
  c.device.threads = 1;
  return with_overrides(c, overrides);
}

/// First-step gradients of several batches, put together from all ranks.
struct Gradients {
  std::vector<WholeTensors> tensors;
  std::vector<double> losses;
};

/// Writes a rank's part of a tensor to where it lies in the whole.
void put_together(const Parameter& parameter, const Tensor& tensor, std::vector<float>& whole) {
  const std::vector<float> own = tensor.to_floats();
  const Shape global = parameter.placement().global();
  whole.resize(static_cast<std::size_t>(global.numel()), std::nanf(""));
  const Shape from = parameter.shape().contiguous_strides(), to = global.contiguous_strides();
  for (const Placed& box : parameter.placement().boxes()) {
    for (std::int64_t i = 0; i < box.shape.numel(); ++i) {
      std::int64_t rest = i, source = 0, target = 0;
      for (int d = box.shape.rank() - 1; d >= 0; --d) {
        const std::int64_t at = rest % box.shape[d];
        rest /= box.shape[d];
        source += (box.local[d] + at) * from[d];
        target += (box.global[d] + at) * to[d];
      }
      whole[static_cast<std::size_t>(target)] = own[static_cast<std::size_t>(source)];
    }
  }
}

Gradients first_gradients(const Config& config, int ranks) {
  Gradients result;
  result.tensors.resize(kBatches);
  result.losses.resize(kBatches);
  std::mutex mutex;
  run_local(ranks, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    for (unsigned i = 0; i < kBatches; ++i) {
      const Batch whole = random_batch(8, 16, 40 + i, 211);
      const double loss = engine->forward_backward(
          data_part(whole, engine->mesh().coordinates().dp, engine->mesh().shape().dp, 2));
      for (const Parameter* p : engine->params().parameters()) {
        const Tensor gradient = engine->params().gradient().whole(*p);
        const std::lock_guard lock(mutex);
        put_together(*p, gradient, result.tensors[i][p->name()]);
        result.losses[i] = loss;
      }
      engine->discard();
    }
  });
  return result;
}

/// Squared distances from the fp32 gradients by tensor, over all batches; "" is all tensors together.
std::map<std::string, double> squared_errors(const Gradients& a, const Gradients& exact) {
  std::map<std::string, double> sums;
  for (unsigned i = 0; i < kBatches; ++i) {
    for (const auto& [name, values] : exact.tensors[i]) {
      const std::vector<float>& other = a.tensors[i].at(name);
      EXPECT_EQ(other.size(), values.size()) << name;
      double sum = 0;
      for (std::size_t k = 0; k < values.size(); ++k) {
        const double e = static_cast<double>(other[k]) - values[k];
        sum += e * e;
      }
      sums[name] += sum;
      sums[""] += sum;
    }
  }
  return sums;
}

struct Serial {
  Gradients exact, rounded;
  std::map<std::string, double> errors;
};

const Serial& serial_of(Family family) {
  static std::map<std::string_view, Serial> runs;
  const auto found = runs.find(family.name);
  if (found != runs.end()) return found->second;
  Serial serial;
  serial.exact = first_gradients(config_of(family, {}), 1);
  serial.rounded = first_gradients(config_of(family, {"training.precision=bf16"}), 1);
  serial.errors = squared_errors(serial.rounded, serial.exact);
  return runs.emplace(family.name, std::move(serial)).first->second;
}

class LayoutBf16 : public ::testing::TestWithParam<NamedLayout> {};

TEST_P(LayoutBf16, RoundsNoWorseThanTheSerialRun) {
  if (on_cuda()) GTEST_SKIP() << "NCCL rounds a sum of bfloat16 once per rank";
  const NamedLayout& c = GetParam();
  const Serial& serial = serial_of(c.family);
  std::vector<std::string> overrides = c.overrides;
  overrides.push_back("training.precision=bf16");
  const Gradients run = first_gradients(config_of(c.family, overrides), c.ranks);
  const auto errors = squared_errors(run, serial.exact);
  double worst = 0, whole = 0, loss_error = 0;
  std::string worst_name;
  for (const auto& [name, squared] : errors) {
    ASSERT_TRUE(std::isfinite(squared)) << name;
    const double reference = serial.errors.at(name);
    const double ratio = std::sqrt(squared / reference);
    if (name.empty()) {
      whole = ratio;
    } else if (ratio > worst) {
      worst = ratio;
      worst_name = name;
    }
  }
  for (unsigned i = 0; i < kBatches; ++i) {
    loss_error =
        std::max(loss_error, std::abs(run.losses[i] - serial.exact.losses[i]) / serial.exact.losses[i]);
  }
  RecordProperty("worst_tensor", tessera::detail::concat(worst, " ", worst_name));
  RecordProperty("all_tensors", tessera::detail::concat(whole));
  RecordProperty("loss_error", tessera::detail::concat(loss_error));
  EXPECT_LE(worst, 1.5) << worst_name;
  EXPECT_LE(whole, 1.1);
  EXPECT_LE(loss_error, 2e-3);
}

const NamedLayout kBf16Cases[] = {
    {"tp2", Family::gpt2, {"parallel.tensor=2"}, 2},
    {"tp4_gpt2", Family::gpt2, {"parallel.tensor=4"}, 4},
    {"tp4", Family::llama, {"parallel.tensor=4"}, 4},
    {"tp2_sp", Family::gpt2, {"parallel.tensor=2", "parallel.sequence=true"}, 2},
    {"tp4_sp", Family::llama, {"parallel.tensor=4", "parallel.sequence=true"}, 4},
    {"pp2", Family::gpt2, {"parallel.pipeline=2"}, 2},
    {"pp2_zb_v", Family::gpt2, {"parallel.pipeline=2", "parallel.schedule=zb-v"}, 2},
    {"pp2_zb_h1", Family::llama, {"parallel.pipeline=2", "parallel.schedule=zb-h1"}, 2},
    {"cp2", Family::gpt2, {"parallel.context=2"}, 2},
    {"cp4", Family::llama, {"parallel.context=4"}, 4},
    {"dp2", Family::gpt2, {}, 2},
    {"dp4_zero0", Family::llama, {"parallel.zero_stage=0"}, 4},
    {"dp2_zero2", Family::gpt2, {"parallel.zero_stage=2"}, 2},
    {"dp2_zero3", Family::gpt2, {"parallel.zero_stage=3"}, 2},
    {"tp2_sp_pp2_dp2_zero3",
     Family::llama,
     {"parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.zero_stage=3"},
     8},
    {"tp2_sp_pp2_dp2",
     Family::llama,
     {"parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"},
     8},
    {"tp2_sp_selective",
     Family::gpt2,
     {"parallel.tensor=2", "parallel.sequence=true", "training.recompute=selective"},
     2},
    {"tp2_full",
     Family::llama,
     {"parallel.tensor=2", "training.recompute=full", "training.recompute_partition=true"},
     2},
};
INSTANTIATE_TEST_SUITE_P(All, LayoutBf16, ::testing::ValuesIn(kBf16Cases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
