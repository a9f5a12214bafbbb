#include "tessera/comm/placement.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

namespace tessera {
namespace {

/// Flat index of `at` + `offset` in a tensor of that shape.
std::int64_t flat(const Shape& shape, const Shape& offset, const std::vector<std::int64_t>& at) {
  std::int64_t index = 0;
  for (int d = 0; d < shape.rank(); ++d) {
    index = index * shape[d] + offset[d] + at[static_cast<std::size_t>(d)];
  }
  return index;
}

/// Every local element that the boxes hold, with its global element, one by one. Fails on doubles and on
/// what lies outside.
std::map<std::int64_t, std::int64_t> elements(const Placement& placement, const std::vector<Placed>& boxes) {
  std::map<std::int64_t, std::int64_t> found;
  for (const Placed& box : boxes) {
    const int rank = box.shape.rank();
    for (int d = 0; d < rank; ++d) {
      EXPECT_GE(box.local[d], 0);
      EXPECT_LE(box.local[d] + box.shape[d], placement.local()[d]);
      EXPECT_LE(box.global[d] + box.shape[d], placement.global()[d]);
    }
    std::vector<std::int64_t> at(static_cast<std::size_t>(rank), 0);
    for (std::int64_t i = 0; i < box.shape.numel(); ++i) {
      std::int64_t rest = i;
      for (int d = rank - 1; d >= 0; --d) {
        at[static_cast<std::size_t>(d)] = rest % box.shape[d];
        rest /= box.shape[d];
      }
      const auto local = flat(placement.local(), box.local, at);
      EXPECT_TRUE(found.emplace(local, flat(placement.global(), box.global, at)).second) << local << " twice";
    }
  }
  return found;
}

/// The definition: the coordinate along the split dimension goes through the segments, the others stay.
std::int64_t global_of(const Placement& placement, std::int64_t local) {
  std::vector<std::int64_t> at(static_cast<std::size_t>(placement.local().rank()));
  for (int d = placement.local().rank() - 1; d >= 0; --d) {
    at[static_cast<std::size_t>(d)] = local % placement.local()[d];
    local /= placement.local()[d];
  }
  if (!placement.is_replicated()) {
    auto& row = at[static_cast<std::size_t>(placement.dim())];
    for (const Segment& s : placement.segments()) {
      if (row >= s.local && row < s.local + s.count) {
        row += s.global - s.local;
        break;
      }
    }
  }
  Shape zero = placement.global();
  for (int d = 0; d < zero.rank(); ++d) zero[d] = 0;
  return flat(placement.global(), zero, at);
}

/// Every flat range of the local elements is covered exactly, with the right global elements.
void check_all_ranges(const Placement& placement) {
  const std::int64_t n = placement.local().numel();
  for (std::int64_t begin = 0; begin <= n; ++begin) {
    for (std::int64_t end = begin; end <= n; ++end) {
      const auto found = elements(placement, placement.boxes(begin, end));
      ASSERT_EQ(static_cast<std::int64_t>(found.size()), end - begin) << "[" << begin << ", " << end << ")";
      for (const auto& [local, global] : found) {
        ASSERT_TRUE(local >= begin && local < end);
        ASSERT_EQ(global, global_of(placement, local)) << "local element " << local;
      }
    }
  }
}

TEST(PartOf, LongerPartsFirst) {
  const auto parts = [](std::int64_t n, int size) {
    std::vector<std::pair<std::int64_t, std::int64_t>> all;
    for (int r = 0; r < size; ++r) all.emplace_back(part_of(n, r, size).begin, part_of(n, r, size).count);
    return all;
  };
  using Parts = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(parts(10, 4), (Parts{{0, 3}, {3, 3}, {6, 2}, {8, 2}}));
  EXPECT_EQ(parts(2, 3), (Parts{{0, 1}, {1, 1}, {2, 0}}));
  EXPECT_EQ(parts(0, 2), (Parts{{0, 0}, {0, 0}}));
  EXPECT_EQ(parts(7, 1), (Parts{{0, 7}}));
  EXPECT_EQ(parts(std::int64_t{6'000'000'001}, 2),
            (Parts{{0, 3'000'000'001}, {3'000'000'001, 3'000'000'000}}));
  EXPECT_THROW(part_of(3, 3, 3), InvalidArgument);
  EXPECT_THROW(part_of(3, -1, 3), InvalidArgument);
  EXPECT_THROW(part_of(-1, 0, 3), InvalidArgument);
  EXPECT_THROW(part_of(1, 0, 0), InvalidArgument);
}

TEST(Placement, ReplicatedIsTheWholeTensor) {
  const Placement p = Placement::replicated({4, 3});
  EXPECT_TRUE(p.is_replicated());
  EXPECT_EQ(p.dim(), -1);
  EXPECT_EQ(p.local(), (Shape{4, 3}));
  ASSERT_EQ(p.boxes().size(), 1u);
  EXPECT_EQ(p.boxes()[0].shape, (Shape{4, 3}));
  check_all_ranges(p);
}

TEST(Placement, SplitIsAsEvenAsPossible) {
  const Placement p = Placement::split({7, 3}, 0, 1, 3);
  EXPECT_FALSE(p.is_replicated());
  EXPECT_EQ(p.local(), (Shape{2, 3}));
  EXPECT_EQ(p.global(), (Shape{7, 3}));
  EXPECT_EQ(p.segments(), (std::vector<Segment>{{.local = 0, .global = 3, .count = 2}}));
  ASSERT_EQ(p.boxes().size(), 1u);
  EXPECT_EQ(p.boxes()[0].global, (Shape{3, 0}));
  EXPECT_EQ(p.boxes()[0].local, (Shape{0, 0}));
  EXPECT_EQ(p.boxes()[0].shape, (Shape{2, 3}));
}

TEST(Placement, EveryRangeOfEverySplit) {
  for (const Shape& shape : {Shape{7}, Shape{5, 4}, Shape{3, 4, 2}, Shape{2, 2, 3, 2}, Shape{4, 1, 3}}) {
    for (int dim = 0; dim < shape.rank(); ++dim) {
      for (int size = 1; size <= 3; ++size) {
        for (int rank = 0; rank < size; ++rank) check_all_ranges(Placement::split(shape, dim, rank, size));
      }
    }
  }
}

/// All ranks together hold every element once.
TEST(Placement, SplitsCoverTheWhole) {
  for (int dim = 0; dim < 3; ++dim) {
    std::multiset<std::int64_t> held;
    for (int rank = 0; rank < 4; ++rank) {
      const Placement p = Placement::split({5, 6, 3}, dim, rank, 4);
      for (const auto& [local, global] : elements(p, p.boxes())) held.insert(global);
    }
    EXPECT_EQ(held.size(), 90u);
    EXPECT_EQ(std::set<std::int64_t>(held.begin(), held.end()).size(), 90u);
  }
}

/// Query, key and value rows of one rank, as a fused weight holds them.
TEST(Placement, SeveralSegments) {
  const std::vector<Segment> segments{{.local = 0, .global = 4, .count = 4},
                                      {.local = 4, .global = 9, .count = 1, .copies = 2, .copy = 1},
                                      {.local = 5, .global = 11, .count = 1, .copies = 2, .copy = 1}};
  const Placement rows = Placement::segmented({12, 3}, 0, segments);
  EXPECT_EQ(rows.local(), (Shape{6, 3}));
  EXPECT_EQ(rows.segments(), segments);
  EXPECT_EQ(rows.boxes().size(), 3u);
  check_all_ranges(rows);
  check_all_ranges(Placement::segmented({3, 12}, 1, segments));
  check_all_ranges(Placement::segmented({2, 12, 2}, 1, segments));
}

TEST(Placement, EmptyParts) {
  const Placement none = Placement::split({2, 3}, 0, 2, 3);
  EXPECT_EQ(none.local(), (Shape{0, 3}));
  EXPECT_TRUE(none.boxes().empty());
  const Placement no_columns = Placement::split({3, 2}, 1, 2, 3);
  EXPECT_EQ(no_columns.local(), (Shape{3, 0}));
  EXPECT_TRUE(no_columns.boxes().empty());
  EXPECT_TRUE(Placement::replicated({0, 4}).boxes().empty());
  EXPECT_TRUE(Placement::split({6, 2}, 0, 1, 3).boxes(2, 2).empty());
  EXPECT_TRUE(Placement::segmented({6, 2}, 0, {}).boxes().empty());
  check_all_ranges(Placement::segmented(
      {6, 2}, 0, {{.local = 0, .global = 1, .count = 0}, {.local = 0, .global = 3, .count = 2}}));
}

TEST(Placement, ScalarIsOneElement) {
  const Placement p = Placement::replicated({});
  ASSERT_EQ(p.boxes().size(), 1u);
  EXPECT_EQ(p.boxes()[0].shape, Shape{});
}

TEST(Placement, WhatDoesNotFitIsRefused) {
  const Shape shape{6, 2};
  EXPECT_THROW(Placement::split(shape, 2, 0, 2), InvalidArgument);
  EXPECT_THROW(Placement::split(shape, 0, 2, 2), InvalidArgument);
  EXPECT_THROW(Placement::segmented(shape, 0, {{.local = 0, .global = 5, .count = 2}}), InvalidArgument);
  EXPECT_THROW(Placement::segmented(shape, 0, {{.local = 1, .global = 0, .count = 2}}), InvalidArgument);
  EXPECT_THROW(Placement::segmented(shape, 0, {{.count = 2, .copies = 2, .copy = 2}}), InvalidArgument);
  EXPECT_THROW(Placement::segmented(shape, 0, {{.global = -1, .count = 2}}), InvalidArgument);
  EXPECT_THROW(Placement::segmented(shape, 0, {{.count = -1}}), InvalidArgument);
  const Placement p = Placement::replicated(shape);
  EXPECT_THROW(p.boxes(3, 2), InvalidArgument);
  EXPECT_THROW(p.boxes(-1, 2), InvalidArgument);
  EXPECT_THROW(p.boxes(0, 13), InvalidArgument);
}

}  // namespace
}  // namespace tessera
