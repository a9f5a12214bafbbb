#pragma once
/// Which Hugging Face tensors make up which Tessera parameter: families' rows, interpreted.

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/families.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {

constexpr const char* kEmbedding = "embedding.word_embeddings.weight";

/// Whose tensors: those of folders, or of Transformers' modules.
enum class HfForm { files, modules };
/// All parameters of the architecture in model order; Hugging Face names begin with `prefix`, except the
/// head's.
std::vector<HfMapping> map_names(const Architecture& config, const std::string& prefix,
                                 const std::string& head, HfForm form = HfForm::files);

/// The row by whose names tensors of this type go.
const ModelSpec& naming_spec(const Architecture& config);
/// The head's tensor as Transformers' modules and as its files name it.
std::string head_name(const ModelSpec& spec);
std::string stored_head_name(const ModelSpec& spec);

/// True for buffers that old versions stored and that hold nothing learned (causal masks, rotary
/// frequencies).
bool is_stored_buffer(const ModelSpec& spec, const std::string& prefix, std::string_view name);

}  // namespace tessera::checkpoint_detail
