/// Communication beside computation, from recorded timelines, and the order in which stages really ran.

#include <algorithm>

#include "tessera/nn/models/decoder.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"
#include "tests/support/timeline.hpp"

namespace tessera::test {
namespace {

Config config_of(const std::vector<std::string>& overrides) {
  Config c = tiny_config();
  c.model.num_layers = 8;
  c.model.hidden_size = 64;
  c.model.num_heads = 4;
  c.model.num_kv_heads = 4;
  c.model.ffn_hidden_size = 256;
  c.model.max_positions = 32;
  c.training.seq_length = 32;
  c.training.global_batch_size = 8;
  c.model.head_dim = 16;
  return with_overrides(c, overrides);
}

/// As build_engine, with buckets small enough that there are many.
std::unique_ptr<Engine> engine_with_buckets(const Config& config, std::shared_ptr<Communicator> world,
                                            std::int64_t bucket_elements) {
  EngineOptions options = EngineOptions::from(config);
  options.layout.bucket_elements = bucket_elements;
  const MeshShape shape = mesh_shape(config.parallel, world->size());
  options.layout.mesh = std::make_shared<ProcessMesh>(std::move(world), shape);
  ProcessMesh& mesh = *options.layout.mesh;
  const Sharding sharding{.tensor = {.comm = &mesh[Axis::tp], .sequence = config.parallel.sequence},
                          .pieces = pieces_of(config, mesh.coordinates().pp),
                          .recompute = RecomputeOptions::from(config.training)};
  return std::make_unique<Engine>(
      std::make_unique<Decoder>(config.model, numerics_of(config.training), sharding), options,
      test::context(1, 1234));
}

Batch own_part(const Engine& engine, const Batch& whole, const Config& config) {
  return data_part(whole, engine.mesh().coordinates().dp, engine.mesh().shape().dp,
                   config.training.micro_batch_size);
}

constexpr std::int64_t kSmallBucket = 40'000;

TEST(LayoutOverlap, GradientsAreReducedWhileBackwardRuns) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  const Config config = config_of({"parallel.data=2"});
  const Batch batch = random_batch(8, 32, 1);
  Timeline timeline;
  std::mutex mutex;
  double first_end = 1e300, first_begin = 1e300;
  std::size_t buckets = 0;
  run_local(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = engine_with_buckets(config, world, kSmallBucket);
    engine->set_trace(timeline.start(world->rank(), *engine->ctx().stream));
    const StepReport report = engine->step(own_part(*engine, batch, config));
    const ExecutedAction& last = report.executed.back();
    ASSERT_EQ(last.action.kind, Action::Kind::backward);
    const std::lock_guard lock(mutex);
    first_begin = std::min(first_begin, last.begin_s);
    first_end = std::min(first_end, last.end_s);
    buckets = engine->params().layout().buckets().size();
  });
  ASSERT_GE(buckets, 8u);
  std::ptrdiff_t early = 0;
  for (const int rank : {0, 1}) {
    const auto reductions = timeline.of(rank, "dp", "reduce_scatter");
    ASSERT_EQ(reductions.size(), buckets);
    early += std::ranges::count_if(reductions, [&](const TimedWork& sum) { return sum.begin_s < first_end; });
    // None starts before the last micro-batch's backward.
    for (const TimedWork& sum : reductions) EXPECT_GE(sum.begin_s, first_begin);
  }
  // The rank that ends first has started most of its reductions by then; without overlap nobody has any.
  EXPECT_GE(early, static_cast<std::ptrdiff_t>(buckets / 2));
}

/// Seconds of the quickest of some steps, and how many operations delayed it (of one rank).
struct Timed {
  double seconds = 1e300;
  std::uint64_t operations = 0;
};

