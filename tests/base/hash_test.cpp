#include "tessera/base/hash.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

TEST(ContentHash, TellsBytesApart) {
  std::set<std::uint64_t> seen;
  std::vector<std::int32_t> values(37);
  const auto hash = [&](std::size_t count) {
    return content_hash(std::as_bytes(std::span(values)).first(count));
  };
  for (std::size_t count = 0; count <= values.size() * 4; ++count) seen.insert(hash(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (const std::int32_t value : {1, 2, -1, 1 << 30}) {
      values[i] = value;
      seen.insert(hash(values.size() * 4));
    }
    values[i] = 0;
  }
  EXPECT_EQ(seen.size(), values.size() * 4 + 1 + values.size() * 4);
  EXPECT_EQ(hash(9), hash(9));
  EXPECT_NE(content_hash({}, 1), content_hash({}, 2));
}

// Worked out from its definition by another program: files hold such values.
TEST(ContentHash, IsWhatFilesHold) {
  const auto of = [](std::string_view text) { return content_hash(std::as_bytes(std::span(text))); };
  EXPECT_EQ(of(""), 0x3829c0d5cf6e518cu);
  EXPECT_EQ(content_hash({}, 1), 0x5ccb0aefa26314f5u);
  EXPECT_EQ(of("tessera"), 0xd6e63f5ba9513335u);
  std::vector<std::byte> bytes(71);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(content_hash(bytes, 7), 0x19d29391c8d0155au);
}

}  // namespace
}  // namespace tessera
