/// Memory of every rank, measured on its context's allocator: what stays between steps, what a schedule holds
/// in flight, what recomputation gives back.

#include <algorithm>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kWidth = 64, kFfn = 256, kHeads = 4, kVocab = 128, kSeq = 64, kMicro = 2, kGlobal = 16,
                       kLayers = 8, kRows = kSeq * kMicro;

Config config_of(const std::vector<std::string>& overrides) {
  Settings c;
  c.model = {.family = Family::gpt2,
             .num_layers = kLayers,
             .hidden_size = kWidth,
             .num_heads = kHeads,
             .ffn_hidden_size = kFfn,
             .vocab_size = kVocab,
             .max_positions = kSeq};
  c.training.seq_length = kSeq;
  c.training.micro_batch_size = kMicro;
  c.training.global_batch_size = kGlobal;
  c.device.threads = 1;
  return with_overrides(c, overrides);
}

Batch own_part(const Engine& engine) {
  return data_part(random_batch(kGlobal, kSeq, 3, kVocab), engine.mesh().coordinates().dp,
                   engine.mesh().shape().dp, kMicro);
}

std::int64_t used(const Engine& engine) {
  return static_cast<std::int64_t>(engine.ctx().allocator->stats().used_bytes);
}
std::int64_t peak(const Engine& engine) {
  return static_cast<std::int64_t>(engine.ctx().allocator->stats().peak_used_bytes);
}

struct PersistentCase {
  const char* name;
  int t, p, d;
  std::vector<std::string> overrides;
  /// Bytes of a parameter, and more of one that kernels read in fp32.
  double bytes, more;
};
void PrintTo(const PersistentCase& c, std::ostream* out) { *out << c.name; }
class LayoutPersistent : public ::testing::TestWithParam<PersistentCase> {};

TEST_P(LayoutPersistent, BytesPerParameter) {
  const PersistentCase& c = GetParam();
  std::vector<std::string> overrides = c.overrides;
  overrides.push_back("parallel.tensor=" + std::to_string(c.t));
  overrides.push_back("parallel.pipeline=" + std::to_string(c.p));
  if (c.p == 2) overrides.push_back("parallel.pipeline_layout=\"4,4\"");
  const Config config = config_of(overrides);
  std::mutex mutex;
  run_local(c.t * c.p * c.d, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    engine->step(own_part(*engine));
    engine->params().weights().wait();
    const int stage = engine->mesh().coordinates().pp;
    const std::int64_t layers = kLayers / c.p, h = kWidth, table = kVocab / c.t * h;
    // Norms, word and position table; a tied table is on both stages.
    std::int64_t fp32_read = layers * 4 * h + table;
    if (stage == 0) fp32_read += kSeq * h;
    if (stage == c.p - 1) fp32_read += 2 * h;
    const std::int64_t matrices = (4 * h * h + 2 * h * kFfn) / c.t, biases = (3 * h + kFfn) / c.t + 2 * h;
    const std::int64_t parameters = fp32_read + layers * (matrices + biases);
    const double expected =
        c.bytes * static_cast<double>(parameters) + c.more * static_cast<double>(fp32_read);
    const std::lock_guard lock(mutex);
    EXPECT_NEAR(static_cast<double>(used(*engine)) / expected, 1.0, 0.02) << "rank " << world->rank();
  });
}

constexpr const char *kZero2 = "parallel.zero_stage=2", *kZero3 = "parallel.zero_stage=3",
                     *kBf16 = "training.precision=bf16";

