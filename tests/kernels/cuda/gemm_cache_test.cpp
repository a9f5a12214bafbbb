/// The file that keeps algorithms of products between runs: what is written is read, what is damaged is not.

#include "kernels/cuda/gemm_cache.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace tessera::kernels::cuda {
namespace {

class CudaGemmCache : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("tessera-gemm-cache-" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    path_ = (folder_ / "deeper" / "gemm.txt").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }

  std::filesystem::path folder_;
  std::string path_;
};

GemmCache some_winners() {
  GemmCache cache;
  cache[gemm_cache_key("NVIDIA H200", 130100, "1,2,3")] = {
      .words = {0, 1, 2, ~std::uint64_t{0}, 4, 5, 6, 0x1234567890abcdefu}, .timed = true};
  cache[gemm_cache_key("a\tname\nwith breaks", 7, "1,2,3")] = {.words = {9, 9, 9, 9, 9, 9, 9, 9}};
  return cache;
}

TEST_F(CudaGemmCache, KeepsWinners) {
  EXPECT_EQ(load_gemm_cache(path_), GemmCache()) << "there is no file";
  save_gemm_cache(path_, some_winners());
  EXPECT_EQ(load_gemm_cache(path_), some_winners());
}

TEST_F(CudaGemmCache, AddsToWhatOthersWrote) {
  save_gemm_cache(path_, some_winners());
  GemmCache other;
  other[gemm_cache_key("NVIDIA H200", 130100, "4,5,6")] = {};
  other[gemm_cache_key("NVIDIA H200", 130100, "1,2,3")] = {.words = {}, .timed = true};
  save_gemm_cache(path_, other);
  GemmCache want = some_winners();
  for (const auto& [key, kept] : other) want[key] = kept;
  EXPECT_EQ(load_gemm_cache(path_), want);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "deeper"), {}), 1)
      << "no file is left";
}

TEST_F(CudaGemmCache, WhatWasTimedReplacesFirstChoices) {
  const std::string key = gemm_cache_key("NVIDIA H200", 130100, "1,2,3");
  const KeptAlgorithm first{.words = {1}}, timed{.words = {2}, .timed = true}, later{.words = {3}};
  for (const bool timed_first : {false, true}) {
    std::filesystem::remove(path_);
    save_gemm_cache(path_, {{key, timed_first ? timed : first}});
    save_gemm_cache(path_, {{key, timed_first ? first : timed}});
    EXPECT_EQ(load_gemm_cache(path_), (GemmCache{{key, timed}}));
  }
  std::filesystem::remove(path_);
  save_gemm_cache(path_, {{key, first}});
  save_gemm_cache(path_, {{key, later}});
  EXPECT_EQ(load_gemm_cache(path_), (GemmCache{{key, later}})) << "the newer of equals";
}

TEST_F(CudaGemmCache, AMemoLastsFromRunToRun) {
  const std::string key = gemm_cache_key("NVIDIA H200", 130100, "1,2,3");
  {
    GemmMemo memo;
    EXPECT_EQ(memo.open(path_, false), "");
    EXPECT_EQ(memo.find(key, false), nullptr);
    memo.put(key, {.words = {1}});
    EXPECT_EQ(memo.find(key, true), nullptr) << "nothing was timed";
  }
  GemmMemo memo, other;
  EXPECT_EQ(memo.open(path_, true), "");
  EXPECT_EQ(other.open(path_, false), "");
  ASSERT_NE(memo.find(key, false), nullptr);
  EXPECT_EQ(*memo.find(key, false), (KeptAlgorithm{.words = {1}}));
  memo.put(key, {.words = {2}, .timed = true});
  other.put("another product", {.words = {3}});  // of a process that has not seen what was timed
  EXPECT_EQ(memo.open(path_, false), "");
  EXPECT_EQ(*memo.find(key, true), (KeptAlgorithm{.words = {2}, .timed = true}));
  EXPECT_NE(memo.find("another product", false), nullptr);
  EXPECT_EQ(memo.open("", false), "");
  EXPECT_EQ(memo.find(key, false), nullptr) << "another file, other algorithms";
}

TEST_F(CudaGemmCache, AMemoIsNotWrittenForEveryFirstChoiceAndEnds) {
  GemmMemo memo;
  memo.open(path_, false);
  constexpr std::size_t kProducts = GemmMemo::kMostKept + 10;
  std::size_t writes = 0;
  for (std::size_t i = 0; i < kProducts; ++i) {
    std::filesystem::remove(path_);
    memo.put(std::to_string(i), {.words = {i}});
    writes += std::filesystem::exists(path_) ? 1 : 0;
  }
  EXPECT_GT(writes, 10u);
  EXPECT_LT(writes, 100u);
  EXPECT_EQ(memo.find(std::to_string(kProducts - 1), false), nullptr);
  memo.put(std::to_string(kProducts - 1), {.words = {5}, .timed = true});  // these are never too many
  EXPECT_EQ(load_gemm_cache(path_)->size(), GemmMemo::kMostKept + 1);
}

