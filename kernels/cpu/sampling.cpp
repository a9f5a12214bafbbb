#include "kernels/api/sampling.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {

void append_to_cache(const AppendToCache& p, const Launch& launch) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const auto copy = [&](const void* x, std::int64_t from, void* kept, std::int64_t to) {
    std::memcpy(static_cast<std::byte*>(kept) + to * size, static_cast<const std::byte*>(x) + from * size,
                static_cast<std::size_t>(p.head_dim * size));
  };
  parallel_for(launch.threads, p.positions * p.rows, 8, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t i = n / p.rows, row = n % p.rows, position = p.position_of(i, row);
      if (position < 0) continue;
      if (p.begin != nullptr)
        p.begin[row] = static_cast<std::int32_t>(std::max<std::int64_t>(0, position + 1 - p.window));
      for (std::int64_t head = 0; head < p.heads; ++head) {
        const std::int64_t from = i * p.x_position + row * p.x_row + head * p.x_head;
        const std::int64_t to = p.kept(row, position) + head * p.kept_head;
        copy(p.key, from, p.kept_key, to);
        copy(p.value, from, p.kept_value, to);
      }
    }
  });
}

}  // namespace tessera::kernels::cpu
