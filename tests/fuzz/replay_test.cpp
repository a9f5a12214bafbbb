/// Every fuzz target over its stored inputs: what fuzzing has found to lead somewhere, and what once was a
/// fault.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// FUZZ_TARGETS, from CMake: FUZZ_TARGET(name) for each file beside this one.
#define FUZZ_TARGET(name) extern "C" int fuzz_##name(const std::uint8_t*, std::size_t);
FUZZ_TARGETS
#undef FUZZ_TARGET

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct Target {
  std::string name;
  int (*run)(const std::uint8_t*, std::size_t);
};

const std::vector<Target> kTargets = {
#define FUZZ_TARGET(name) {#name, fuzz_##name},
    FUZZ_TARGETS
#undef FUZZ_TARGET
};

class Fuzz : public ::testing::TestWithParam<Target> {};

TEST_P(Fuzz, StoredInputs) {
  const Target& target = GetParam();
  target.run(nullptr, 0);
  std::vector<fs::path> inputs;
  for (const auto& entry : fs::directory_iterator(fs::path(FUZZ_CORPUS) / target.name))
    inputs.push_back(entry);
  std::sort(inputs.begin(), inputs.end());
  EXPECT_FALSE(inputs.empty()) << target.name << " has no stored input";
  for (const fs::path& path : inputs) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    // On the heap and no longer than it is: a sanitizer sees a byte read too many.
    EXPECT_NO_THROW(target.run(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size())) << path;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Fuzz, ::testing::ValuesIn(kTargets),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
