#pragma once
#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Rows [begin, end) of a dropout.
TESSERA_EACH_ISA(void dropout_rows(const Dropout& params, std::int64_t begin, std::int64_t end);)
