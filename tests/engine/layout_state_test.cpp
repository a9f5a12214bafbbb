/// Checkpoints and evaluation across layouts: what one saves any other goes on from.

#include <deque>
#include <set>

#include "tessera/engine/state.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"
#include "tests/support/device.hpp"

namespace tessera::test {
namespace {

struct Layout {
  const char* name;
  int tp = 1, pp = 1, dp = 1;
  bool sp = false;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  Precision precision = Precision::fp32;
  int zero = 1;
  std::int64_t group = 0;
  int cp = 1;
  std::int64_t experts = 0;
  int ep = 1;
  int ranks() const { return tp * cp * pp * dp; }
};

Config config_of(const Layout& layout) {
  Config config = tiny_llama(0.1);
  config.model.num_layers = 8;
  config.model.num_heads = 8;
  config.model.num_kv_heads = 4;
  config.model.ffn_hidden_size = 20;
  config.optimizer.eps = 1e-5;
  config.optimizer.lr = 1e-3;
  config.training.seq_length = 8;
  config.training.global_batch_size = 24;
  config.training.micro_batch_size = 1;
  config.training.precision = layout.precision;
  config.parallel.tensor = layout.tp;
  config.parallel.sequence = layout.sp;
  config.parallel.context = layout.cp;
  config.parallel.pipeline = layout.pp;
  config.parallel.schedule = layout.schedule;
  config.parallel.data = layout.dp;
  config.parallel.zero_stage = layout.zero;
  if (layout.group > 0) config.parallel.zero_group = layout.group;
  if (layout.experts > 0) config.model.num_experts = layout.experts;
  config.parallel.expert = layout.ep;
  return config;
}

Batch batch_of(std::int64_t step) { return random_batch(24, 8, static_cast<unsigned>(1000 + step)); }

/// Trains steps [first, last) on a layout, from a checkpoint if there is one, and saves; returns the losses.
std::vector<double> train_part(const Layout& layout, const std::filesystem::path& root, std::int64_t first,
                               std::int64_t last) {
  const Config config = config_of(layout);
  std::vector<double> losses;
  run_ranks(layout.ranks(), {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    if (first > 0) {
      load_engine(CheckpointReader(resolve_checkpoint(root)), *engine);
      engine->params().weights().gather();
      engine->progress().steps = first;
    }
    for (std::int64_t step = first; step < last; ++step) {
      const double loss =
          engine
              ->step(data_part(batch_of(step), engine->mesh().coordinates().dp, engine->mesh().shape().dp, 1))
              .loss;
      if (world->rank() == 0) losses.push_back(loss);
    }
    save_engine(root, *engine, {.step = last, .consumed_samples = last * 24, .config = config}, {});
  });
  return losses;
}

class LayoutState : public FolderTest {
 protected:
  void expect_same_from(const Layout& saver, const std::vector<Layout>& readers, std::int64_t more,
                        double tolerance) {
    constexpr std::int64_t kFirst = 3;
    const std::vector<double> straight =
        train_part({.name = "one", .experts = saver.experts}, dir_ / "straight", 0, kFirst + more);
    train_part(saver, dir_ / "saved", 0, kFirst);
    for (const Layout& reader : readers) {
      std::filesystem::remove_all(dir_ / "copy");
      std::filesystem::copy(dir_ / "saved", dir_ / "copy", std::filesystem::copy_options::recursive);
      const std::vector<double> losses = train_part(reader, dir_ / "copy", kFirst, kFirst + more);
      ASSERT_EQ(losses.size(), static_cast<std::size_t>(more));
      for (std::int64_t i = 0; i < more; ++i) {
        EXPECT_NEAR(losses[static_cast<std::size_t>(i)], straight[static_cast<std::size_t>(kFirst + i)],
                    tolerance * straight[static_cast<std::size_t>(kFirst + i)])
            << reader.name << ", step " << kFirst + i;
      }
    }
  }
};

TEST_F(LayoutState, TheSeedOfTheSavedRunGoesOn) {
  const auto engine_of = [](std::int64_t seed) {
    Config config = tiny_llama(0.2);
    config.training.seed = seed;
    return build_engine(config);
  };
  const auto saved = engine_of(5), other = engine_of(6);
  saved->step(batch_of(0));
  const auto folder = save_engine(dir_, *saved, {.step = 1, .config = tiny_llama(0.2)}, {});
  EXPECT_EQ(resume_engine(folder, *other).seed, 5u);
  EXPECT_EQ(other->step(batch_of(1)).loss, saved->step(batch_of(1)).loss);
}

TEST_F(LayoutState, SavedUnderOneLayoutLoadsUnderAnother) {
  expect_same_from({"tp2_pp2", 2, 2, 1}, {{"dp4", 1, 1, 4}, {"tp4", 4, 1, 1}, {"pp4", 1, 4, 1}, {"tp1"}}, 20,
                   1e-5);
}

TEST_F(LayoutState, SharesOfAnyStageLoadUnderAnother) {
  const Layout zero3{.name = "zero3", .dp = 3, .zero = 3}, zero2{.name = "zero2", .dp = 2, .zero = 2};
  Layout grid{.name = "zero3_tp2_pp2_dp2", .tp = 2, .pp = 2, .dp = 2, .sp = true};
  grid.zero = 3;
  const Layout hybrid{.name = "zero3_dp4_group2", .dp = 4, .zero = 3, .group = 2};
  expect_same_from(zero3, {{"tp1"}, zero2, grid}, 4, 1e-5);
  expect_same_from(grid, {{"dp2", 1, 1, 2}, zero3}, 4, 1e-5);
  expect_same_from(zero2, {zero3, hybrid}, 4, 1e-5);
  expect_same_from(hybrid, {{"tp1"}, zero2}, 4, 1e-5);
  const Layout context{.name = "zero3_cp2_dp2", .dp = 2, .zero = 3, .cp = 2};
  expect_same_from(context, {{"tp1"}, zero2}, 4, 1e-5);
  expect_same_from(zero2, {context}, 4, 1e-5);
}

TEST_F(LayoutState, ExpertsLoadOnOtherRanks) {
  const auto layout = [](Layout of) {
    of.experts = 4;
    return of;
  };
  const Layout four = layout({.name = "ep4_dp4", .dp = 4, .zero = 0, .ep = 4}),
               two = layout({.name = "ep2_dp4_zero3", .dp = 4, .zero = 3, .ep = 2}),
               grid = layout({.name = "ep2_tp2_pp2_dp2", .tp = 2, .pp = 2, .dp = 2, .sp = true, .ep = 2}),
               whole = layout({.name = "dp2_zero2", .dp = 2, .zero = 2});
  expect_same_from(four, {whole, two, grid}, 4, 1e-5);
  expect_same_from(two, {four, layout({.name = "one"})}, 4, 1e-5);
  expect_same_from(whole, {two, grid}, 4, 1e-5);
}

std::set<std::string> files_of(const std::filesystem::path& checkpoint) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint))
    names.insert(entry.path().filename().string());
  return names;
}

