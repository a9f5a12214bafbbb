#include <algorithm>
#include <cstring>

#include "kernels/api/strided.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/elementwise.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread

/// dst[i, j] = src[i, j] over i < rows, j < cols in square tiles, so that a transposition uses whole cache
/// lines of both.
template <typename Word>
void copy_plane(const StridedDim& rows, const StridedDim& cols, const Word* src, Word* dst) {
  constexpr std::int64_t kTile = 32;
  for (std::int64_t i0 = 0; i0 < rows.size; i0 += kTile) {
    const std::int64_t i1 = std::min(rows.size, i0 + kTile);
    for (std::int64_t j0 = 0; j0 < cols.size; j0 += kTile) {
      const std::int64_t j1 = std::min(cols.size, j0 + kTile);
      for (std::int64_t i = i0; i < i1; ++i) {
        for (std::int64_t j = j0; j < j1; ++j)
          dst[i * rows.dst + j * cols.dst] = src[i * rows.src + j * cols.src];
      }
    }
  }
}

/// Copies a run of planes [begin, end), numbered over the two outer dimensions and slices of the third.
template <typename Word>
void copy_box(const CopyStrided& p, const Launch& launch) {
  const StridedBox box(p);
  if (box.elements() == 0) return;
  const auto& dims = box.dims;
  const Word* src = static_cast<const Word*>(p.src);
  Word* dst = static_cast<Word*>(p.dst);
  if (box.contiguous()) {
    parallel_for(launch.threads, dims[3].size, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin) * sizeof(Word));
    });
    return;
  }
  // Slices of 32 rows, the unit of work handed to a thread.
  const std::int64_t slices = (dims[2].size + 31) / 32;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrain / (std::min<std::int64_t>(32, dims[2].size) * dims[3].size));
  parallel_for(
      launch.threads, dims[0].size * dims[1].size * slices, grain,
      [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t unit = begin; unit < end; ++unit) {
          const std::int64_t first = unit % slices * 32, plane = unit / slices;
          const std::int64_t i0 = plane / dims[1].size, i1 = plane % dims[1].size;
          const Word* from = src + i0 * dims[0].src + i1 * dims[1].src + first * dims[2].src;
          Word* to = dst + i0 * dims[0].dst + i1 * dims[1].dst + first * dims[2].dst;
          const StridedDim rows{std::min<std::int64_t>(32, dims[2].size - first), dims[2].src, dims[2].dst};
          if (box.whole_rows()) {
            for (std::int64_t r = 0; r < rows.size; ++r) {
              std::memcpy(to + r * rows.dst, from + r * rows.src,
                          static_cast<std::size_t>(dims[3].size) * sizeof(Word));
            }
          } else {
            copy_plane(rows, dims[3], from, to);
          }
        }
      });
}

}  // namespace

void axpby(const Axpby& params, const Launch& launch) {
  auto* range = TESSERA_PICK(axpby_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void add(const Add& params, const Launch& launch) {
  auto* range = TESSERA_PICK(add_range);
  parallel_for(launch.threads, params.n, kGrain,
               [&](std::int64_t begin, std::int64_t end, int) { range(params, begin, end); });
}

void copy_strided(const CopyStrided& params, const Launch& launch) {
  visit_word(params.dtype, [&](auto word) { copy_box<decltype(word)>(params, launch); });
}

void fill_zero(const FillZero& params, const Launch& launch) {
  parallel_for(launch.threads, params.bytes, 4 * kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    std::memset(static_cast<char*>(params.x) + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

void fill_constant(const FillConstant& params, const Launch& launch) {
  parallel_for(launch.threads, params.n, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    std::fill(params.x + begin, params.x + end, params.value);
  });
}

void scale_by(const ScaleBy& params, const Launch& launch) {
  const float factor = *params.factor;
  parallel_for(launch.threads, params.n, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) params.x[i] *= factor;
  });
}

}  // namespace tessera::kernels::cpu
