#pragma once
/// What the readers and writers of architectures have in common.

#include <span>
#include <variant>

#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {

constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 28;

/// A key of RopeScaling as config.json names it, beside "rope_type" and "factor".
struct RopeField {
  using Member = std::variant<double RopeScaling::*, std::optional<double> RopeScaling::*,
                              bool RopeScaling::*, std::vector<double> RopeScaling::*>;
  const char* key;
  Member member;
  bool required = false;
};
/// What each rule reads of the others; original_max_positions, which stands in two places, aside.
std::span<const RopeField> rope_fields(RopeType type);
/// Whether the rule reads original_max_positions.
constexpr bool has_original(RopeType type) {
  return type == RopeType::llama3 || type == RopeType::yarn || type == RopeType::longrope;
}
/// Only what its rule reads.
RopeScaling canonical(const RopeScaling& scaling);

/// A model without what says how it is trained, spelt in one way of several that mean the same.
ModelConfig canonical(ModelConfig model);

}  // namespace tessera::checkpoint_detail