Timed time_steps(const Config& config, int ranks, double delay_s) {
  const Batch batch = random_batch(config.training.global_batch_size, 32, 2);
  Timed timed;
  std::mutex mutex;
  run_local(ranks, {.timeout_s = 60, .delay_s = delay_s}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = engine_with_buckets(config, world, kSmallBucket);
    const Batch own = own_part(*engine, batch, config);
    const ProcessMesh& mesh = engine->mesh();
    const auto operations = [&] {
      return mesh[Axis::tp].stats().operations + mesh[Axis::dp].stats().operations +
             mesh.world().stats().operations;
    };
    engine->step(own);
    for (int step = 0; step < 3; ++step) {
      const std::uint64_t before = operations();
      const auto begin = std::chrono::steady_clock::now();
      engine->step(own);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      const std::lock_guard lock(mutex);
      timed.seconds = std::min(timed.seconds, taken.count());
      timed.operations = operations() - before;
    }
  });
  return timed;
}

/// Growth of a step with every operation slowed down, relative to the sum of the delays.
double exposed_share(const Config& config, int ranks, double delay_s) {
  const Timed plain = time_steps(config, ranks, 0), slow = time_steps(config, ranks, delay_s);
  EXPECT_EQ(plain.operations, slow.operations);
  const double share = (slow.seconds - plain.seconds) / (delay_s * static_cast<double>(slow.operations));
  ::testing::Test::RecordProperty("plain_ms", tessera::detail::concat(plain.seconds * 1e3));
  ::testing::Test::RecordProperty("slow_ms", tessera::detail::concat(slow.seconds * 1e3));
  ::testing::Test::RecordProperty("operations", tessera::detail::concat(slow.operations));
  ::testing::Test::RecordProperty("exposed", tessera::detail::concat(share));
  return share;
}

TEST(LayoutOverlap, DataParallelStepsHideMostDelays) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  EXPECT_LT(exposed_share(config_of({"parallel.data=2"}), 2, 0.02), 0.5);
}

/// A layer's two buckets of weights are asked for before the layer before computes, and its sums of gradients
/// are not waited for until those of the next one start.
TEST(LayoutOverlap, SharesTravelWhileTheLayerBeforeComputes) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  const Config config = config_of({"parallel.data=2", "parallel.zero_stage=3"});
  const Batch batch = random_batch(8, 32, 1);
  Timeline timeline;
  run_local(2, {.timeout_s = 60, .delay_s = 0.02}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    engine->set_trace(timeline.start(world->rank(), *engine->ctx().stream));
    engine->step(own_part(*engine, batch, config));
  });
  // How many of a rank's were under way at once when one of a kind began.
  const auto most_at_once = [&](int rank, const char* group, const char* operation) {
    const std::vector<TimedWork> all = timeline.of(rank, group, operation);
    std::ptrdiff_t most = 0;
    for (const TimedWork& one : all) {
      most = std::max(most, std::ranges::count_if(all, [&](const TimedWork& other) {
                        return other.begin_s <= one.begin_s && one.begin_s < other.end_s;
                      }));
    }
    return most;
  };
  for (const int rank : {0, 1}) {
    EXPECT_GE(most_at_once(rank, "dp_gather", "all_gather"), 3);
    EXPECT_GE(most_at_once(rank, "dp", "reduce_scatter"), 2);
  }
}

/// Per layer 10 collectives depend on each other in 8 steps: what a linear needs before it can begin waits,
/// but the two gathers of inputs that were not kept run beside the two sums of input gradients.
TEST(LayoutOverlap, TensorParallelStepsHideWhatDoesNotDependOnEachOther) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  const Config config = config_of({"parallel.tensor=2", "parallel.sequence=true", "model.num_layers=2",
                                   "training.global_batch_size=2", "training.micro_batch_size=2"});
  const Batch batch = random_batch(2, 32, 3);
  Timeline timeline;
  run_local(2, {.timeout_s = 60, .delay_s = 0.02}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = engine_with_buckets(config, world, kSmallBucket);
    engine->step(batch);
    engine->set_trace(timeline.start(world->rank(), *engine->ctx().stream));
    engine->step(batch);
  });
  for (const int rank : {0, 1}) {
    std::size_t beside = 0;
    const auto gathers = timeline.of(rank, "tp", "all_gather");
    for (const TimedWork& sum : timeline.of(rank, "tp", "reduce_scatter")) {
      beside += std::ranges::any_of(gathers, [&](const TimedWork& gather) {
        return gather.begin_s < sum.begin_s && gather.end_s > sum.begin_s;
      });
    }
    EXPECT_GE(beside, 4u) << "two column linears per layer, two layers";
  }
}

