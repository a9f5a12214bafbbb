#pragma once
#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Elements [begin, end) of axpby and add. With alpha 0, axpby does not read x.
TESSERA_EACH_ISA(void axpby_range(const Axpby& params, std::int64_t begin, std::int64_t end);
                 void add_range(const Add& params, std::int64_t begin, std::int64_t end);)