TEST_F(LayoutState, FilesCarryTheCoordinatesOfTheirRank) {
  const Layout layout{.name = "tp2_pp2", .tp = 2, .pp = 2};
  train_part(layout, dir_ / "grid", 0, 1);
  EXPECT_EQ(files_of(dir_ / "grid/step-00000001"),
            (std::set<std::string>{
                "manifest.json", "model_tp_0_pp_0.safetensors", "model_tp_0_pp_1.safetensors",
                "model_tp_1_pp_0.safetensors", "model_tp_1_pp_1.safetensors",
                "optimizer_tp_0_pp_0_dp_0.safetensors", "optimizer_tp_0_pp_1_dp_0.safetensors",
                "optimizer_tp_1_pp_0_dp_0.safetensors", "optimizer_tp_1_pp_1_dp_0.safetensors"}));
  // Which rank a file is of: its first tensor rank holds the first rows of the vocabulary, on the first
  // stage.
  const CheckpointReader reader(dir_ / "grid/step-00000001");
  const Manifest& manifest = reader.manifest();
  for (const Manifest::Piece& piece : reader.find("param.embedding.word_embeddings.weight")->pieces) {
    EXPECT_EQ(manifest.files[piece.file].name,
              piece.slice.offset[0] == 0 ? "model_tp_0_pp_0.safetensors" : "model_tp_1_pp_0.safetensors");
  }
  for (const Manifest::Tensor& tensor : manifest.tensors) {
    for (const Manifest::Piece& piece : tensor.pieces) {
      const std::string& file = manifest.files[piece.file].name;
      EXPECT_EQ(file.starts_with("model_"), tensor.name.starts_with("param."))
          << tensor.name << " in " << file;
    }
  }
  train_part({.name = "dp2", .dp = 2}, dir_ / "data", 0, 1);
  EXPECT_EQ(files_of(dir_ / "data/step-00000001"),
            (std::set<std::string>{"manifest.json", "model_tp_0_pp_0_dp_0.safetensors",
                                   "model_tp_0_pp_0_dp_1.safetensors", "optimizer_tp_0_pp_0_dp_0.safetensors",
                                   "optimizer_tp_0_pp_0_dp_1.safetensors"}));
}

