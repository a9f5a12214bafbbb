/// A tuner's choices, files and notes are its own.

#include "kernels/cuda/gemm_tuner.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {
namespace {

using kernels::cuda::KeptAlgorithm;
using kernels::cuda::ProductKey;
using Choice = GemmTuner::Choice;

ProductKey key_of_sizes(std::int64_t m) {
  kernels::Gemm g;
  g.m = m, g.n = 8, g.k = 16;
  g.lda = g.k, g.ldb = g.ldc = g.n;
  return kernels::cuda::key_of(kernels::cuda::product_of(g, {}));
}

TEST(CudaGemmTuner, AChoiceIsMadeOnceUnlessItIsNotSettled) {
  GemmTuner tuner({});
  int asked = 0;
  const auto choose = [&](bool settled) {
    return [&, settled] {
      return Choice{.exists = true, .settled = settled, .algorithm = {static_cast<std::uint64_t>(++asked)}};
    };
  };
  EXPECT_EQ(tuner.choice(key_of_sizes(1), choose(false)).algorithm[0], 1u);
  EXPECT_EQ(tuner.choice(key_of_sizes(1), choose(true)).algorithm[0], 2u);
  EXPECT_EQ(tuner.choice(key_of_sizes(1), choose(true)).algorithm[0], 2u) << "settled";
  EXPECT_EQ(tuner.choice(key_of_sizes(2), choose(true)).algorithm[0], 3u) << "another product";
  tuner.set_choice(key_of_sizes(2), {.exists = false});
  EXPECT_FALSE(tuner.choice(key_of_sizes(2), choose(true)).exists);
  GemmTuner other({});
  EXPECT_EQ(other.choice(key_of_sizes(1), choose(true)).algorithm[0], 4u) << "another engine's";
}

TEST(CudaGemmTuner, FilesAndNotesAreItsOwn) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("tessera-gemm-tuner-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string file = (folder / "file").string(), table = (folder / "table").string(),
                    damaged = (folder / "damaged").string();
  const KeptAlgorithm fast{.words = {1}, .timed = true}, faster{.words = {2}, .timed = true};
  kernels::cuda::save_gemm_cache(table, {{"a", fast}, {"b", fast}});
  std::ofstream(damaged) << "something else";
  {
    GemmTuner tuner({.tune = true, .cache_path = file, .tables = {damaged, table}}), plain({});
    EXPECT_TRUE(tuner.times());
    EXPECT_FALSE(plain.times());
    EXPECT_EQ(tuner.kept("a", true), fast);
    EXPECT_FALSE(tuner.is_tuned("a")) << "tables are never written";
    tuner.keep("a", faster);
    EXPECT_EQ(tuner.kept("a", true), faster);
    EXPECT_EQ(plain.kept("a", false), std::nullopt);
    EXPECT_NE(tuner.notes().take().find(damaged), std::string::npos);
    EXPECT_EQ(tuner.notes().take(), "") << "told once";
    EXPECT_EQ(plain.notes().take(), "");
  }
  GemmTuner again({.tune = false, .cache_path = file, .tables = {}});
  EXPECT_TRUE(again.is_tuned("a"));
  EXPECT_FALSE(again.is_tuned("b"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
