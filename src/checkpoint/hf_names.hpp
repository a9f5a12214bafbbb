#pragma once
/// Which Hugging Face tensors make up which Tessera parameter.

#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {

/// All parameters of the architecture in model order; Hugging Face names begin with `prefix`, except
/// lm_head.weight.
std::vector<HfMapping> map_names(const HfModelConfig& config, const std::string& prefix);

/// Classes of a model type that are supported, the one with a head first; none for an unknown type.
std::vector<std::string> architectures_of(const std::string& model_type);

/// "transformer." for GPT-2 and GPTBigCode, else "model.": what the full language model's names begin with.
std::string usual_prefix(const HfModelConfig& config);

/// True for buffers that old versions stored and that hold nothing learned (causal masks, rotary
/// frequencies).
bool is_stored_buffer(const HfModelConfig& config, const std::string& prefix, std::string_view name);

constexpr const char* kEmbedding = "embedding.word_embeddings.weight";
constexpr const char* kHfHead = "lm_head.weight";

}  // namespace tessera::checkpoint_detail