TEST_F(CudaGemmCache, AMemoTellsWhatIsWrongWithItsFile) {
  save_gemm_cache(path_, some_winners());
  write("something else");
  GemmMemo memo;
  const std::string damaged = memo.open(path_, false);
  EXPECT_NE(damaged.find(path_ + " is damaged or of another version"), std::string::npos) << damaged;
  EXPECT_EQ(memo.open(path_, false), "") << "replaced";
  std::filesystem::remove(path_);
  std::filesystem::create_directories(path_);  // a folder in the file's place
  const std::string unwritable = memo.open(path_, false);
  EXPECT_NE(unwritable.find("cannot be written"), std::string::npos) << unwritable;
  memo.put("key", {.words = {1}});
  EXPECT_NE(memo.find("key", false), nullptr);
  EXPECT_THROW(memo.open(path_, true), IoError);
}

TEST_F(CudaGemmCache, TablesServeWhatTheFileDoesNotHave) {
  const std::string second = path_ + ".second", damaged = path_ + ".damaged";
  const KeptAlgorithm one{.words = {1}, .timed = true}, two{.words = {2}, .timed = true},
      apart{.timed = true};
  save_gemm_cache(path_, {{"a", one}, {"b", apart}});
  save_gemm_cache(second, {{"a", two}, {"c", two}});
  std::ofstream(damaged) << "something else";
  GemmMemo memo;
  EXPECT_EQ(memo.read_tables({path_, "/nowhere/table.txt", second}), "");
  EXPECT_EQ(memo.open("", false), "");
  EXPECT_EQ(*memo.find("a", true), one) << "the first file counts";
  EXPECT_EQ(*memo.find("c", false), two);
  EXPECT_TRUE(memo.find("b", true)->separate());
  EXPECT_FALSE(memo.find("a", true)->separate());
  EXPECT_EQ(memo.find_own("a"), nullptr) << "a search times again what only a table has";
  memo.put("a", {.words = {3}});
  EXPECT_EQ(*memo.find("a", false), (KeptAlgorithm{.words = {3}})) << "what the run itself chose";
  EXPECT_EQ(*memo.find("a", true), one);
  EXPECT_EQ(memo.find_own("a"), nullptr) << "not timed";
  const std::string note = memo.read_tables({damaged});
  EXPECT_NE(note.find(damaged + " is damaged or of another version"), std::string::npos) << note;
  EXPECT_EQ(memo.find("c", false), nullptr);
}

TEST_F(CudaGemmCache, CountsADamagedFileAsEmpty) {
  save_gemm_cache(path_, some_winners());
  const std::string good = print_gemm_cache(some_winners());
  for (std::size_t length = 0; length < good.size(); ++length) {
    ASSERT_FALSE(parse_gemm_cache(std::string_view(good).substr(0, length))) << "cut at " << length;
    std::string flipped = good;
    flipped[length] = static_cast<char>(flipped[length] ^ 1);
    ASSERT_FALSE(parse_gemm_cache(flipped)) << "changed at " << length;
  }
  EXPECT_FALSE(parse_gemm_cache(good + good));
  write(good.substr(0, good.size() / 2));
  EXPECT_FALSE(load_gemm_cache(path_));
  save_gemm_cache(path_, some_winners());
  EXPECT_EQ(load_gemm_cache(path_), some_winners());
}

// Lines that do not fit, under a checksum that does.
TEST_F(CudaGemmCache, ChecksWhatTheChecksumCovers) {
  const auto wrapped = [](const std::string& lines) {
    const std::string body = std::string(detail::kCacheTitle) + lines;
    return body + "end " + detail::hexadecimal(detail::checksum(body)) + '\n';
  };
  const std::string word(16, '0');
  std::string words = "first " + word;
  for (int i = 1; i < 8; ++i) words.append(" ").append(word);
  const auto entry = [](std::string key, const char* separator, const std::string& value) {
    return key.append(separator).append(value).append("\n");
  };
  const std::string good = entry("key", "\t", words);
  EXPECT_EQ(parse_gemm_cache(wrapped(good))->size(), 1u);
  EXPECT_FALSE(parse_gemm_cache(wrapped(good + good)));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry("key", " ", words))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry("", "\t", words))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(good.substr(0, good.size() - 1))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry("key", "\t", words.substr(1)))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry("key", "\t", "third " + words.substr(6)))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry("key", "\t", words.substr(1).append("g")))));
  EXPECT_FALSE(parse_gemm_cache(wrapped(entry(std::string(2000, 'k'), "\t", words))));
  EXPECT_FALSE(parse_gemm_cache(wrapped("\n")));
}

TEST_F(CudaGemmCache, NamesAFileThatCannotBeWritten) {
  std::filesystem::create_directories(folder_ / "deeper" / "gemm.txt");  // a folder in the file's place
  try {
    save_gemm_cache(path_, some_winners());
    FAIL() << "written over a folder";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find(path_), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
