#pragma once
/// The words of a training configuration: what a key of these kinds may say.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

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
/// What is normalised of queries and keys, before they are turned: nothing, or each head by itself.
enum class QkNorm { none, head, full };
/// Where a layer's norms are: before each branch, before and behind it, or only behind.
enum class NormPlacement { pre, sandwich, post };
/// What a head for whole samples is trained on: a number or several, one class, or any number of classes.
enum class ProblemType { regression, single_label_classification, multi_label_classification };
enum class RopeType { llama3, linear, dynamic, yarn, longrope };
enum class Precision { fp32, bf16, fp16 };
enum class Recompute { none, selective, full, automatic };
enum class RecomputeMethod { uniform, block };
/// When weights that data ranks share out are freed after they were gathered: always after each use, never
/// between a forward pass and its backward, automatic: never in a pipeline, else always.
enum class ZeroReshard { automatic, always, never };
/// How attention of context ranks looks at others' positions: all_gather: each computes own queries on the
/// keys and values of all; ulysses: own heads at all positions, which ranks exchange before and after;
/// automatic: what sends less.
enum class ContextMethod { automatic, all_gather, ulysses };
/// Where what the device need not hold all the time lies: there, in host memory, or in a file.
enum class OffloadTo { none, cpu, nvme };
enum class OptimizerName { adamw, adam, sgd };
enum class LrStyle { constant, linear, cosine, inverse_sqrt, wsd };
enum class WsdStyle { linear, cosine, exponential, minus_sqrt };
enum class WeightDecayStyle { constant, linear, cosine };
enum class DeviceChoice { automatic, cpu, cuda };
enum class AutoSwitch { automatic, off, on };
/// What of a dataset is kept in memory: an index of at most 64 MiB, while tokens lie in the system's page
/// cache as those of a mapped file; index and tokens, read when the files are opened; or neither.
enum class DataLoading { mmap, cached, lazy };

/// The YAML spelling of a value: "gpt2", "1f1b", "inverse-square-root", "auto", ...
std::string_view name_of(Family value);
std::string_view name_of(PositionKind value);
std::string_view name_of(NormStyle value);
std::string_view name_of(MlpActivation value);
std::string_view name_of(QkNorm value);
std::string_view name_of(NormPlacement value);
std::string_view name_of(ProblemType value);
std::string_view name_of(RopeType value);
std::string_view name_of(Precision value);
std::string_view name_of(Recompute value);
std::string_view name_of(RecomputeMethod value);
std::string_view name_of(ZeroReshard value);
std::string_view name_of(ContextMethod value);
std::string_view name_of(OffloadTo value);
std::string_view name_of(OptimizerName value);
std::string_view name_of(LrStyle value);
std::string_view name_of(WsdStyle value);
std::string_view name_of(WeightDecayStyle value);
std::string_view name_of(DeviceChoice value);
std::string_view name_of(AutoSwitch value);
std::string_view name_of(DataLoading value);

/// How rotary embeddings are stretched beyond the lengths of pre-training (ops/rope.hpp: the rules); factor 1
/// = not at all, but for longrope.
struct RopeScaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;                ///< llama3
  double high_freq_factor = 4.0;               ///< llama3
  std::int64_t original_max_positions = 8192;  ///< llama3, yarn, longrope
  RopeType type = RopeType::llama3;
  double beta_fast = 32.0;                                  ///< yarn
  double beta_slow = 1.0;                                   ///< yarn
  bool truncate = true;                                     ///< yarn
  std::optional<double> attention_factor = std::nullopt;    ///< yarn, longrope: of cos and sin
  std::vector<double> short_factor = {}, long_factor = {};  ///< longrope

  /// Whether it changes anything.
  bool active() const { return factor != 1.0 || type == RopeType::longrope || attention_factor; }

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

}  // namespace tessera
