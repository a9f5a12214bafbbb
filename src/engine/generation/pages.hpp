#pragma once
/// Which pages of the cache each row has.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/cache_page.hpp"

namespace tessera::generation {

/// Pages are numbered from 0 on as they are needed, and used again once no row has them. Rows share the pages
/// of what their texts have in common; a row that is to write into a shared one gets a copy first. All of it
/// follows from the calls alone, so ranks that make the same ones have the same pages.
class Pages {
 public:
  struct Copy {
    std::int32_t from, to;
    bool operator==(const Copy&) const = default;
  };

  explicit Pages(std::int64_t rows) : rows_(static_cast<std::size_t>(rows)) {}

  /// Pages that there have ever been, and those of them that no row has.
  std::int64_t made() const { return static_cast<std::int64_t>(holders_.size()); }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }
  std::span<const std::int32_t> of(std::int64_t row) const { return rows_[static_cast<std::size_t>(row)]; }

  /// Sees to pages that the row alone has for the positions [begin, end); before them it has some.
  void own(std::int64_t row, std::int64_t begin, std::int64_t end);
  /// Row `to` has what `from` has of its first `positions`, and nothing else.
  void share(std::int64_t from, std::int64_t to, std::int64_t positions);
  /// Row `to` has what `from` had, which then has nothing. From a row to itself: it has nothing.
  void move(std::int64_t from, std::int64_t to);

  /// What is to be copied from page to page, in this order, before anybody reads or writes; asked once.
  std::vector<Copy> take_copies() { return std::exchange(copies_, {}); }
  /// Whether some row's pages are other ones than when this was last asked.
  bool take_changed() { return std::exchange(changed_, false); }

 private:
  std::int32_t take();
  void release(std::int32_t page);
  void drop(std::int64_t row);

  std::vector<std::vector<std::int32_t>> rows_;
  std::vector<std::int32_t> holders_;  ///< rows that have it, by page
  std::vector<std::int32_t> free_;
  std::vector<Copy> copies_;
  bool changed_ = false;
};

}  // namespace tessera::generation
