#pragma once
/// Megatron's arguments, as its checkpoints keep them, and the section `model`.

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/torch_file.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

struct MegatronArgs {
  ModelSettings model;          ///< vocab_size is the padded one
  std::int64_t true_vocab = 0;  ///< 0 = they do not say
  std::int64_t tensor = 1, pipeline = 1, virtual_stages = 1;
  bool fused_gelu = false;                              ///< the MLP's alone is the one with tanh
  std::int64_t encoder_layers = 0, decoder_layers = 0;  ///< if it is a T5
  std::int64_t data = 1;  ///< ranks that share a model, those of its context among them
};
/// Errors: CheckpointError naming the argument that is missing, of another kind, or of a model that Tessera
/// does not have.
MegatronArgs read_megatron_args(const PickleValue& args, const std::filesystem::path& file);

/// Writes them for a rank's file, as the value of a key. `run`: also how it trains; null: only its model.
void write_megatron_args(TorchPickle& pickle, const ModelConfig& model, std::int64_t padded_vocab,
                         DType dtype, const MegatronExportOptions& options, const RunSource* run);

}  // namespace tessera::checkpoint_detail