/// Writes a checkpoint again as versions before files had coordinates did: a file per rank, with a box of
/// rows of every tensor of the weights and of the optimizer.
void write_with_old_names(const std::filesystem::path& from, const std::filesystem::path& root) {
  const CheckpointReader reader(from);
  CheckpointSave save(root, reader.state().step, 1 << 20);
  std::vector<std::string> records;
  for (const int rank : {0, 1}) {
    std::deque<std::vector<std::byte>> parts;
    std::vector<CheckpointTensor> tensors;
    for (const Manifest::Tensor& tensor : reader.manifest().tensors) {
      const std::int64_t rows = tensor.shape[0], half = rows / 2;
      const TensorSlice box = TensorSlice::rows(tensor.shape, rank == 0 ? 0 : half, rank == 0 ? half : rows);
      parts.emplace_back(static_cast<std::size_t>(box.shape.numel()) * size_of(tensor.dtype));
      reader.read(tensor.name, box, parts.back());
      tensors.push_back(
          {tensor.name, tensor.dtype, tensor.shape, box, tensor.placement, parts.back().data()});
    }
    records.push_back(write_checkpoint_shard(
        save.staging(), "shard-0000" + std::to_string(rank) + "-of-00002.safetensors", tensors));
  }
  save.commit(reader.state(), records);
}

TEST_F(LayoutState, CheckpointsOfVersionsWithoutCoordinatesLoad) {
  const std::vector<double> straight = train_part({"one"}, dir_ / "straight", 0, 5);
  train_part({"one"}, dir_ / "new", 0, 3);
  write_with_old_names(dir_ / "new/step-00000003", dir_ / "old");
  EXPECT_EQ(files_of(dir_ / "old/step-00000003"),
            (std::set<std::string>{"manifest.json", "shard-00000-of-00002.safetensors",
                                   "shard-00001-of-00002.safetensors"}));
  const std::vector<double> losses = train_part({.name = "tp2", .tp = 2}, dir_ / "old", 3, 5);
  for (std::size_t i = 0; i < losses.size(); ++i)
    EXPECT_NEAR(losses[i], straight[3 + i], 1e-5 * straight[3 + i]);
}

TEST_F(LayoutState, OneToEightToThreeProcesses) {
  const std::vector<double> straight = train_part({"one"}, dir_ / "straight", 0, 8);
  train_part({"one"}, dir_ / "run", 0, 3);
  std::vector<double> losses =
      train_part({"eight", 2, 2, 2, true, PipelineSchedule::zb_v}, dir_ / "run", 3, 5);
  const auto rest = train_part({"three", 1, 1, 3, false, PipelineSchedule::one_f_one_b, Precision::fp32, 0},
                               dir_ / "run", 5, 8);
  losses.insert(losses.end(), rest.begin(), rest.end());
  for (std::size_t i = 0; i < losses.size(); ++i)
    EXPECT_NEAR(losses[i], straight[3 + i], 1e-5 * straight[3 + i]);
}

TEST_F(LayoutState, EvaluationAndSavingWaitForTheWeights) {
  if (on_cuda()) GTEST_SKIP() << "the delay is that of ranks as threads on the CPU";
  Config config = config_of({"dp2", 1, 1, 2});
  std::vector<double> losses(4);
  std::mutex mutex;
  run_local(2, {.timeout_s = 60, .delay_s = 0.02}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const int dp = engine->mesh().coordinates().dp;
    const Batch batch = data_part(batch_of(0), dp, 2, 1);
    engine->step(batch);
    const double at_once = engine->evaluate(batch);
    engine->step(batch);
    save_engine(dir_ / "at_once", *engine, {.step = 2, .config = config}, {});
    world->barrier(engine->ctx());
    engine->params().weights().wait();
    const double later = engine->evaluate(batch);
    const std::lock_guard lock(mutex);
    losses[static_cast<std::size_t>(2 * dp)] = at_once;
    losses[static_cast<std::size_t>(2 * dp + 1)] = later;
  });
  // The same two steps without any delay, waiting after each.
  run_local(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(config, true, world);
    const int dp = engine->mesh().coordinates().dp;
    const Batch batch = data_part(batch_of(0), dp, 2, 1);
    engine->step(batch);
    engine->params().weights().wait();
    world->barrier(engine->ctx());
    EXPECT_EQ(engine->evaluate(batch), losses[static_cast<std::size_t>(2 * dp)]);
    engine->step(batch);
    engine->params().weights().wait();
    const double trained = engine->evaluate(batch);
    EXPECT_EQ(trained, losses[static_cast<std::size_t>(2 * dp + 1)]);
    const auto other = build_engine(config, true, world);
    load_engine(CheckpointReader(resolve_checkpoint(dir_ / "at_once")), *other);
    other->params().weights().gather();
    EXPECT_EQ(other->evaluate(batch), trained);
  });
}

}  // namespace
}  // namespace tessera::test
