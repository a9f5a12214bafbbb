#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/elementwise.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements: less than this is not worth a thread

struct Dim {
  std::int64_t size, src, dst;
};

/// The box with its dimensions in order of falling dst stride, those of size 1 dropped and neighbours that
/// are contiguous in both buffers merged; padded in front with size 1.
std::array<Dim, 4> simplify(const CopyStrided& p) {
  std::array<Dim, 4> dims{};
  int count = 0;
  for (int i = 0; i < 4; ++i) {
    if (p.size[i] != 1)
      dims[static_cast<std::size_t>(count++)] = {p.size[i], p.src_stride[i], p.dst_stride[i]};
  }
  std::stable_sort(dims.begin(), dims.begin() + count,
                   [](const Dim& a, const Dim& b) { return a.dst > b.dst; });
  std::array<Dim, 4> merged;
  merged.fill({1, 0, 0});
  int last = 3;
  for (int i = count - 1; i >= 0; --i) {
    const Dim& dim = dims[static_cast<std::size_t>(i)];
    Dim& inner = merged[static_cast<std::size_t>(last)];
    if (i == count - 1) {
      inner = dim;
    } else if (dim.src == inner.src * inner.size && dim.dst == inner.dst * inner.size) {
      inner.size *= dim.size;
    } else {
      merged[static_cast<std::size_t>(--last)] = dim;
    }
  }
  return merged;
}

/// dst[i, j] = src[i, j] over i < rows, j < cols in square tiles, so that a transposition uses whole cache
/// lines of both.
template <typename Word>
void copy_plane(const Dim& rows, const Dim& cols, const Word* src, Word* dst) {
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
  std::array<Dim, 4> dims = simplify(p);
  const Word* src = static_cast<const Word*>(p.src);
  Word* dst = static_cast<Word*>(p.dst);
  if (dims[2].size == 1 && dims[3].src == 1 && dims[3].dst == 1) {
    parallel_for(launch.threads, dims[3].size, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin) * sizeof(Word));
    });
    return;
  }
  // Slices of 32 rows, the unit of work handed to a thread.
  const std::int64_t slices = (dims[2].size + 31) / 32;
  const bool whole_rows = dims[3].src == 1 && dims[3].dst == 1;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrain / (std::min<std::int64_t>(32, dims[2].size) * dims[3].size));
  parallel_for(launch.threads, dims[0].size * dims[1].size * slices, grain,
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t unit = begin; unit < end; ++unit) {
                   const std::int64_t first = unit % slices * 32, plane = unit / slices;
                   const std::int64_t i0 = plane / dims[1].size, i1 = plane % dims[1].size;
                   const Word* from = src + i0 * dims[0].src + i1 * dims[1].src + first * dims[2].src;
                   Word* to = dst + i0 * dims[0].dst + i1 * dims[1].dst + first * dims[2].dst;
                   const Dim rows{std::min<std::int64_t>(32, dims[2].size - first), dims[2].src, dims[2].dst};
                   if (whole_rows) {
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
  for (const std::int64_t size : params.size) {
    if (size == 0) return;
  }
  switch (size_of(params.dtype)) {
    case 8:
      return copy_box<std::uint64_t>(params, launch);
    case 4:
      return copy_box<std::uint32_t>(params, launch);
    case 2:
      return copy_box<std::uint16_t>(params, launch);
    default:
      return copy_box<std::uint8_t>(params, launch);
  }
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