/// Of 10 L + 9 operations (embedding 2, head 2, loss, norms' gradients, and three numbers over the world
/// besides the L layers) 8 L + 9 follow from each other: 0.86 of the delays' sum for two layers.
TEST(LayoutOverlap, TensorParallelStepsTakeTheDependentDelaysOnly) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  const Config config = config_of({"parallel.tensor=2", "parallel.sequence=true", "model.num_layers=2",
                                   "training.global_batch_size=2", "training.micro_batch_size=2"});
  EXPECT_LT(exposed_share(config, 2, 0.02), 0.96);
}

struct OrderCase {
  const char* name;
  int stages, chunks;
  PipelineSchedule kind;
};
void PrintTo(const OrderCase& c, std::ostream* out) { *out << c.name; }
class LayoutOrder : public ::testing::TestWithParam<OrderCase> {};

TEST_P(LayoutOrder, StagesRanAsTheTableSays) {
  const OrderCase& c = GetParam();
  const Config config = config_of(
      {"parallel.pipeline=" + std::to_string(c.stages), "training.micro_batch_size=1",
       "parallel.schedule=" + std::string(name_of(c.kind)),
       "parallel.virtual_stages=" + std::to_string(c.kind == PipelineSchedule::zb_v ? 1 : c.chunks)});
  const Schedule table = make_schedule(c.kind, c.stages, c.chunks, 8);
  const Batch batch = random_batch(8, 32, 4);
  std::vector<std::vector<ExecutedAction>> executed(static_cast<std::size_t>(c.stages));
  run_local(c.stages, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    executed[static_cast<std::size_t>(world->rank())] = engine->step(batch).executed;
  });
  // When each pass of each piece ran, on one clock: nothing begins before what it needs has ended.
  std::map<std::tuple<bool, int, int>, ExecutedAction> by_piece;
  for (int stage = 0; stage < c.stages; ++stage) {
    const auto& column = executed[static_cast<std::size_t>(stage)];
    std::vector<Action> order;
    double end = 0;
    for (const ExecutedAction& e : column) {
      order.push_back(e.action);
      EXPECT_GE(e.begin_s, end);
      EXPECT_GE(e.end_s, e.begin_s);
      end = e.end_s;
      if (e.action.kind != Action::Kind::weight_gradient) {
        by_piece[{e.action.kind != Action::Kind::forward, table.piece_of(stage, e.action.chunk),
                  e.action.micro_batch}] = e;
      }
    }
    EXPECT_EQ(order, table.actions[static_cast<std::size_t>(stage)]) << "stage " << stage;
  }
  EXPECT_EQ(by_piece.size(), static_cast<std::size_t>(2 * table.pieces() * 8));
  for (int micro = 0; micro < 8; ++micro) {
    for (int piece = 0; piece + 1 < table.pieces(); ++piece) {
      EXPECT_LE((by_piece[{false, piece, micro}].end_s), (by_piece[{false, piece + 1, micro}].begin_s));
      EXPECT_LE((by_piece[{true, piece + 1, micro}].end_s), (by_piece[{true, piece, micro}].begin_s));
    }
  }
}

const OrderCase kOrders[] = {
    {"gpipe", 3, 1, PipelineSchedule::gpipe},
    {"one_f_one_b", 4, 1, PipelineSchedule::one_f_one_b},
    {"interleaved", 2, 3, PipelineSchedule::interleaved},
    {"interleaved4", 4, 2, PipelineSchedule::interleaved},
    {"zb_h1", 4, 1, PipelineSchedule::zb_h1},
    {"zb_v", 4, 2, PipelineSchedule::zb_v},
};
INSTANTIATE_TEST_SUITE_P(All, LayoutOrder, ::testing::ValuesIn(kOrders),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
