#include "engine/generation/pages.hpp"

#include <algorithm>

namespace tessera::generation {

std::int32_t Pages::take() {
  if (free_.empty()) {
    holders_.push_back(1);
    return static_cast<std::int32_t>(holders_.size()) - 1;
  }
  const std::int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void Pages::release(std::int32_t page) {
  if (--holders_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
}

void Pages::drop(std::int64_t row) {
  std::vector<std::int32_t>& pages = rows_[static_cast<std::size_t>(row)];
  changed_ = changed_ || !pages.empty();
  for (const std::int32_t page : pages) release(page);
  pages.clear();
}

void Pages::own(std::int64_t row, std::int64_t begin, std::int64_t end) {
  std::vector<std::int32_t>& pages = rows_[static_cast<std::size_t>(row)];
  const auto there = static_cast<std::int64_t>(pages.size());
  for (std::int64_t i = begin / kCachePage; i < std::min(there, cache_pages(end)); ++i) {
    std::int32_t& page = pages[static_cast<std::size_t>(i)];
    if (holders_[static_cast<std::size_t>(page)] == 1) continue;
    const std::int32_t own = take();
    copies_.push_back({page, own});
    release(page);
    page = own;
    changed_ = true;
  }
  for (std::int64_t i = there; i < cache_pages(end); ++i) {
    pages.push_back(take());
    changed_ = true;
  }
}

void Pages::share(std::int64_t from, std::int64_t to, std::int64_t positions) {
  const std::vector<std::int32_t>& theirs = rows_[static_cast<std::size_t>(from)];
  const auto count = std::min(theirs.size(), static_cast<std::size_t>(cache_pages(positions)));
  const std::vector<std::int32_t> common(theirs.begin(), theirs.begin() + static_cast<std::ptrdiff_t>(count));
  for (const std::int32_t page : common) ++holders_[static_cast<std::size_t>(page)];
  drop(to);
  rows_[static_cast<std::size_t>(to)] = common;
  changed_ = changed_ || !common.empty();
}

void Pages::move(std::int64_t from, std::int64_t to) {
  drop(to);
  if (from == to) return;
  rows_[static_cast<std::size_t>(to)] = std::exchange(rows_[static_cast<std::size_t>(from)], {});
  changed_ = changed_ || !rows_[static_cast<std::size_t>(to)].empty();
}

}  // namespace tessera::generation
