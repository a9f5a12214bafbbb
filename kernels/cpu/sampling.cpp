#include "kernels/api/sampling.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {

void append_to_cache(const AppendToCache& p, const Launch& launch) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const auto copy = [&](const void* x, void* kept, std::int64_t row, std::int64_t head) {
    const std::int64_t from = row * p.x_row + head * p.x_head;
    const std::int64_t to =
        row * p.kept_row + head * p.kept_head + (std::int64_t{p.length[row]} - 1) * p.kept_position;
    std::memcpy(static_cast<std::byte*>(kept) + to * size, static_cast<const std::byte*>(x) + from * size,
                static_cast<std::size_t>(p.head_dim * size));
  };
  parallel_for(launch.threads, p.rows, 8, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (p.begin != nullptr)
        p.begin[row] = static_cast<std::int32_t>(std::max<std::int64_t>(0, p.length[row] - p.window));
      for (std::int64_t head = 0; head < p.heads; ++head) {
        copy(p.key, p.kept_key, row, head);
        copy(p.value, p.kept_value, row, head);
      }
    }
  });
}

}  // namespace tessera::kernels::cpu
