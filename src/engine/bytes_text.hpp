#pragma once
#include <cstdint>
#include <cstdio>
#include <string>

namespace tessera {

namespace detail {

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, pattern, values...);
  return buffer;
}

}  // namespace detail

/// "12 B", "1.5 kB", "80.0 MB", "12.3 GB": decimal units.
inline std::string bytes_text(std::int64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes < 10'000) return detail::format("%lld B", static_cast<long long>(bytes));
  if (value < 1e7) return detail::format("%.1f kB", value / 1e3);
  return value < 1e10 ? detail::format("%.1f MB", value / 1e6) : detail::format("%.1f GB", value / 1e9);
}

}  // namespace tessera
