#pragma once
#include "kernels/api/reduce.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// The sum of rows [row_begin, row_end) into out[cols]; columns [begin, end) of out = beta out + the sum of
/// `parts` rows of scratch; the sum, or sum of squares, of n floats.
TESSERA_EACH_ISA(void column_sum_rows(const ColumnSum& params, std::int64_t row_begin, std::int64_t row_end,
                                      float* out);
                 void column_sum_columns(const ColumnSum& params, std::int64_t parts, std::int64_t begin,
                                         std::int64_t end);
                 double sum_range(const float* x, std::int64_t n);
                 double sum_squares_range(const float* x, std::int64_t n);)
