#pragma once
/// What the checkpoint tests share: a folder of their own, reproducible bytes, files written and read by
/// plain code.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tessera/checkpoint/tensor_view.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {

namespace fs = std::filesystem;

class ScratchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    // In memory where there is such a place: hundreds of durable renames on a busy disk take many seconds.
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
    dir_ = base / ("tessera-test-" + std::to_string(::getpid()) + "-" + info->name());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  fs::path dir_;
};

inline std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void spill(const fs::path& path, const std::string& text) {
  fs::remove(path);  // truncating in place makes some file systems flush at once: slow in a loop
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

inline std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(count);
  for (auto& b : bytes) b = static_cast<std::byte>(generator());
  return bytes;
}

/// A safetensors file from a header text and data, without the library's writer.
inline std::string raw_file(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(static_cast<std::uint64_t>(header.size()) >> (8 * i));
  return file + header + data;
}

}  // namespace tessera::test
