/// Philox against the known answers its authors publish with Random123, and the vector copies against the
/// scalar one.

#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/vec_functions.hpp"

namespace tessera {
namespace {

void expect_block(const PhiloxBlock& got, const PhiloxBlock& want) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want.word[i]) << "word " << i;
}

TEST(Philox, KnownAnswers) {
  expect_block(philox4x32({{0, 0, 0, 0}}, 0, 0), {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  const std::uint32_t ones = 0xffffffffu;
  expect_block(philox4x32({{ones, ones, ones, ones}}, ones, ones),
               {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  expect_block(philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u),
               {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(Philox, StreamIsKeyedBySeedSiteStepAndBlock) {
  const RngKey key{.seed = 0x299f31d0a4093822u, .site = 0x13198a2eu, .step = 0x03707344u};
  expect_block(random_block(key, 0x85a308d3243f6a88u),
               {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(Philox, SiteIsTheFnv1aHashOfTheName) {
  // Vectors of the FNV authors' reference test.
  EXPECT_EQ(site_of(""), 0x811c9dc5u);
  EXPECT_EQ(site_of("a"), 0xe40c292cu);
  EXPECT_EQ(site_of("foobar"), 0xbf9cf968u);
}

TEST(Philox, VectorCopiesDrawTheSameWords) {
  const RngKey key{.seed = 0x123456789abcdef0u, .site = 0xfeedbeefu, .step = 77};
  const auto lanes = TESSERA_COPIES(vec_lanes);
  const auto copies = TESSERA_COPIES(vec_random_words);
  for (std::size_t c = 0; c < copies.size(); ++c) {
    SCOPED_TRACE(isa_name(copies[c].isa));
    const auto n = static_cast<std::size_t>(lanes[c].function());
    // The second one carries into the upper half of the block number between its lanes.
    for (std::uint64_t first :
         {std::uint64_t{0}, std::uint64_t{0x7fffffffdu}, std::uint64_t{0xfffffffffffffffdu}}) {
      std::vector<std::uint32_t> words(4 * n);
      copies[c].function(key, first, words.data());
      for (std::size_t i = 0; i < words.size(); ++i) {
        ASSERT_EQ(words[i], random_block(key, first + i / 4).word[i % 4])
            << "word " << i << " from block " << first;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
