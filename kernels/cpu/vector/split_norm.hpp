#pragma once
#include "kernels/api/split_norm.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Rows [begin, end).
TESSERA_EACH_ISA(void row_products_rows(const RowProducts& params, std::int64_t begin, std::int64_t end);
                 void norm_projection_rows(const NormProjection& params, std::int64_t begin,
                                           std::int64_t end);)
