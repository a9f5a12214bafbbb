/// Types whose layers have experts.

#include <algorithm>

#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

using M = ModelSettings;

/// Layers have experts: how many, and how many a token goes to.
void add_experts(ModelSpec& row, HfKey number, double topk) {
  row.keys.push_back(std::move(number));
  row.keys.push_back(HfKey::size("num_experts_per_tok", &M::router_topk, {topk}));
  row.demands.push_back(
      {"output_router_logits", HfDemand::Only::is_false,
       "is not supported: Transformers' balance of experts is that of all layers and the whole "
       "batch together, which depends on the layout",
       "Make it false; model.router_aux_loss balances experts for each sample."});
}

}  // namespace

ModelSpec mixtral() {
  ModelSpec row = llama_shape("mixtral", {32, 4096, 32, 8, 14336, 32000, 131072});
  row.architectures = {"MixtralForCausalLM", "MixtralModel"};
  std::ranges::find(row.keys, HfKey::Field(&M::norm_eps), &HfKey::field)->absent = {1e-5};
  row.rope.absent_theta = 1e6;
  add_experts(row, HfKey::size("num_local_experts", &M::num_experts, {8}), 2);
  row.window = {HfWindow::Use::always, 0};
  row.demands.push_back({"router_jitter_noise", HfDemand::Only::zero});
  row.names.experts = {
      .router = "block_sparse_moe.gate",
      .fc1 = {{.name = "block_sparse_moe.experts.*.w1", .rows = HfTensor::Rows::ffn, .gate = true},
              {.name = "block_sparse_moe.experts.*.w3", .rows = HfTensor::Rows::ffn}},
      .fc2 = "block_sparse_moe.experts.*.w2"};
  row.needs = {{[](const ModelConfig& c) { return !c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                "it has no biases"}};
  return row;
}

ModelSpec qwen3_moe() {
  const ModelSpec dense = qwen3();
  ModelSpec row = llama_shape("qwen3_moe", {24, 2048, 32, 4, 6144, 151936, 32768});
  row.family = dense.family;
  row.model.qk_norm = dense.model.qk_norm;
  row.architectures = {"Qwen3MoeForCausalLM", "Qwen3MoeModel"};
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, false));
  row.keys.push_back(HfKey::flag("attention_bias", &M::proj_bias, false));
  add_head_norms(row);
  // Files on the hub say num_experts, Transformers 5 the other.
  add_experts(row, HfKey::size("num_experts", &M::num_experts, {128}, "num_local_experts"), 8);
  row.keys.push_back(HfKey::size("moe_intermediate_size", &M::moe_ffn_hidden_size, {768}));
  row.keys.push_back(HfKey::flag("norm_topk_prob", &M::router_normalized, false));
  row.sparse_layers = true;
  row.demands.push_back({"use_sliding_window", HfDemand::Only::is_false});
  row.needs = dense.needs;
  return row;
}

ModelSpec olmoe() {
  ModelSpec row = llama_shape("olmoe", {16, 2048, 16, 0, 2048, 50304, 4096});
  row.model.qk_norm = QkNorm::full;
  row.architectures = {"OlmoeForCausalLM", "OlmoeModel"};
  std::ranges::find(row.keys, HfKey::Field(&M::norm_eps), &HfKey::field)->absent = {1e-5};
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, false));
  row.keys.push_back(HfKey::flag("attention_bias", &M::proj_bias, false));
  add_head_norms(row);
  add_experts(row, HfKey::size("num_experts", &M::num_experts, {64}), 8);
  row.keys.push_back(HfKey::flag("norm_topk_prob", &M::router_normalized, false));
  row.absent_padding = 1;
  row.demands.push_back({"clip_qkv", HfDemand::Only::zero});
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias == has_proj_bias(c) && !c.linear_bias; },
                "its four projections of attention have biases, or none has, and its experts have none"}};
  return row;
}

}  // namespace tessera::rows
