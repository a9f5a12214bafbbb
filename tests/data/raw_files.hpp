#pragma once
/// Independent of the library: builds and takes apart .idx/.bin bytes by hand, and a scratch folder per test.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/errors.hpp"

namespace tessera::testing {

class ScratchFolder {
 public:
  ScratchFolder() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() / (std::string("tessera_") + info->test_suite_name() +
                                                      "_" + info->name() + "_" + std::to_string(::getpid()));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void spill(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << bytes;
  ASSERT_TRUE(out.good()) << path;
}

template <typename T>
void put(std::string& out, T value) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.append(raw, sizeof(T));
}

template <typename T>
T get(const std::string& bytes, std::size_t at) {
  T value{};
  EXPECT_LE(at + sizeof(T), bytes.size());
  if (at + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

/// .idx bytes after the 34-byte header's fields, all given literally.
inline std::string index_bytes(int code, int width, const std::vector<std::int32_t>& lengths,
                               const std::vector<std::int64_t>& documents) {
  std::string out("MMIDIDX\0\0", 9);
  put<std::uint64_t>(out, 1);
  put<std::uint8_t>(out, static_cast<std::uint8_t>(code));
  put<std::uint64_t>(out, lengths.size());
  put<std::uint64_t>(out, documents.size());
  for (const auto length : lengths) put<std::int32_t>(out, length);
  std::int64_t pointer = 0;
  for (const auto length : lengths) {
    put<std::int64_t>(out, pointer);
    pointer += std::int64_t{length} * width;
  }
  for (const auto document : documents) put<std::int64_t>(out, document);
  return out;
}

/// Writes PREFIX.idx/.bin of u16 tokens 0, 1, 2, ... modulo `vocab`, one sequence per document.
inline void write_counting(const std::string& prefix, const std::vector<std::int32_t>& lengths,
                           int vocab = 60000) {
  std::vector<std::int64_t> documents = {0};
  std::string tokens;
  int next = 0;
  for (const auto length : lengths) {
    for (int i = 0; i < length; ++i) put<std::uint16_t>(tokens, static_cast<std::uint16_t>(next++ % vocab));
    documents.push_back(documents.back() + 1);
  }
  spill(prefix + ".idx", index_bytes(8, 2, lengths, documents));
  spill(prefix + ".bin", tokens);
}

using test::message_of;

inline bool mentions(const std::string& message, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (message.find(part) == std::string::npos) {
      ADD_FAILURE() << "\"" << part << "\" is not in: " << message;
      return false;
    }
  }
  return true;
}

}  // namespace tessera::testing
