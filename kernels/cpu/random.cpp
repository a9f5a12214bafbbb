/// Normal variates of kernels/api/normal.hpp, which must not be contracted.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#elif defined(__clang__)
#pragma clang fp contract(off)
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/api/elementwise.hpp"
#include "kernels/api/normal.hpp"
#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Elements [first, first + n) of the stream.
void fill_run(const FillNormal& p, std::uint64_t first, std::int64_t n, float* out) {
  const double mean = p.mean;
  const double std_dev = p.std;
  std::int64_t done = 0;
  while (done < n) {
    const std::uint64_t element = first + static_cast<std::uint64_t>(done);
    const PhiloxBlock words = random_block(p.key, element / 4);
    const NormalPair low = normals(words.word[0], words.word[1]);
    const NormalPair high = normals(words.word[2], words.word[3]);
    const double z[4] = {low.first.value, low.second.value, high.first.value, high.second.value};
    const auto lane = static_cast<std::int64_t>(element % 4);
    const std::int64_t count = std::min<std::int64_t>(4 - lane, n - done);
    for (std::int64_t i = 0; i < count; ++i) {
      out[done + i] = static_cast<float>(mean + std_dev * z[lane + i]);
    }
    done += count;
  }
}

}  // namespace

void fill_normal(const FillNormal& params, const Launch& launch) {
  parallel_for(launch.threads, params.rows * params.cols, 1024,
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t i = begin; i < end;) {
                   const std::int64_t row = i / params.cols;
                   const std::int64_t col = i % params.cols;
                   const std::int64_t n = std::min(params.cols - col, end - i);
                   const std::int64_t element = (params.row0 + row) * params.global_cols + params.col0 + col;
                   fill_run(params, static_cast<std::uint64_t>(element), n, params.out + i);
                   i += n;
                 }
               });
}

}  // namespace tessera::kernels::cpu
