#pragma once
#include "kernels/api/rope.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Rotates rows [begin, end).
TESSERA_EACH_ISA(void rope_rows(const Rope& params, std::int64_t begin, std::int64_t end);)
