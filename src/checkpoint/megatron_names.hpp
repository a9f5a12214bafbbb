#pragma once
/// Names of Megatron's tensors, from the oldest to today's, and how tensor ranks share each.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/config_model.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

inline constexpr const char* kWholeMegatron = "Check that the folder is a whole checkpoint of Megatron-LM.";

/// What a name of Megatron's stands for.
struct MegatronName {
  std::string ours;        ///< Tessera's name, with the layer's number in its stage
  bool ignored = false;    ///< holds nothing learned
  bool tied_copy = false;  ///< `ours` is the head: of a tied model the last stage's copy of the embedding
};
/// Nothing for a name that no era has.
std::optional<MegatronName> megatron_name(std::string_view name);

/// How tensor ranks share a tensor.
enum class TensorSplit {
  none,        ///< every rank has the whole
  vocabulary,  ///< rows, padded
  query_key_value,
  gate_up,  ///< rows of fc1: with a gate each rank has its part of both halves
  columns
};
TensorSplit tensor_split(std::string_view ours);

/// Biases and vectors have no weight decay, whoever named them.
bool has_weight_decay(std::string_view name, std::size_t dimensions);

/// "decoder.layers.7.mlp.linear_fc1.weight" with another number; npos in `number` where the name has none.
struct LayerName {
  std::int64_t layer = -1;  ///< -1: not of a layer
  std::string rest;         ///< after the number and the dot; the whole name where there is none
};
LayerName layer_name(std::string_view ours);
std::string with_layer(std::int64_t layer, std::string_view rest);

/// "mp_rank_01", with stages "mp_rank_01_003".
std::string rank_folder(std::int64_t tp, std::optional<std::int64_t> pp);
/// A number with zeros in front.
std::string zero_filled(std::int64_t value, std::size_t width);

/// The path of keys under `model` by which a tensor of ours is written; `layer`: within its stage.
std::vector<std::string> megatron_path(MegatronExportOptions::Names names, const LayerName& name);

}  // namespace tessera::checkpoint_detail