const PersistentCase kPersistent[] = {
    {"fp32", 1, 1, 1, {}, 16, 0},
    {"bf16", 1, 1, 1, {"training.precision=bf16"}, 18, 0},
    {"fp32_dp2_zero0", 1, 1, 2, {"parallel.zero_stage=0"}, 16, 0},
    {"bf16_dp2_zero0", 1, 1, 2, {"parallel.zero_stage=0", "training.precision=bf16"}, 18, 0},
    {"fp32_dp2", 1, 1, 2, {}, 8 + 8.0 / 2, 0},
    {"fp32_dp8", 1, 1, 8, {}, 8 + 8.0 / 8, 0},
    {"bf16_dp2", 1, 1, 2, {"training.precision=bf16"}, 6 + 12.0 / 2, 4 * (1 - 1.0 / 2)},
    {"bf16_dp8", 1, 1, 8, {"training.precision=bf16"}, 6 + 12.0 / 8, 4 * (1 - 1.0 / 8)},
    {"fp16_dp2", 1, 1, 2, {"training.precision=fp16"}, 6 + 12.0 / 2, 4 * (1 - 1.0 / 2)},
    {"bf16_tp2_sp_dp2",
     2,
     1,
     2,
     {"training.precision=bf16", "parallel.sequence=true"},
     6 + 12.0 / 2,
     4 * (1 - 1.0 / 2)},
    {"bf16_pp2_dp4", 1, 2, 4, {"training.precision=bf16"}, 6 + 12.0 / 4, 4 * (1 - 1.0 / 4)},
    {"fp32_tp2_pp2_dp2", 2, 2, 2, {}, 8 + 8.0 / 2, 0},
    {"fp32_dp4_zero2", 1, 1, 4, {kZero2}, 4 + 12.0 / 4, 0},
    {"bf16_dp2_zero2", 1, 1, 2, {kZero2, kBf16}, 2 + 16.0 / 2, 4 * (1 - 1.0 / 2)},
    {"bf16_dp8_zero2", 1, 1, 8, {kZero2, kBf16}, 2 + 16.0 / 8, 4 * (1 - 1.0 / 8)},
    {"bf16_tp2_pp2_dp2_zero2", 2, 2, 2, {kZero2, kBf16}, 2 + 16.0 / 2, 4 * (1 - 1.0 / 2)},
    {"fp32_dp2_zero3", 1, 1, 2, {kZero3}, 16.0 / 2, 0},
    {"fp32_dp4_zero3", 1, 1, 4, {kZero3}, 16.0 / 4, 0},
    // What kernels read in fp32 is rounded when it was gathered.
    {"bf16_dp2_zero3", 1, 1, 2, {kZero3, kBf16}, 18.0 / 2, -2.0 / 2},
    {"bf16_dp8_zero3", 1, 1, 8, {kZero3, kBf16}, 18.0 / 8, -2.0 / 8},
    {"bf16_dp4_zero3_split", 1, 1, 4, {kZero3, kBf16, "optimizer.split_main_weights=true"}, 16.0 / 4, 0},
    {"fp16_tp2_pp2_dp2_zero3", 2, 2, 2, {kZero3, "training.precision=fp16"}, 18.0 / 2, -2.0 / 2},
};
INSTANTIATE_TEST_SUITE_P(All, LayoutPersistent, ::testing::ValuesIn(kPersistent),
                         [](const auto& info) { return std::string(info.param.name); });

/// The table in docs/floors/autograd.md, fp32: a layer keeps, per row and until its backward, two sums with
/// their statistics, two normalised values, q k v, what attention gives with its statistics, and the MLP's
/// inner values.
constexpr std::int64_t kKept =
    kRows * (2 * (4 * kWidth + 8) + 2 * 4 * kWidth + 4 * 3 * kWidth + 4 * kWidth + 4 * kHeads + 4 * kFfn);
/// What the weight gradients of a layer need: sums and statistics; inputs of the four linears; gradients of
/// what the linears and norms gave.
constexpr std::int64_t kDeferred =
    kRows * (2 * (4 * kWidth + 8) + 4 * (3 * kWidth + kFfn) + 4 * (3 * kWidth + kFfn + 4 * kWidth));
constexpr std::int64_t kMessage = 4 * kRows * kWidth;
/// The final norm's sum and statistics, the head's input gradient, losses and their gradients.
constexpr std::int64_t kHeadKept = kMessage + 8 * kRows + kMessage + 8 * kRows;
/// Beyond what is in flight: the working set of one layer's backward (the gradient of the residual stream,
/// of the MLP's inner values and those again, of its output), and messages that arrive or leave.
constexpr std::int64_t kWorking = 2 * kMessage + 2 * 4 * kRows * kFfn + 8 * kMessage;

struct FlightCase {
  const char* name;
  PipelineSchedule kind;
  int chunks;
  std::vector<int> held;  ///< micro-batches x pieces in flight on each of four stages
};
void PrintTo(const FlightCase& c, std::ostream* out) { *out << c.name; }
class LayoutInFlight : public ::testing::TestWithParam<FlightCase> {};

/// The most a stage holds on its walk through the table.
std::int64_t held_on(const Schedule& table, int stage) {
  const std::int64_t layers = kLayers / table.pieces();
  std::int64_t now = 0, most = 0;
  for (const Action& action : table.actions[static_cast<std::size_t>(stage)]) {
    const bool head = table.piece_of(stage, action.chunk) == table.pieces() - 1;
    const bool embedding = table.piece_of(stage, action.chunk) == 0;
    const std::int64_t kept = layers * kKept + (head ? kHeadKept : 0);
    const std::int64_t deferred =
        layers * kDeferred + (head ? kHeadKept - 4 * kRows : 0) + (embedding ? kMessage : 0);
    switch (action.kind) {
      case Action::Kind::forward:
        now += kept;
        break;
      case Action::Kind::backward:
        now -= kept;
        break;
      case Action::Kind::input_gradient:
        now += deferred - kept;
        break;
      case Action::Kind::weight_gradient:
        now -= deferred;
        break;
    }
    most = std::max(most, now);
  }
  return most;
}

