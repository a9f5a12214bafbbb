#pragma once
#include "kernels/api/cross_entropy.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Rows [begin, end) of forward and backward.
TESSERA_EACH_ISA(void cross_entropy_forward_rows(const CrossEntropyForward& params, std::int64_t begin,
                                                 std::int64_t end);
                 void cross_entropy_backward_rows(const CrossEntropyBackward& params, std::int64_t begin,
                                                  std::int64_t end);)
