#pragma once
/// One config.json being read by the row of its type.

#include "checkpoint/hf_rules.hpp"
#include "checkpoint/json_strict.hpp"

namespace tessera::checkpoint_detail {

struct Reader {
  JsonView root;
  const ModelSpec& spec;
  ModelSettings& model;

  bool is_absent(const char* key) const { return !root.object().contains(key); }
  double number(const char* key, double absent) const {
    const auto found = root.find(key);
    return found ? found->number() : absent;
  }
  bool flag(const char* key, bool absent) const {
    const auto found = root.find(key);
    return found ? found->boolean() : absent;
  }
  std::int64_t size(const char* key, std::int64_t absent) const {
    const auto found = root.find(key);
    return found ? found->integer(1, kMaxSize) : absent;
  }

  static constexpr const char* kWay = "Change it, or use another model.";
};

/// The number `key`, or `absent` where it is absent or null: above 0 and at most `most`.
double positive(const JsonView& in, const char* key, double absent, double most);

/// The document with the members of its object `nested` (null = none) beside it, as "nested.key".
Json flattened(Json document, const char* nested);
/// The way back.
Json nested_again(Json document, const char* nested);

/// Rotary positions: base, share of the head, stretching.
void read_rope(const Reader& in);
/// Which keys a position sees in which layers, where that can be fewer than all before it.
void read_window(const Reader& in);
/// The way back.
void write_rope(const ModelConfig& model, const HfRope& keys, Json& out);
void write_window(const ModelConfig& model, const HfWindow& window, Json& out);

/// The window and its pattern for layers that slide or not: none, or the shortest pattern that repeats.
template <typename Model>
void set_windows(Model& model, std::int64_t window, const std::vector<bool>& slides);
/// Which layers have experts: null where all have, or the shortest pattern that repeats.
template <typename Model>
void set_expert_layers(Model& model, const std::vector<bool>& mixed);

}  // namespace tessera::checkpoint_detail