TEST_P(LayoutInFlight, ActivationsFollowTheScheduleTable) {
  const FlightCase& c = GetParam();
  const Schedule table = make_schedule(c.kind, 4, c.chunks, kGlobal / kMicro);
  EXPECT_EQ(simulate(table, {PassTimes{}}).most_in_flight, c.held);
  std::vector<std::string> overrides{"parallel.pipeline=4",
                                     "parallel.schedule=" + std::string(name_of(c.kind))};
  overrides.push_back(c.chunks == 1 ? "parallel.pipeline_layout=\"2,2,2,2\""
                                    : "parallel.pipeline_layout=\"1,1,1,1,1,1,1,1\"");
  if (c.kind == PipelineSchedule::interleaved) overrides.push_back("parallel.virtual_stages=2");
  const Config config = config_of(overrides);
  std::mutex mutex;
  run_local(4, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const Batch batch = own_part(*engine);
    engine->step(batch);
    const std::int64_t persistent = used(*engine);
    engine->ctx().allocator->reset_peak();
    engine->forward_backward(batch);
    const std::int64_t most = peak(*engine) - persistent;
    const int stage = world->rank();
    const std::int64_t table_bytes = held_on(table, stage);
    const std::int64_t pieces = c.held[static_cast<std::size_t>(stage)] * (kLayers / table.pieces()) * kKept;
    const std::lock_guard lock(mutex);
    if (c.kind != PipelineSchedule::zb_h1 && c.kind != PipelineSchedule::zb_v) {
      EXPECT_GE(table_bytes, pieces);
      EXPECT_LE(table_bytes, pieces + c.held[static_cast<std::size_t>(stage)] * kHeadKept);
    }
    EXPECT_GE(most, table_bytes) << "stage " << stage;
    EXPECT_LE(most, table_bytes + kWorking + (stage == 3 || c.chunks == 2 ? 4 * kRows * kVocab : 0))
        << "stage " << stage;
    RecordProperty("stage" + std::to_string(stage),
                   tessera::detail::concat(most, " of ", table_bytes, " in flight"));
  });
}

const FlightCase kFlights[] = {
    {"gpipe", PipelineSchedule::gpipe, 1, {8, 8, 8, 8}},
    {"one_f_one_b", PipelineSchedule::one_f_one_b, 1, {4, 3, 2, 1}},
    {"interleaved", PipelineSchedule::interleaved, 2, {11, 9, 7, 5}},
    {"zb_h1", PipelineSchedule::zb_h1, 1, {4, 4, 4, 4}},
    {"zb_v", PipelineSchedule::zb_v, 2, {8, 8, 8, 8}},
};
INSTANTIATE_TEST_SUITE_P(All, LayoutInFlight, ::testing::ValuesIn(kFlights),
                         [](const auto& info) { return std::string(info.param.name); });

/// The head shares its table with the embedding, whose gradient is complete last: the layers' do not wait for
/// it.
TEST(LayoutGradients, LeaveLayerByLayerWhereTheHeadIsTied) {
  const auto most = [](int layers) {
    std::int64_t most = 0;
    std::mutex mutex;
    run_local(2, [&](std::shared_ptr<Communicator> world) {
      const auto engine =
          build_engine(config_of({kZero3, "training.recompute=full", "training.micro_batch_size=1",
                                  "model.num_layers=" + std::to_string(layers)}),
                       true, world);
      const Batch batch = data_part(random_batch(2, kSeq, 3, kVocab), engine->mesh().coordinates().dp, 2, 1);
      engine->step(batch);
      const std::int64_t persistent = used(*engine);
      engine->ctx().allocator->reset_peak();
      engine->forward_backward(batch);
      const std::lock_guard lock(mutex);
      most = std::max(most, peak(*engine) - persistent);
    });
    return most;
  };
  const std::int64_t gradient = (4 * kWidth * kWidth + 2 * kWidth * kFfn) * 4, input = kSeq * kWidth * 4;
  EXPECT_LT(most(kLayers) - most(kLayers / 2), kLayers / 2 * (input + gradient / 10));
}

/// Highest point of a step of one micro-batch over what stays.
std::int64_t peak_with(const std::vector<std::string>& overrides) {
  const auto engine = build_engine(config_of(overrides));
  const Batch batch = random_batch(kMicro, kSeq, 5, kVocab);
  engine->step(batch);
  const std::int64_t persistent = used(*engine);
  engine->ctx().allocator->reset_peak();
  engine->forward_backward(batch);
  return peak(*engine) - persistent;
}

TEST(LayoutRecompute, GivesBackTheComputedBytes) {
  const std::int64_t none = peak_with({});
  const std::int64_t selective = peak_with({"training.recompute=selective"});
  // Two normalised values per layer. (One of them is there again while it is used, but not at the peak.)
  EXPECT_NEAR(static_cast<double>(none - selective), static_cast<double>(kLayers * 2 * kMessage),
              0.01 * static_cast<double>(kLayers * 2 * kMessage));
  RecordProperty("none", tessera::detail::concat(none));
  RecordProperty("selective", tessera::detail::concat(selective));
  for (const std::int64_t n : {1, 2, 4}) {
    const std::int64_t full =
        peak_with({"training.recompute=full", "training.recompute_layers=" + std::to_string(n)});
    // Each segment keeps its input; one of them at a time is there as a whole, and its first norm keeps that
    // very input.
    const std::int64_t expected = kLayers * kKept - (kLayers / n * kMessage + n * kKept - kMessage);
    EXPECT_NEAR(static_cast<double>(none - full), static_cast<double>(expected),
                0.01 * static_cast<double>(expected))
        << n << " layers";
    RecordProperty("full" + std::to_string(n), tessera::detail::concat(full));
  }
}

}  // namespace
}  // namespace tessera::test
