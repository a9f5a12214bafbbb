#include "base/suggest.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

int distance(std::string_view a, std::string_view b) { return nearest_name(a, std::span(&b, 1)).distance; }

TEST(Suggest, EditDistance) {
  EXPECT_EQ(distance("", ""), 0);
  EXPECT_EQ(distance("", "abc"), 3);
  EXPECT_EQ(distance("kitten", "sitting"), 3);
  EXPECT_EQ(distance("flaw", "lawn"), 2);
  EXPECT_EQ(distance("ab", "ba"), 1);   // a swap counts once
  EXPECT_EQ(distance("ca", "abc"), 3);  // but what was swapped is not edited again
  EXPECT_EQ(distance("zero-Stage", "zero_stage"), 0);
}

TEST(Suggest, PicksTheNearest) {
  const std::vector<std::string_view> names = {"num_layers", "num_heads", "num_kv_heads", "logging"};
  EXPECT_EQ(nearest_name("num_head", names).name, "num_heads");
  EXPECT_EQ(nearest_name("num_kvheads", names).name, "num_kv_heads");
  EXPECT_EQ(suggest("num_layer", names), "; did you mean 'num_layers'?");
  EXPECT_EQ(suggest("log", names), "; did you mean 'logging'?");
  EXPECT_EQ(suggest("qqqq", names),
            "; the nearest is 'logging' (known: num_layers, num_heads, num_kv_heads, logging)");
  EXPECT_EQ(suggest("x", {}), "");
}

TEST(Suggest, LongWordsStayCheap) {
  const std::vector<std::string_view> names = {"a"};
  EXPECT_LE(nearest_name(std::string(1000000, 'x'), names).distance, 64);
}

}  // namespace
}  // namespace tessera
