/// Where parameters lie in the buffer of Megatron's distributed optimizer, against tables made by hand.

#include "checkpoint/megatron_buffer.hpp"

#include <gtest/gtest.h>

namespace tessera::checkpoint_detail {
namespace {

using Places = std::vector<std::int64_t>;

TEST(MegatronBuffer, TheLastParameterComesFirst) {
  const std::vector<BufferParameter> parameters = {{10000}, {2500}};
  const BufferLayout layout = buffer_layout(parameters, std::nullopt);
  EXPECT_EQ(layout.begins, (Places{2560, 0}));
  EXPECT_EQ(layout.elements, 12560);
}

TEST(MegatronBuffer, EachBeginsAtAMultipleOf64OfItsBucket) {
  const std::vector<BufferParameter> parameters = {{1}, {64}, {65}, {63}, {1}};
  const BufferLayout layout = buffer_layout(parameters, std::nullopt);
  EXPECT_EQ(layout.begins, (Places{320, 256, 128, 64, 0}));
  EXPECT_EQ(layout.elements, 321);
}

TEST(MegatronBuffer, ABucketEndsWithTheParameterThatFillsIt) {
  const std::vector<BufferParameter> parameters = {{10}, {30}, {100}, {50}};
  // 50 and 100 (at 64) make 164; then 30 and 10 (at 64) begin anew, directly behind what is stored.
  const BufferLayout layout = buffer_layout(parameters, 120);
  EXPECT_EQ(layout.begins, (Places{164 + 64, 164, 64, 0}));
  EXPECT_EQ(layout.elements, 164 + 74);
  EXPECT_EQ(buffer_layout(parameters, 1).begins, (Places{180, 150, 50, 0}));
  EXPECT_EQ(buffer_layout(parameters, 165).begins, (Places{222, 192, 64, 0}));
}

TEST(MegatronBuffer, ASharedEmbeddingHasABucketOfItsOwn) {
  // First stage: the embedding is the last one of the buffer; what is before it ends at a multiple of 64.
  const std::vector<BufferParameter> first = {{200, true}, {40}, {70}};
  EXPECT_EQ(buffer_layout(first, std::nullopt).begins, (Places{192, 128, 0}));
  EXPECT_EQ(buffer_layout(first, std::nullopt).elements, 392);
  // Last stage: it comes first, and what follows begins directly behind it.
  const std::vector<BufferParameter> last = {{40}, {70}, {200, true}};
  EXPECT_EQ(buffer_layout(last, std::nullopt).begins, (Places{328, 200, 0}));
  EXPECT_EQ(buffer_layout(last, std::nullopt).elements, 368);
  EXPECT_EQ(buffer_layout({}, 1).elements, 0);
}

}  // namespace
}  // namespace tessera::checkpoint_detail
