#pragma once
/// What kernels over the rows of matrices share: packs of columns that are whole or cut off by the row's end,
/// and dropout along a row.

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/philox.cuh"

namespace tessera::kernels::cuda {

/// Calls visit(A{}, B{}) with the types of two tensors of one computation. bfloat16 and float16 do not meet
/// in it: ops refuses that, and no code is generated for it.
template <typename Visit>
void visit_floats(DType a, DType b, const char* what, Visit visit) {
  visit_float(a, what, [&](auto x) {
    visit_float(b, what, [&](auto y) {
      using A = decltype(x);
      using B = decltype(y);
      if constexpr (std::is_same_v<A, B> || std::is_same_v<A, float> || std::is_same_v<B, float>) {
        visit(x, y);
      } else {
        TESSERA_CHECK(false, what, ": ", a, " and ", b, " in one call; make one of them float32");
      }
    });
  });
}

/// Columns a thread takes together from rows of types A and B: neither access is wider than 16 bytes, and
/// those of neighbouring threads touch.
template <typename A, typename B>
constexpr int kColumns = static_cast<int>(16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B)));

/// Whether rows of `cols` elements from `p` on can be accessed in packs of N; a null pointer can.
template <int N, typename T>
bool in_packs(const T* p, std::int64_t cols) {
  return cols % N == 0 && is_aligned(p, std::min<std::size_t>(16, N * sizeof(T)));
}

/// out = row[i, i + N), zeros from `cols` on (a row has 1 to 2^31 - 1). kWhole: in_packs, and i is a multiple
/// of N. Whole packs are read without a branch, so that many reads are in flight: threads beyond the row read
/// its first pack and drop it.
template <bool kWhole, typename T, int N>
__device__ __forceinline__ void read(const T* row, int i, int cols, float (&out)[N]) {
  if constexpr (kWhole) {
    load(row + (i < cols ? i : 0), out);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = i < cols ? out[j] : 0.0f;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = i + j < cols ? to_float(row[i + j]) : 0.0f;
  }
}

/// row[i, i + N) = in, as far as `cols`.
template <bool kWhole, typename T, int N>
__device__ __forceinline__ void write(T* row, int i, int cols, const float (&in)[N]) {
  if constexpr (kWhole) {
    if (i < cols) store(row + i, in);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (i + j < cols) row[i + j] = from_float<T>(in[j]);
    }
  }
}

/// Dropout along one row of a matrix, with the CPU's bits.
struct RowDropout {
  RngKey key;
  std::uint32_t threshold;
  float scale;
  std::uint64_t block;  // of feature 0

  __device__ RowDropout(const DropoutSpec& spec, std::int64_t row, std::int64_t features)
      : key(spec.key),
        threshold(spec.threshold()),
        scale(spec.scale()),
        block(spec.row(row) * static_cast<std::uint64_t>((features + 3) / 4)) {}

  /// x are the features f .. f + N - 1; f and N are multiples of 4.
  template <int N>
  __device__ __forceinline__ void apply(int f, float (&x)[N]) const {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const PhiloxBlock bits = random_words(key, block + static_cast<std::uint64_t>((f + j) / 4));
#pragma unroll
      for (int k = 0; k < 4; ++k) x[j + k] = bits.word[k] >= threshold ? x[j + k] * scale : 0.0f;
    }
  }
};

}  // namespace tessera::kernels::cuda
