#include <algorithm>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/norm.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Adds rows up in parts, each with add_part(part, parts), then the parts. How many depends on the number of
/// rows alone, so that the order of summation does not depend on threads.
template <typename AddPart>
void add_in_parts(const NormWeightGrad& params, const Launch& launch, AddPart add_part) {
  const int parts = static_cast<int>(std::min<std::int64_t>(kNormGradParts, params.rows));
  parallel_for(launch.threads, parts, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) add_part(static_cast<int>(part), parts);
  });
  auto* add_columns = TESSERA_PICK(norm_weight_grad_columns);
  parallel_for(launch.threads, params.cols, 512,
               [&](std::int64_t begin, std::int64_t end, int) { add_columns(params, parts, begin, end); });
}

}  // namespace

void add_norm_forward(const AddNormForward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(add_norm_forward_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void add_norm_backward(const AddNormBackward& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(add_norm_backward_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void norm_weight_grad(const NormWeightGrad& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(norm_weight_grad_part);
  add_in_parts(params, launch, [&](int part, int parts) { rows(params, part, parts); });
}

void add_norm_gradients(const AddNormGradients& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(add_norm_gradients_part);
  add_in_parts(params.weight, launch, [&](int part, int parts) { rows(params, part, parts); });
}

int norm_gradient_parts(std::int64_t, std::int64_t) { return kNormGradParts; }

}  // namespace tessera::kernels::cpu
