#pragma once
/// Mixtures of experts: which experts a token goes to, and its way there and back. A slot is one of a token's
/// `topk` choices, number token * topk + choice. Rows of tokens are [seq, batch], position-major.

#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// The router's choice: the `topk` greatest logits of each token, the greatest first, the lower number first
/// among equals. A choice weighs its softmax probability over all experts, or (`normalized`) over those
/// chosen.
struct RouteForward {
  std::int64_t tokens = 0, experts = 0, topk = 0;
  DType dtype = DType::f32;
  const void* logits = nullptr;  ///< [tokens, experts] contiguous
  bool normalized = true;
  float* weight = nullptr;         ///< [tokens, topk]
  std::int32_t* expert = nullptr;  ///< [tokens, topk]
  float* lse = nullptr;            ///< [tokens]: log-sum-exp of all logits
  /// [tokens]: lse^2 of counted tokens, 0 of others; null = not wanted.
  float* z = nullptr;
  const std::int32_t* counted = nullptr;  ///< [tokens]: 0 = the token is padding; null: none is
};

/// Gradient of the logits p' (softmax probabilities p) of what a router gives:
/// - of the weights, `weight_grad`;
/// - of a sum of factor[sample, e] * p[token, e] over the sample's counted tokens, times
/// balance_grad[sample];
/// - of lse^2 of counted tokens, `z_grad`.
struct RouteBackward {
  std::int64_t tokens = 0, experts = 0, topk = 0, batch = 1;
  DType dtype = DType::f32;      ///< of logits and logits_grad
  const void* logits = nullptr;  ///< as in forward, like the next four
  bool normalized = true;
  const float* weight = nullptr;
  const std::int32_t* expert = nullptr;
  const float* lse = nullptr;
  const float* weight_grad = nullptr;     ///< [tokens, topk]; null = zero
  const float* factor = nullptr;          ///< [batch, experts]; null = no balance
  const float* balance_grad = nullptr;    ///< [batch]; with factor
  const float* z_grad = nullptr;          ///< [tokens]; null = zero
  const std::int32_t* counted = nullptr;  ///< [tokens]: 0 = the token is padding; null: none is
  void* logits_grad = nullptr;            ///< [tokens, experts]
};

/// Sums over the counted tokens of each sample: of probabilities, in an order that the numbers of positions
/// and experts decide alone, and of how often each expert is chosen.
struct RouteSums {
  std::int64_t tokens = 0, experts = 0, topk = 0, batch = 1;
  DType dtype = DType::f32;
  const void* logits = nullptr;  ///< [tokens, experts]
  const std::int32_t* expert = nullptr;
  const float* lse = nullptr;
  const std::int32_t* counted = nullptr;  ///< as in RouteBackward
  float* probability = nullptr;           ///< [batch, experts]
  float* chosen = nullptr;                ///< [batch, experts], whole numbers
};

/// The balance of a sample: factor[e] = experts * topk * chosen[e] / n^2 with n all its choices, and
/// value = the sum of factor[e] * probability[e]; 1 where experts are chosen evenly by a router that has no
/// preference. A sample without any choice: zeros.
struct BalanceForward {
  std::int64_t batch = 0, experts = 0, topk = 0;
  const float* probability = nullptr;  ///< [batch, experts]
  const float* chosen = nullptr;       ///< [batch, experts]
  float* factor = nullptr;             ///< [batch, experts]
  float* value = nullptr;              ///< [batch]
};

/// Slots in the order of their experts, those of one expert in their own order.
struct SortSlots {
  std::int64_t slots = 0, experts = 0, topk = 1;
  const std::int32_t* expert = nullptr;  ///< [slots], each in [0, experts)
  std::int32_t* row = nullptr;           ///< [slots]: the place of a slot
  std::int32_t* slot = nullptr;          ///< [slots]: the slot at a place
  std::int32_t* token = nullptr;         ///< [slots]: slot / topk of it
  std::int32_t* count = nullptr;         ///< [experts]: slots of each
};

/// y[t] = the sum of weight[t, j] * x[row[t * topk + j]] over j, in this order, in fp32.
struct CombineSlots {
  std::int64_t tokens = 0, topk = 1, cols = 0;
  DType dtype = DType::f32;
  const void* x = nullptr;            ///< [tokens * topk, cols]
  const std::int32_t* row = nullptr;  ///< [tokens * topk]
  const float* weight = nullptr;      ///< [tokens, topk]; null = all 1
  void* y = nullptr;                  ///< [tokens, cols]
};

/// dot[r] = the sum of x[r, c] * y[r, c] over c, in fp32; then rows of both are multiplied by weight[r].
struct WeighRows {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  void* x = nullptr;              ///< [rows, cols]
  void* y = nullptr;              ///< [rows, cols]
  const float* weight = nullptr;  ///< [rows]
  float* dot = nullptr;           ///< [rows]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(route_forward, RouteForward)
TESSERA_DECLARE_KERNEL(route_backward, RouteBackward)
TESSERA_DECLARE_KERNEL(route_sums, RouteSums)
TESSERA_DECLARE_KERNEL(balance_forward, BalanceForward)
TESSERA_DECLARE_KERNEL(sort_slots, SortSlots)
TESSERA_DECLARE_KERNEL(combine_slots, CombineSlots)
TESSERA_DECLARE_KERNEL(weigh_rows, WeighRows)
