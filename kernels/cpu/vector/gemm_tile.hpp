#pragma once
#include <cstdint>

#include "kernels/cpu/vector/isa.hpp"

namespace tessera::kernels::cpu {

/// A product of two blocks in cache: c = beta c + a b, row-major, fp32. a and b as laid out by gemm_pack_*.
struct GemmTile {
  std::int64_t rows = 0, cols = 0, depth = 0;
  const float* a = nullptr;  ///< panels of kGemmRows rows: [panel][depth][kGemmRows], zero-padded
  const float* b = nullptr;  ///< panels of kGemmCols columns: [panel][depth][kGemmCols], zero-padded
  float* c = nullptr;
  std::int64_t ldc = 0;
  bool accumulate = false;
};

inline constexpr std::int64_t kGemmRows = 6;
inline constexpr std::int64_t kGemmCols = 32;  ///< a multiple of two registers of every instruction set

}  // namespace tessera::kernels::cpu

TESSERA_EACH_ISA(void gemm_tile(const GemmTile& tile);)
