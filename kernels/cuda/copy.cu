/// Copies between strided buffers.

#include <algorithm>

#include "kernels/api/strided.hpp"
#include "kernels/cuda/elementwise.cuh"

namespace tessera::kernels::cuda {
namespace {

/// The box as words of several elements.
struct Box : StridedBox {
  using StridedBox::StridedBox;

  /// Whether rows can be moved `factor` elements at a time.
  bool divides(int factor) const {
    bool fits = dims[3].size % factor == 0;
    for (int i = 0; i < 3; ++i)
      fits = fits && (dims[i].size == 1 || (dims[i].src % factor == 0 && dims[i].dst % factor == 0));
    return fits;
  }
  void divide(int factor) {
    dims[3].size /= factor;
    for (int i = 0; i < 3; ++i) {
      dims[i].src /= factor;
      dims[i].dst /= factor;
    }
  }
};

/// One word of the box, wherever it lies. (Packs are of one word: it may be 16 bytes.)
template <typename Word>
struct CopyOp {
  static constexpr int kUnroll = 4;
  template <int N>
  struct Values {
    Word word;
    std::int64_t to;
  };
  Box box;
  const Word* src;
  Word* dst;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    std::int64_t from = 0;
    v.to = 0;
#pragma unroll
    for (int k = 3; k >= 0; --k) {
      const StridedDim& dim = box.dims[k];
      if (dim.size == 1) continue;
      const RowCol at = k == 0 ? RowCol{0, i} : row_col(i, dim.size);
      from += at.col * dim.src;
      v.to += at.col * dim.dst;
      i = at.row;
    }
    detail::check_access(src + from);
    v.word = src[from];
  }
  template <int N>
  __device__ void store(std::int64_t, Values<N>& v) const {
    detail::check_access(dst + v.to);
    dst[v.to] = v.word;
  }
};

constexpr int kTile = 32, kTileLines = 8;

/// A transposition: `in` is the dimension along which src is contiguous, `out` that of dst, `batch` the two
/// others. A block moves a square tile by way of shared memory, so that both sides are accessed along lines.
struct Transposition {
  StridedDim in, out, batch[2];
  std::int64_t in_tiles, out_tiles;
};

template <typename Word>
__global__ void __launch_bounds__(kTile* kTileLines)
    transpose_kernel(Transposition t, const Word* src, Word* dst) {
  __shared__ Word tile[kTile][kTile + 1];  // one more, so that a column lies in different banks
  const RowCol in_tile = row_col(blockIdx.x, t.in_tiles);
  const RowCol out_tile = row_col(in_tile.row, t.out_tiles);
  const RowCol batch = row_col(out_tile.row, t.batch[1].size);
  src += batch.row * t.batch[0].src + batch.col * t.batch[1].src;
  dst += batch.row * t.batch[0].dst + batch.col * t.batch[1].dst;
  const std::int64_t in0 = in_tile.col * kTile, out0 = out_tile.col * kTile;
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
#pragma unroll
  for (int line = 0; line < kTile; line += kTileLines) {
    const std::int64_t i = in0 + x, o = out0 + line + y;
    if (i < t.in.size && o < t.out.size) tile[line + y][x] = src[i + o * t.out.src];
  }
  __syncthreads();
#pragma unroll
  for (int line = 0; line < kTile; line += kTileLines) {
    const std::int64_t i = in0 + line + y, o = out0 + x;
    if (i < t.in.size && o < t.out.size) dst[o + i * t.in.dst] = tile[x][line + y];
  }
}

template <typename Word>
void copy_words(const Box& box, const CopyStrided& p, const Launch& where) {
  each_pack<1>(CopyOp<Word>{box, static_cast<const Word*>(p.src), static_cast<Word*>(p.dst)}, box.elements(),
               where);
}

/// Whole rows, in the widest words that fit.
template <typename Word>
void copy_rows(Box box, const CopyStrided& p, const Launch& where) {
  constexpr int kSize = static_cast<int>(sizeof(Word));
  const auto fits = [&](int bytes) {
    return bytes > kSize && box.divides(bytes / kSize) &&
           is_aligned(p.src, static_cast<std::size_t>(bytes)) &&
           is_aligned(p.dst, static_cast<std::size_t>(bytes));
  };
  const int bytes = fits(16) ? 16 : fits(8) ? 8 : fits(4) ? 4 : kSize;
  box.divide(bytes / kSize);
  switch (bytes) {
    case 16:
      return copy_words<uint4>(box, p, where);
    case 8:
      return copy_words<std::uint64_t>(box, p, where);
    case 4:
      return copy_words<std::uint32_t>(box, p, where);
    default:
      return copy_words<Word>(box, p, where);
  }
}

template <typename Word>
void transpose(const Box& box, int in, const CopyStrided& p, const Launch& where) {
  Transposition t{box.dims[in], box.dims[3], {}, 0, 0};
  int others = 0;
  for (int k = 0; k < 3; ++k) {
    if (k != in) t.batch[others++] = box.dims[k];
  }
  t.in_tiles = ceil_div(t.in.size, std::int64_t{kTile});
  t.out_tiles = ceil_div(t.out.size, std::int64_t{kTile});
  const std::int64_t blocks = t.in_tiles * t.out_tiles * t.batch[0].size * t.batch[1].size;
  launch(transpose_kernel<Word>, dim3(static_cast<unsigned>(blocks)), dim3(kTile, kTileLines), 0, where, t,
         static_cast<const Word*>(p.src), static_cast<Word*>(p.dst));
}

template <typename Word>
void copy_box(const CopyStrided& p, const Launch& where) {
  const Box box(p);
  if (box.elements() == 0) return;
  if (box.contiguous()) {
    const std::size_t bytes = static_cast<std::size_t>(box.elements()) * sizeof(Word);
    return check(cudaMemcpyAsync(p.dst, p.src, bytes, cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(where.stream)),
                 "cudaMemcpyAsync");
  }
  if (box.whole_rows()) return copy_rows<Word>(box, p, where);
  if (box.dims[3].dst == 1) {
    for (int k = 0; k < 3; ++k) {
      if (box.dims[k].size != 1 && box.dims[k].src == 1) return transpose<Word>(box, k, p, where);
    }
  }
  copy_words<Word>(box, p, where);
}

}  // namespace

void copy_strided(const CopyStrided& params, const Launch& launch) {
  visit_word(params.dtype, [&](auto word) { copy_box<decltype(word)>(params, launch); });
}

TESSERA_KERNEL_FILE(transpose_kernel<std::uint32_t>);

}  // namespace tessera::kernels::cuda
