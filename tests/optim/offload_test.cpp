// State outside the device's memory is updated as it is inside, to the last bit, and leaves nothing behind.

#include <filesystem>

#include "tests/optim/distributed_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using namespace test;

/// An empty folder on a disk, gone with this.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

OffloadConfig to_disk(const std::filesystem::path& folder, std::int64_t buffers = 4) {
  return {.optimizer = OffloadTo::nvme, .path = folder.string(), .tile = 1024, .buffers = buffers};
}

constexpr OffloadTo kNone = OffloadTo::none, kCpu = OffloadTo::cpu, kNvme = OffloadTo::nvme;

/// All that a rank would load, by name and place.
std::map<std::string, std::vector<float>> held(Rank& rank) {
  std::map<std::string, std::vector<float>> all;
  for (const auto& list : {rank.store->pieces(PieceSet::held), rank.optimizer->pieces(PieceSet::held)}) {
    for (const StatePiece& piece : list)
      all[detail::concat(piece.name(), " ", piece.begin)] = piece.values.read(rank.ctx).to_floats();
  }
  return all;
}

void expect_same(Rank& a, Rank& b) {
  a.store->weights().gather();
  b.store->weights().gather();
  const auto x = held(a), y = held(b);
  ASSERT_EQ(x.size(), y.size());
  for (const auto& [name, values] : x) EXPECT_EQ(values, y.at(name)) << name;
}

void train(Rank& rank, int from, int to) {
  for (int step = from; step < to; ++step) {
    rank.call({.exact = false, .step = step});
    rank.optimizer->step(0.05, 0.1);
  }
}

void load(const Rank& from, Rank& to) {
  const auto targets = to.optimizer->pieces(PieceSet::held);
  const auto sources = from.optimizer->pieces(PieceSet::held);
  ASSERT_EQ(targets.size(), sources.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    // Box by box, as checkpoints are read.
    const auto into = targets[i].boxes(), out = sources[i].boxes();
    for (std::size_t box = 0; box < into.size(); ++box)
      into[box].values.write(to.ctx, out[box].values.read(from.ctx).to_floats().data());
  }
  to.optimizer->set_update_state(from.optimizer->update_state());
}

struct Case {
  Grid grid;
  DType compute;
  int zero_stage;
  OptimizerConfig config;
  bool split = false;
  std::int64_t buffers = 4;
  OffloadTo optimizer = kNvme, gradients = kNone, parameters = kNone;
  double ratio = 1;
};

OffloadConfig offload_of(const Case& c, const std::filesystem::path& folder) {
  OffloadConfig config = to_disk(folder, c.buffers);
  config.optimizer = c.optimizer;
  config.gradients = c.gradients;
  config.parameters = c.parameters;
  config.ratio = c.ratio;
  return config;
}

class OptimizerOffload : public testing::TestWithParam<Case> {};

TEST_P(OptimizerOffload, ChangesNoBitAndMovesBothWays) {
  const Case& c = GetParam();
  const TempDir folder;
  run_local(c.grid.tp * c.grid.dp * c.grid.pp, {.timeout_s = 60, .check = true}, [&](auto world) {
    const ParamStoreOptions options{
        .compute = c.compute, .split_main = c.split, .zero_stage = c.zero_stage, .bucket_elements = 500};
    Rank plain(world, c.grid, options, c.config);
    Rank offloaded(world, c.grid, options, c.config, {}, offload_of(c, folder.path()));
    ASSERT_TRUE(offloaded.store->place());
    EXPECT_GT(offloaded.store->place()->in_memory + offloaded.store->place()->on_disk, 0u);
    for (Rank* rank : {&plain, &offloaded}) train(*rank, 0, 3);
    expect_same(plain, offloaded);
    // What a checkpoint holds goes on in the other place.
    Rank from_disk(world, c.grid, options, c.config),
        to_the_disk(world, c.grid, options, c.config, {}, offload_of(c, folder.path()));
    for (Rank* rank : {&from_disk, &to_the_disk}) train(*rank, 0, 3);  // the same weights
    load(offloaded, from_disk);
    load(plain, to_the_disk);
    for (Rank* rank : {&plain, &offloaded, &from_disk, &to_the_disk}) train(*rank, 3, 5);
    for (Rank* rank : {&offloaded, &from_disk, &to_the_disk}) expect_same(plain, *rank);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "a file that a killed process would leave";
  });
}

