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
  cache[gemm_cache_key("NVIDIA H200", 130100, "1,2,3")] = {0, 1, 2, ~std::uint64_t{0},
                                                           4, 5, 6, 0x1234567890abcdefu};
  cache[gemm_cache_key("a\tname\nwith breaks", 7, "1,2,3")] = {9, 9, 9, 9, 9, 9, 9, 9};
  return cache;
}

TEST_F(CudaGemmCache, KeepsWinners) {
  EXPECT_TRUE(load_gemm_cache(path_).empty());
  save_gemm_cache(path_, some_winners());
  EXPECT_EQ(load_gemm_cache(path_), some_winners());
}

TEST_F(CudaGemmCache, AddsToWhatOthersWrote) {
  save_gemm_cache(path_, some_winners());
  GemmCache other;
  other[gemm_cache_key("NVIDIA H200", 130100, "4,5,6")] = {};
  other[gemm_cache_key("NVIDIA H200", 130100, "1,2,3")] = {};
  save_gemm_cache(path_, other);
  GemmCache want = some_winners();
  for (const auto& [key, words] : other) want[key] = words;
  EXPECT_EQ(load_gemm_cache(path_), want);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "deeper"), {}), 1)
      << "no file is left";
}

TEST_F(CudaGemmCache, CountsADamagedFileAsEmpty) {
  save_gemm_cache(path_, some_winners());
  const std::string good = print_gemm_cache(some_winners());
  for (std::size_t length = 0; length < good.size(); ++length) {
    ASSERT_TRUE(parse_gemm_cache(std::string_view(good).substr(0, length)).empty()) << "cut at " << length;
    std::string flipped = good;
    flipped[length] = static_cast<char>(flipped[length] ^ 1);
    ASSERT_TRUE(parse_gemm_cache(flipped).empty()) << "changed at " << length;
  }
  EXPECT_TRUE(parse_gemm_cache(good + good).empty());
  write(good.substr(0, good.size() / 2));
  EXPECT_TRUE(load_gemm_cache(path_).empty());
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
  std::string words = word;
  for (int i = 1; i < 8; ++i) words.append(" ").append(word);
  const auto entry = [](std::string key, const char* separator, const std::string& value) {
    return key.append(separator).append(value).append("\n");
  };
  const std::string good = entry("key", "\t", words);
  EXPECT_EQ(parse_gemm_cache(wrapped(good)).size(), 1u);
  EXPECT_TRUE(parse_gemm_cache(wrapped(good + good)).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(entry("key", " ", words))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(entry("", "\t", words))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(good.substr(0, good.size() - 1))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(entry("key", "\t", words.substr(1)))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(entry("key", "\t", words.substr(1).append("g")))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped(entry(std::string(2000, 'k'), "\t", words))).empty());
  EXPECT_TRUE(parse_gemm_cache(wrapped("\n")).empty());
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
