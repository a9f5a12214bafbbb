#pragma once
/// Matrix products of a warp by tensor cores (mma.sync m16n8k16 of 16-bit elements with sums in fp32; compute
/// capability 8.0 on), and how their operands come from shared memory into registers. The 32 lanes of a warp
/// call these together.

#include "kernels/cuda/common.cuh"

/// Machine code for GPUs before 8.0 has these kernels too, but nobody launches them there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define TESSERA_PTX(...) __trap()
#else
#define TESSERA_PTX(...) asm volatile(__VA_ARGS__)
#endif

namespace tessera::kernels::cuda::mma {

/// 16 x 16 of a left operand, two elements a word. Lane l has rows l / 4 (words 0 and 2) and 8 + l / 4 (1 and
/// 3), of columns 2 (l % 4) and the next (words 0 and 1) and these + 8 (2 and 3).
struct Left {
  unsigned word[4];
};
/// 16 x 8 of a right operand: lane l has column l / 4, of rows 2 (l % 4) and the next, and these + 8.
struct Right {
  unsigned word[2];
};
/// 16 x 8 of sums: lane l has row l / 4, columns 2 (l % 4) and the next; then row 8 + l / 4.
using Sums = float[4];

template <typename T>
__device__ __forceinline__ unsigned pair_of(float first, float second) {
  T items[2];
  const float values[2] = {first, second};
  cuda::detail::from_floats(items, values, 2);
  return static_cast<unsigned>(items[0].bits) | static_cast<unsigned>(items[1].bits) << 16;
}

/// The left operand that sums of 8 columns and of the next 8 are, rounded.
template <typename T>
__device__ __forceinline__ Left left_of(const Sums& columns, const Sums& next) {
  return {{pair_of<T>(columns[0], columns[1]), pair_of<T>(columns[2], columns[3]),
           pair_of<T>(next[0], next[1]), pair_of<T>(next[2], next[3])}};
}

/// Four matrices of 8 x 8 from shared memory: lane l names row l % 8 of matrix l / 8, and gets of each row
/// l / 4, columns 2 (l % 4) and the next; transposed, rows 2 (l % 4) and the next of column l / 4.
template <bool Transposed>
__device__ __forceinline__ void load_matrices(const void* row, unsigned (&words)[4]) {
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::load_matrices(row, Transposed, words);
#else
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Transposed) {
    TESSERA_PTX("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                : "r"(from)
                : "memory");
  } else {
    TESSERA_PTX("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                : "r"(from)
                : "memory");
  }
#endif
}

/// x: [16, 16] with rows `stride` elements apart, each 16-byte aligned.
template <typename T>
__device__ __forceinline__ Left load_left(const T* x, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Left result;
  load_matrices<false>(x + lane % 16 * stride + lane / 16 * 8, result.word);
  return result;
}

/// Two neighbouring operands of a matrix [16, 16] whose columns lie `stride` elements apart.
template <typename T>
__device__ __forceinline__ void load_rights(const T* x, int stride, Right (&result)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned words[4];
  load_matrices<false>(x + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8, words);
  result[0] = {{words[0], words[1]}};
  result[1] = {{words[2], words[3]}};
}

/// The same of one whose rows lie `stride` elements apart.
template <typename T>
__device__ __forceinline__ void load_rights_by_rows(const T* x, int stride, Right (&result)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned words[4];
  load_matrices<true>(x + lane % 16 * stride + lane / 16 * 8, words);
  result[0] = {{words[0], words[1]}};
  result[1] = {{words[2], words[3]}};
}

/// sums += a b
template <typename T>
__device__ __forceinline__ void multiply_add(Sums& sums, const Left& a, const Right& b) {
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::multiply_add(sums, a.word, b.word, [](std::uint16_t bits) {
    T x;
    x.bits = bits;
    return to_float(x);
  });
#else
  if constexpr (dtype_of<T>::value == DType::bf16) {
    TESSERA_PTX(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
  } else {
    TESSERA_PTX(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
  }
#endif
}

}  // namespace tessera::kernels::cuda::mma

#undef TESSERA_PTX