const OptimizerConfig kAdamW{.eps = 1e-5, .clip_grad = 0.7};
INSTANTIATE_TEST_SUITE_P(
    Layouts, OptimizerOffload,
    testing::Values(Case{{}, DType::f32, 1, kAdamW}, Case{{}, DType::bf16, 1, kAdamW, false, 2},
                    Case{{1, 3, 1}, DType::f32, 0, kAdamW}, Case{{1, 3, 1}, DType::bf16, 1, kAdamW, true},
                    Case{{1, 2, 1}, DType::bf16, 2, kAdamW}, Case{{1, 2, 1}, DType::f32, 3, kAdamW},
                    Case{{4, 1, 2}, DType::bf16, 1, kAdamW},
                    Case{{1, 2, 1}, DType::f32, 1, {.name = OptimizerName::sgd, .momentum = 0.8}},
                    Case{{}, DType::f32, 1, {.name = OptimizerName::adam}, false, 3},
                    // In host memory, by streams of its own.
                    Case{{}, DType::bf16, 1, kAdamW, false, 2, kCpu},
                    Case{{1, 2, 1}, DType::f32, 1, kAdamW, false, 2, kCpu, kNone, kNone, 0.4},
                    Case{{1, 3, 1}, DType::bf16, 2, kAdamW, false, 2, kCpu, kCpu},
                    Case{{1, 2, 1}, DType::bf16, 2, kAdamW, false, 2, kNone, kCpu, kNone, 0.5},
                    Case{{1, 3, 1}, DType::bf16, 3, kAdamW, false, 2, kCpu, kCpu, kCpu},
                    Case{{1, 2, 1}, DType::f32, 3, kAdamW, false, 2, kNvme, kNone, kCpu},
                    Case{{1, 2, 1}, DType::bf16, 3, kAdamW, false, 2, kNone, kNone, kCpu, 0.7},
                    Case{{2, 2, 1}, DType::f32, 3, kAdamW, false, 2, kNone, kCpu, kCpu},
                    Case{{}, DType::f32, 3, kAdamW, false, 2, kCpu, kCpu, kCpu},
                    Case{{}, DType::bf16, 3, kAdamW, false, 2, kNvme, kCpu, kCpu, 0.6}));

/// One rank on whatever device the tests run on, its state in host memory or in a file.
TEST(OptimizerOffload, OnAnyDevice) {
  const TempDir folder;
  struct Model {
    explicit Model(const OffloadConfig& offload)
        : store(ctx, {&weight, &bias}, {.compute = DType::bf16, .offload = offload}),
          optimizer(ctx, store, {.eps = 1e-5}) {}
    ExecCtx ctx = test::context(1, 5);
    Parameter weight{"weight", {70, 64}, Init::normal(0.5f)};
    Parameter bias{"bias", {64}, Init::ones()};
    ParamStore store;
    Optimizer optimizer;
  };
  const auto trained = [](const OffloadConfig& offload) {
    Model model(offload);
    for (int step = 0; step < 3; ++step) {
      for (Parameter* p : model.store.parameters()) {
        p->next_beta();
        test::edit(p->grad(), [&](std::vector<float>& grad) {
          for (std::size_t i = 0; i < grad.size(); ++i)
            grad[i] = static_cast<float>((i * 37 + static_cast<std::size_t>(step)) % 11) - 5.0f;
        });
      }
      model.store.gradient().finish_call();
      model.optimizer.step(0.1, 0.1);
    }
    std::vector<std::vector<float>> all;
    for (const auto& list : {model.store.pieces(PieceSet::held), model.optimizer.pieces(PieceSet::held)}) {
      for (const StatePiece& piece : list) all.push_back(piece.values.read(model.ctx).to_host().to_floats());
    }
    return all;
  };
  const auto plain = trained({});
  EXPECT_EQ(trained(to_disk(folder.path())), plain);
  EXPECT_EQ(trained({.optimizer = OffloadTo::cpu, .tile = 1024}), plain);
}

TEST(OptimizerOffload, AStepThatIsSkippedChangesNothing) {
  const TempDir folder;
  run_local(1, {.timeout_s = 60, .check = true}, [&](auto world) {
    Rank rank(world, {}, {}, kAdamW, {}, to_disk(folder.path()));
    train(rank, 0, 2);
    const auto before = held(rank);
    rank.store->gradient().begin_call();
    for (Parameter* p : rank.declared.parameters)
      write_gradient(*p, std::vector<float>(static_cast<std::size_t>(p->shape().numel()),
                                            std::numeric_limits<float>::infinity()));
    rank.store->gradient().finish_call();
    EXPECT_TRUE(rank.optimizer->step(0.05, 0.1).skipped);
    EXPECT_EQ(held(rank), before);
  });
}

TEST(OptimizerOffload, FoldersThatCannotBeUsedAreRefused) {
  const auto made = [](const OffloadConfig& config, std::int64_t numel = 5000) {
    const auto place = std::make_shared<OffloadPlace>(ExecCtx::cpu(1), config, 3);
    const OffloadedBuffer buffer(place, config.optimizer, "adam_m", DType::f32, numel);
    const OffloadedBuffer second(place, config.optimizer, "adam_v", DType::f32, numel);
    return place->notes;
  };
  test::expect_error<ConfigError>([&] { made({.optimizer = OffloadTo::nvme}); }, "offload.path");
  test::expect_error<ConfigError>([&] { made(to_disk("/no/such/folder")); }, "/no/such/folder", "make it");
  test::expect_error<ConfigError>([&] { made(to_disk("/dev/null")); }, "/dev/null is not a folder");
  test::expect_error<IoError>([&] { made(to_disk("/proc")); }, "rank 3 cannot make a file in /proc");
  const TempDir folder;
  test::expect_error<IoError>([&] { made(to_disk(folder.path()), std::int64_t{1} << 44); }, "reserve",
                              folder.path().string());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const auto notes = made(to_disk("/dev/shm"));
  ASSERT_FALSE(notes.empty());
  EXPECT_NE(notes.back().find("tmpfs"), std::string::npos);
  EXPECT_EQ(std::ranges::count(notes, notes.back()), 1);  // of the folder, not of each file
}

}  // namespace
}  // namespace tessera
