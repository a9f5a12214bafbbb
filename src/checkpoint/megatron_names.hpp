#pragma once
/// Names of Megatron's tensors, from the oldest to today's, and how tensor ranks share each.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/config_model.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

inline constexpr const char* kWholeMegatron = "Check that the folder is a whole checkpoint of Megatron-LM.";

/// Which stacks of layers a model has. Tessera calls a single one the decoder, Megatron Core BERT's the
/// encoder.
enum class MegatronStacks { decoder, encoder, both };
MegatronStacks stacks_of(const ModelConfig& model);

/// What a name of Megatron's stands for.
struct MegatronName {
  std::string ours;        ///< Tessera's name, with the layer's number in its stage
  bool ignored = false;    ///< holds nothing learned
  bool tied_copy = false;  ///< `ours` is the head: of a tied model the last stage's copy of the embedding
  bool again = false;      ///< a second name of a tensor, as Megatron Core's T5 has
};
/// Nothing for a name that no era has. `two_stacks`: of a model of an encoder and a decoder, T5; models with
/// one stack call it by either name.
std::optional<MegatronName> megatron_name(std::string_view name, bool two_stacks);
/// Whether the tensor is of what only a decoder beside an encoder has.
bool reads_encoder(std::string_view name);

/// How tensor ranks share a tensor.
enum class TensorSplit {
  none,        ///< every rank has the whole
  vocabulary,  ///< rows, padded
  rows,
  query_key_value,
  key_value,  ///< of the encoder
  gate_up,    ///< rows of fc1: with a gate each rank has its part of both halves
  columns
};
TensorSplit tensor_split(std::string_view ours);

/// Biases and vectors have no weight decay, whoever named them.
bool has_weight_decay(std::string_view name, std::size_t dimensions);

/// "decoder.layers.7.mlp.linear_fc1.weight" taken apart.
struct LayerName {
  std::int64_t layer = -1;  ///< -1: not of a layer
  std::string rest;         ///< after the number and the dot; the whole name where there is none
  bool encoder = false;     ///< of "encoder.layers."
};
LayerName layer_name(std::string_view ours);
/// Together again.
std::string full_name(const LayerName& name);

/// "mp_rank_01", with stages "mp_rank_01_003".
std::string rank_folder(std::int64_t tp, std::optional<std::int64_t> pp);
/// A number with zeros in front.
std::string zero_filled(std::int64_t value, std::size_t width);

/// The second name that Megatron Core gives a tensor of ours; null: it has one.
const char* second_name(MegatronStacks stacks, std::string_view ours);

/// The path of keys under `model` by which a tensor of ours is written; its layer: within its stage.
std::vector<std::string> megatron_path(MegatronExportOptions::Names names, const LayerName& name,
                                       MegatronStacks stacks);

}  // namespace tessera::checkpoint_detail
