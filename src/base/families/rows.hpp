#pragma once
/// The rows of the table, a file each, and what several of them have in common.

#include "tessera/base/error.hpp"
#include "tessera/base/families.hpp"

namespace tessera::rows {

ModelSpec bert();
ModelSpec bloom();
ModelSpec falcon();
ModelSpec gemma2();
ModelSpec gemma3_text();
ModelSpec glm();
ModelSpec glm4();
ModelSpec gpt2();
ModelSpec gpt_bigcode();
ModelSpec gpt_neox();
ModelSpec llama();
ModelSpec megatron_bert();
ModelSpec megatron_t5();
ModelSpec mistral();
ModelSpec mixtral();
ModelSpec mpt();
ModelSpec mt5();
ModelSpec olmo2();
ModelSpec olmoe();
ModelSpec phi3();
ModelSpec qwen2();
ModelSpec qwen3();
ModelSpec qwen3_moe();
ModelSpec starcoder2();
ModelSpec t5();

/// The activations of an MLP without a gate.
HfActivations plain_activations(const char* key, const char* gelu_tanh);

/// What Transformers' config class has where config.json says nothing; kv_heads 0: as many as heads.
struct Sizes {
  double layers, width, heads, kv_heads, ffn, vocabulary, positions;
};
/// Keys of models that have Llama's names for their sizes.
std::vector<HfKey> llama_sizes(const Sizes& absent, bool tied_head);
/// A row of Llama's shape: keys, names and attributes.
ModelSpec llama_shape(const char* name, const Sizes& absent);
/// Of a type whose heads have this width where config.json does not say it.
void set_head_dim(ModelSpec& row, double absent);
/// Norms of queries and keys, by Llama's names.
void add_head_norms(ModelSpec& row);
/// One matrix for gate and up, where Llama has two.
void stack_gate_and_up(ModelSpec& row);

}  // namespace tessera::rows
