/// Which pages rows have, and that all of them come back.

#include "engine/generation/pages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace tessera::generation {
namespace {

using Row = std::vector<std::int32_t>;
Row row_of(const Pages& pages, std::int64_t row) { return {pages.of(row).begin(), pages.of(row).end()}; }

TEST(Pages, ARowHasAsManyAsItsPositionsNeed) {
  Pages pages(3);
  pages.own(1, 0, 1);
  EXPECT_EQ(row_of(pages, 1), (Row{0}));
  pages.own(1, 1, 64);
  EXPECT_EQ(pages.made(), 1);
  pages.own(1, 64, 130);
  pages.own(0, 0, 64);
  EXPECT_EQ(row_of(pages, 1), (Row{0, 1, 2}));
  EXPECT_EQ(row_of(pages, 0), (Row{3}));
  EXPECT_TRUE(row_of(pages, 2).empty());
  EXPECT_TRUE(pages.take_copies().empty());
  EXPECT_TRUE(pages.take_changed());
  EXPECT_FALSE(pages.take_changed());
  pages.own(1, 100, 130);
  EXPECT_FALSE(pages.take_changed()) << "it has them already";
}

TEST(Pages, SharedOnesAreCopiedBeforeTheyAreWritten) {
  Pages pages(3);
  pages.own(0, 0, 200);  // and room for more than it has
  pages.share(0, 1, 100);
  pages.share(0, 2, 100);
  EXPECT_EQ(row_of(pages, 0), (Row{0, 1, 2, 3}));
  EXPECT_EQ(row_of(pages, 1), (Row{0, 1}));
  EXPECT_EQ(row_of(pages, 2), (Row{0, 1}));
  EXPECT_EQ(pages.made(), 4);
  EXPECT_TRUE(pages.take_copies().empty()) << "who reads shares";
  pages.own(1, 100, 101);
  EXPECT_EQ(row_of(pages, 1), (Row{0, 4}));
  EXPECT_EQ(pages.take_copies(), (std::vector<Pages::Copy>{{1, 4}}));
  pages.own(0, 100, 140);
  EXPECT_EQ(row_of(pages, 0), (Row{0, 5, 2, 3}));
  EXPECT_EQ(pages.take_copies(), (std::vector<Pages::Copy>{{1, 5}}));
  pages.own(2, 100, 101);
  EXPECT_EQ(row_of(pages, 2), (Row{0, 1})) << "the last one writes where it is";
  EXPECT_TRUE(pages.take_copies().empty());
}

TEST(Pages, WhatIsSharedEndsAtAPage) {
  Pages pages(2);
  pages.own(0, 0, 128);
  pages.share(0, 1, 64);
  EXPECT_EQ(row_of(pages, 1), (Row{0}));
  pages.own(1, 64, 65);
  EXPECT_EQ(row_of(pages, 1), (Row{0, 2}));
  EXPECT_TRUE(pages.take_copies().empty()) << "nothing is written into the shared page";
}

TEST(Pages, ComeBackAndAreUsedAgain) {
  Pages pages(3);
  pages.own(0, 0, 128);
  pages.own(1, 0, 64);
  pages.share(0, 2, 128);
  pages.move(1, 0);  // row 0 leaves, row 1 takes its place
  EXPECT_EQ(row_of(pages, 0), (Row{2}));
  EXPECT_TRUE(row_of(pages, 1).empty());
  EXPECT_EQ(pages.free(), 0) << "row 2 still has them";
  pages.move(2, 2);
  EXPECT_EQ(pages.free(), 2);
  pages.own(1, 0, 192);
  EXPECT_EQ(pages.free(), 0);
  EXPECT_EQ(pages.made(), 4);
  for (const std::int64_t row : {0, 1, 2}) pages.move(row, row);
  EXPECT_EQ(pages.free(), pages.made());
}

/// Rows whose contents are followed by hand: whatever happens, each reads what was written for it.
TEST(Pages, NoRowReadsWhatAnotherWrote) {
  constexpr std::int64_t kRows = 6;
  Pages pages(kRows);
  std::vector<std::vector<int>> memory;           // by page, what its positions hold
  std::vector<std::vector<int>> expected(kRows);  // by row
  std::mt19937 random(4);
  int next = 0;
  const auto settle = [&] {
    memory.resize(static_cast<std::size_t>(pages.made()), std::vector<int>(kCachePage, -1));
    for (const Pages::Copy& each : pages.take_copies())
      memory[static_cast<std::size_t>(each.to)] = memory[static_cast<std::size_t>(each.from)];
  };
  for (int step = 0; step < 2000; ++step) {
    const auto row = static_cast<std::int64_t>(random() % kRows),
               other = static_cast<std::int64_t>(random() % kRows);
    std::vector<int>& text = expected[static_cast<std::size_t>(row)];
    const auto what = random() % 10;
    if (what < 6) {
      const auto begin = static_cast<std::int64_t>(text.size()),
                 end = begin + 1 + static_cast<std::int64_t>(random() % 50);
      pages.own(row, begin, end + 8);
      settle();
      for (std::int64_t p = begin; p < end; ++p) {
        const std::int32_t page = pages.of(row)[static_cast<std::size_t>(p / kCachePage)];
        memory[static_cast<std::size_t>(page)][static_cast<std::size_t>(p % kCachePage)] = next;
        text.push_back(next++);
      }
    } else if (what < 8 && row != other) {
      pages.share(other, row, static_cast<std::int64_t>(expected[static_cast<std::size_t>(other)].size()));
      text = expected[static_cast<std::size_t>(other)];
    } else {
      pages.move(other, row);
      text = row == other ? std::vector<int>() : std::exchange(expected[static_cast<std::size_t>(other)], {});
    }
    if (text.size() > 400) pages.move(row, row), text.clear();
    settle();
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::vector<int>& wanted = expected[static_cast<std::size_t>(r)];
      ASSERT_GE(pages.of(r).size() * kCachePage, wanted.size());
      for (std::size_t p = 0; p < wanted.size(); ++p) {
        const std::int32_t page = pages.of(r)[p / kCachePage];
        ASSERT_EQ(memory[static_cast<std::size_t>(page)][p % kCachePage], wanted[p])
            << "step " << step << ", row " << r;
      }
    }
  }
  for (std::int64_t row = 0; row < kRows; ++row) pages.move(row, row);
  EXPECT_EQ(pages.free(), pages.made());
}

}  // namespace
}  // namespace tessera::generation
