#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/labels.hpp"

namespace tessera::kernels {

/// loss[r] = lse[r] - logits[r, labels[r]], lse = log sum exp over cols. A label of -100 gives loss 0. The
/// columns may be a part of the vocabulary: a label in another part gives an infinite loss.
struct CrossEntropyForward {
  std::int64_t rows = 0, cols = 0, ld = 0;  ///< ld: elements between rows of logits
  DType dtype = DType::f32;
  const void* logits = nullptr;          ///< [rows, ld], the first cols of each row count
  const std::int32_t* labels = nullptr;  ///< [rows], -100 or a token
  float* loss = nullptr;                 ///< [rows]
  float* lse = nullptr;                  ///< [rows]
  std::int64_t vocab_begin = 0;          ///< column j is token vocab_begin + j
};

/// From the forward results of all parts of a vocabulary to those of the whole: lse = log sum exp of the
/// parts' lse, loss = the loss of the part that has the label + lse - that part's lse.
struct CrossEntropyCombine {
  std::int64_t rows = 0, parts = 0;
  const float* partial = nullptr;  ///< [parts, 2, rows]: loss, then lse
  const std::int32_t* labels = nullptr;
  float* loss = nullptr;  ///< [rows]
  float* lse = nullptr;   ///< [rows]
};

/// logits[r, j] <- upstream[r] * (exp(logits[r, j] - lse[r]) - [j == labels[r]]), zeros where the label is
/// -100. A label in another part of the vocabulary leaves the first term.
struct CrossEntropyBackward {
  std::int64_t rows = 0, cols = 0, ld = 0;
  DType dtype = DType::f32;
  void* logits = nullptr;
  const std::int32_t* labels = nullptr;
  const float* lse = nullptr;
  const float* upstream = nullptr;  ///< [rows]
  std::int64_t vocab_begin = 0;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(cross_entropy_forward, CrossEntropyForward)
TESSERA_DECLARE_KERNEL(cross_entropy_combine, CrossEntropyCombine)
TESSERA_DECLARE_KERNEL(cross_entropy_backward, CrossEntropyBackward)
