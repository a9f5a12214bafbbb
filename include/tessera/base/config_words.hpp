#pragma once
/// The words of a training configuration: what a key of these kinds may say.

#include <cstdint>
#include <string_view>

#include "tessera/base/schedules.hpp"

namespace tessera {

/// A row of families() (base/families.hpp), by its name there, whose defaults fill in what a model leaves
/// open.
struct Family {
  std::string_view name = "gpt2";  ///< a literal
  static const Family gpt2, llama;

  friend bool operator==(const Family&, const Family&) = default;
};
inline constexpr Family Family::gpt2{"gpt2"};
inline constexpr Family Family::llama{"llama"};

/// relative: a learned bias on scores by the distance of query and key (T5).
enum class PositionKind { learned, rotary, alibi, none, relative };
enum class NormStyle { layernorm, rmsnorm };
enum class MlpActivation { gelu_tanh, gelu, relu, swiglu, geglu };
/// Whether the MLP's first product makes a gate too.
constexpr bool is_gated(MlpActivation activation) {
  return activation == MlpActivation::swiglu || activation == MlpActivation::geglu;
}
enum class Precision { fp32, bf16, fp16 };
enum class Recompute { none, selective, full, automatic };
enum class RecomputeMethod { uniform, block };
enum class OptimizerName { adamw, adam, sgd };
enum class LrStyle { constant, linear, cosine, inverse_sqrt, wsd };
enum class WsdStyle { linear, cosine, exponential, minus_sqrt };
enum class WeightDecayStyle { constant, linear, cosine };
enum class DeviceChoice { automatic, cpu, cuda };
enum class GraphUse { automatic, off, on };

/// The YAML spelling of a value: "gpt2", "1f1b", "inverse-square-root", "auto", ...
std::string_view name_of(Family value);
std::string_view name_of(PositionKind value);
std::string_view name_of(NormStyle value);
std::string_view name_of(MlpActivation value);
std::string_view name_of(Precision value);
std::string_view name_of(Recompute value);
std::string_view name_of(RecomputeMethod value);
std::string_view name_of(OptimizerName value);
std::string_view name_of(LrStyle value);
std::string_view name_of(WsdStyle value);
std::string_view name_of(WeightDecayStyle value);
std::string_view name_of(DeviceChoice value);
std::string_view name_of(GraphUse value);

/// Llama-3 frequency scaling of rotary embeddings; factor 1 = none.
struct RopeScaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_positions = 8192;

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

}  // namespace tessera
