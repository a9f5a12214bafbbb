#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// loss[r] = lse[r] - logits[r, labels[r]], lse = log sum exp over cols. A label of -100 gives loss 0.
struct CrossEntropyForward {
  std::int64_t rows = 0, cols = 0, ld = 0;  ///< ld: elements between rows of logits
  DType dtype = DType::f32;
  const void* logits = nullptr;          ///< [rows, ld], the first cols of each row count
  const std::int32_t* labels = nullptr;  ///< [rows], -100 or 0 <= label < cols
  float* loss = nullptr;                 ///< [rows]
  float* lse = nullptr;                  ///< [rows]
};

/// logits[r, j] <- upstream[r] * (exp(logits[r, j] - lse[r]) - [j == labels[r]]), zeros where the label is
/// -100.
struct CrossEntropyBackward {
  std::int64_t rows = 0, cols = 0, ld = 0;
  DType dtype = DType::f32;
  void* logits = nullptr;
  const std::int32_t* labels = nullptr;
  const float* lse = nullptr;
  const float* upstream = nullptr;  ///< [rows]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(cross_entropy_forward, CrossEntropyForward)
TESSERA_DECLARE_KERNEL(cross_entropy_backward, CrossEntropyBackward)
