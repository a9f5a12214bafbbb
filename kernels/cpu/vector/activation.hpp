#pragma once
#include "kernels/api/activation.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Elements [begin, end) of an activation, rows [begin, end) of SwiGLU.
TESSERA_EACH_ISA(
    void activation_forward_range(const ActivationForward& params, std::int64_t begin, std::int64_t end);
    void activation_backward_range(const ActivationBackward& params, std::int64_t begin, std::int64_t end);
    void swiglu_forward_rows(const SwigluForward& params, std::int64_t begin, std::int64_t end);
    void swiglu_backward_rows(const SwigluBackward& params, std::int64_t begin, std::int64_t end);)
