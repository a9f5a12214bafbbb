#pragma once
#include "kernels/api/norm.hpp"
#include "kernels/cpu/vector/isa.hpp"

/// Rows [begin, end) of forward and backward; one part of the weight gradient's rows, added up into its
/// scratch, alone or with the input gradient of these rows; columns [begin, end) of the sum over parts.
TESSERA_EACH_ISA(void add_norm_forward_rows(const AddNormForward& params, std::int64_t begin,
                                            std::int64_t end);
                 void add_norm_backward_rows(const AddNormBackward& params, std::int64_t begin,
                                             std::int64_t end);
                 void norm_weight_grad_part(const NormWeightGrad& params, int part, int parts);
                 void add_norm_gradients_part(const AddNormGradients& params, int part, int parts);
                 void norm_weight_grad_columns(const NormWeightGrad& params, int parts, std::int64_t begin,
                                               std::int64_t end);)
