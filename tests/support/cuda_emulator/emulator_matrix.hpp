#pragma once
/// What a warp does with small matrices: ldmatrix and mma.sync.m16n8k16 on 16-bit elements, and cp.async,
/// which brings them.

#include <cstddef>
#include <cstdint>

#include "emulator_device.hpp"

namespace tessera_emulator {

constexpr unsigned kWholeWarp = 0xffffffffu;

/// Four matrices of 8 x 8 elements: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes on a
/// boundary of 16. It gets of each one row l / 4, columns 2 (l % 4) and the next; transposed, rows 2 (l % 4)
/// and the next of column l / 4.
inline void load_matrices(const void* row, bool transposed, unsigned (&words)[4]) {
  check_access(row, 16);
  const std::uint64_t* const rows = warp_gather(kWholeWarp, reinterpret_cast<std::uintptr_t>(row));
  const int at = lane(), outer = at / 4, inner = at % 4 * 2;
  for (int m = 0; m < 4; ++m) {
    const auto element = [&](int r, int c) -> unsigned {
      return reinterpret_cast<const std::uint16_t*>(rows[m * 8 + r])[c];
    };
    words[m] = transposed ? element(inner, outer) | element(inner + 1, outer) << 16
                          : element(outer, inner) | element(outer, inner + 1) << 16;
  }
  warp_barrier(kWholeWarp);  // nobody writes there before all have read
}

/// sums += a b, of fragments as PTX lays them out. `value`: the number that 16 bits are.
template <typename Value>
void multiply_add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], Value value) {
  struct Given {
    const unsigned *a, *b;
  } const own{a, b};
  const std::uint64_t* const given = warp_gather(kWholeWarp, reinterpret_cast<std::uintptr_t>(&own));
  const auto half = [&](unsigned word, int which) {
    return value(static_cast<std::uint16_t>(word >> (16 * which)));
  };
  const int at = lane(), row = at / 4, column = at % 4 * 2;
  float result[4] = {sums[0], sums[1], sums[2], sums[3]};
  for (int k = 0; k < 16; ++k) {
    // Lane of a row or column, pair of it, and which of the pair.
    const int quarter = k % 8 / 2, upper = k / 8, which = k % 2;
    const auto& left = *reinterpret_cast<const Given*>(given[row * 4 + quarter]);
    for (int i = 0; i < 4; ++i) {
      const auto& right = *reinterpret_cast<const Given*>(given[(column + i % 2) * 4 + quarter]);
      result[i] += half(left.a[upper * 2 + i / 2], which) * half(right.b[upper], which);
    }
  }
  warp_barrier(kWholeWarp);  // what was given stays until all have read
  for (int i = 0; i < 4; ++i) sums[i] = result[i];
}

/// cp.async of `bytes`, or of zeros, to shared memory, which holds NaNs until the copy was awaited.
void copy_async(void* to, const void* from, std::size_t bytes, bool zeros);
void commit_copies();
/// Of this thread, all but the groups committed last.
void await_copies(std::size_t open_groups);

}  // namespace tessera_emulator
