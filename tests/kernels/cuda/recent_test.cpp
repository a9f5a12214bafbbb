/// The memo of cuDNN's plans: what goes, and what stays.

#include "kernels/cuda/recent.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace tessera::kernels::cuda {
namespace {

const auto kAny = [](const auto&) { return true; };

TEST(CudaRecent, ForgetsWhatWasNotUsedForLongest) {
  Recent<int, std::string> memo(3);
  for (const int key : {1, 2, 3}) memo.touch(key) = std::to_string(key);
  EXPECT_TRUE(memo.shrink(kAny).empty());
  EXPECT_EQ(memo.touch(1), "1");
  memo.touch(4) = "4";
  memo.touch(5) = "5";
  EXPECT_EQ(memo.shrink(kAny), (std::vector<std::string>{"2", "3"}));
  EXPECT_EQ(memo.size(), 3u);
  EXPECT_EQ(memo.touch(1), "1");
  EXPECT_EQ(memo.touch(2), "") << "made anew";
  EXPECT_EQ(memo.shrink(kAny), (std::vector<std::string>{"4"}));
}

TEST(CudaRecent, KeepsWhatMayNotGo) {
  Recent<int, int> memo(2);
  for (int key = 0; key < 10; ++key) {
    memo.touch(key) = key;
    memo.shrink([](int value) { return value % 2 == 1; });
  }
  EXPECT_EQ(memo.size(), 6u) << "five that may not go, and the one used last";
  for (const int key : {0, 2, 4, 6, 8, 9}) EXPECT_EQ(memo.touch(key), key);
  EXPECT_EQ(memo.shrink(kAny), (std::vector<int>{0, 2, 4, 6}));
}

TEST(CudaRecent, TheOneUsedLastStays) {
  Recent<int, std::shared_ptr<int>> memo(0);
  memo.touch(7) = std::make_shared<int>(7);
  EXPECT_TRUE(memo.shrink(kAny).empty());
  EXPECT_EQ(*memo.touch(7), 7);
}

}  // namespace
}  // namespace tessera::kernels::cuda
