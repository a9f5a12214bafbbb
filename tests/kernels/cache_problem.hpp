#pragma once
/// Keys and values for the pages of a cache, for the tests of every backend, and where each must be found.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/api/sampling.hpp"

namespace tessera::kernels::cache_test {

struct Case {
  std::string name;
  std::int64_t positions = 1, rows = 1, heads = 1, head_dim = 8;
  std::int64_t first = -1;
  std::vector<std::int32_t> length = {};
  std::int64_t window = 0;
};

inline std::vector<Case> cases() {
  return {{.name = "first", .positions = 70, .rows = 3, .heads = 2, .head_dim = 12, .first = 0},
          {.name = "odd", .positions = 5, .rows = 2, .heads = 3, .head_dim = 7, .first = 62},
          {.name = "unequal", .positions = 90, .rows = 3, .heads = 2, .first = 60, .length = {150, 60, 77}},
          {.name = "last", .rows = 4, .heads = 5, .head_dim = 64, .length = {1, 64, 65, 192}},
          {.name = "window", .rows = 4, .heads = 1, .head_dim = 5, .length = {3, 64, 9, 130}, .window = 9}};
}

/// Elements are numbers of 32 bits, each another one.
struct Problem {
  static constexpr std::int64_t kEntries = 3, kPool = 20;
  static constexpr std::uint32_t kNothing = 0xffffffffu;

  Case config;
  std::vector<std::uint32_t> key, value, kept_key, kept_value;
  std::vector<std::int32_t> pages, begin;

  explicit Problem(const Case& c) : config(c) {
    for (std::int64_t i = 0; i < c.positions * c.rows * row(); ++i) {
      key.push_back(static_cast<std::uint32_t>(i));
      value.push_back(static_cast<std::uint32_t>(i) + 1000000u);
    }
    kept_key.assign(static_cast<std::size_t>(kPool * page()), kNothing);
    kept_value = kept_key;
    for (std::int64_t i = 0; i < c.rows * kEntries; ++i)
      pages.push_back(static_cast<std::int32_t>((i * 7 + 3) % kPool));
    begin.assign(static_cast<std::size_t>(c.rows), -1);
  }
  Problem(const Problem&) = delete;

  /// Elements of a text's position: as wide as its queries besides.
  std::int64_t row() const { return (config.heads + 4) * config.head_dim; }
  std::int64_t page() const { return config.heads * kCachePage * config.head_dim; }

  AppendToCache params() {
    return {.positions = config.positions,
            .rows = config.rows,
            .heads = config.heads,
            .head_dim = config.head_dim,
            .dtype = DType::f32,
            .key = key.data(),
            .value = value.data(),
            .x_position = config.rows * row(),
            .x_row = row(),
            .x_head = config.head_dim,
            .kept_key = kept_key.data(),
            .kept_value = kept_value.data(),
            .kept_page = page(),
            .kept_head = kCachePage * config.head_dim,
            .kept_position = config.head_dim,
            .pages = pages.data(),
            .page_entries = kEntries,
            .first = config.first,
            .length = config.length.empty() ? nullptr : config.length.data(),
            .begin = config.window > 0 ? begin.data() : nullptr,
            .window = config.window};
  }

  void expect_kept(const std::vector<std::uint32_t>& keys, const std::vector<std::uint32_t>& values,
                   const std::vector<std::int32_t>& begins) const {
    std::vector<std::uint32_t> expected_keys(keys.size(), kNothing), expected_values = expected_keys;
    for (std::int64_t r = 0; r < config.rows; ++r) {
      const std::int64_t length = config.length.empty() ? 1000 : config.length[static_cast<std::size_t>(r)];
      for (std::int64_t i = 0; i < config.positions; ++i) {
        const std::int64_t position = config.first < 0 ? length - 1 : config.first + i;
        if (position >= length) continue;
        const std::int64_t at = pages[static_cast<std::size_t>(r * kEntries + position / 64)];
        for (std::int64_t h = 0; h < config.heads; ++h) {
          for (std::int64_t c = 0; c < config.head_dim; ++c) {
            const auto from =
                static_cast<std::size_t>((i * config.rows + r) * row() + h * config.head_dim + c);
            const auto to = static_cast<std::size_t>(
                ((at * config.heads + h) * 64 + position % 64) * config.head_dim + c);
            expected_keys[to] = key[from];
            expected_values[to] = value[from];
          }
        }
      }
      if (config.window > 0) {
        EXPECT_EQ(begins[static_cast<std::size_t>(r)], std::max<std::int64_t>(0, length - config.window))
            << config.name;
      }
    }
    EXPECT_EQ(keys, expected_keys) << config.name;
    EXPECT_EQ(values, expected_values) << config.name;
  }
};

}  // namespace tessera::kernels::cache_test
