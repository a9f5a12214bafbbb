#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

HfNames names() {
  return {.prefix = "gpt_neox.",
          .layers = "layers.",
          .embedding = "embed_in",
          .positions = "embed_positions",
          .layer = {{"input_layernorm", {{"input_layernorm"}}},
                    {"self_attention.linear_qkv",
                     {{.name = "attention.query_key_value", .order = HfTensor::Order::grouped}}},
                    {"self_attention.linear_proj", {{"attention.dense"}}},
                    {"pre_mlp_layernorm", {{"post_attention_layernorm"}}},
                    {"mlp.linear_fc1", {{"mlp.dense_h_to_4h"}}},
                    {"mlp.linear_fc2", {{"mlp.dense_4h_to_h"}}}},
          .final_norm = "final_layer_norm",
          .stored_head = "embed_out",
          .buffers = {"*rotary_emb.inv_freq", "layers.*.attention.bias", "layers.*.attention.masked_bias"}};
}

}  // namespace

/// Attention and MLP beside each other, each with its own norm; a quarter of each head rotates.
ModelSpec gpt_neox() {
  using M = ModelSettings;
  return {
      .name = "gpt_neox",
      .family = {"gpt_neox"},
      .model = {.position_embedding = PositionKind::rotary,
                .norm = NormStyle::layernorm,
                .activation = MlpActivation::gelu,
                .tied_head = false,
                .linear_bias = true,
                .qkv_bias = true,
                .parallel_residual = true},
      .ffn_width = [](std::int64_t width) { return 4 * width; },
      .architectures = {"GPTNeoXForCausalLM", "GPTNeoXModel"},
      .keys = {HfKey::size("num_hidden_layers", &M::num_layers, {44}),
               HfKey::size("hidden_size", &M::hidden_size, {6144}),
               HfKey::size("num_attention_heads", &M::num_heads, {64}),
               HfKey::size("intermediate_size", &M::ffn_hidden_size, {24576}),
               HfKey::size("vocab_size", &M::vocab_size, {50432}),
               HfKey::size("max_position_embeddings", &M::max_positions, {2048}),
               HfKey::positive("layer_norm_eps", &M::norm_eps, 1e-5),
               HfKey::flag("tie_word_embeddings", &M::tied_head, false),
               HfKey::flag("use_parallel_residual", &M::parallel_residual, true),
               HfKey::flag("attention_bias", &M::qkv_bias, true),
               HfKey::flag("attention_bias", &M::proj_bias, true),
               HfKey::probability("hidden_dropout", &M::dropout, 0.0),
               HfKey::probability("attention_dropout", &M::attention_dropout, 0.0),
               HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)},
      .activations =
          [] {
            HfActivations names = plain_activations("hidden_act", "gelu_new");
            names.absent = MlpActivation::gelu;
            return names;
          }(),
      .rope = {.theta = "rotary_emb_base",
               .fraction = "rotary_pct",
               .absent_fraction = 0.25,
               .partial = true},
      .inert = {"classifier_dropout"},
      .names = names(),
      .needs = {{[](const ModelConfig& c) { return c.num_kv_heads == c.num_heads; },
                 "it has as many key and value heads as heads"},
                {[](const ModelConfig& c) { return c.head_dim * c.num_heads == c.hidden_size; },
                 "its heads together are as wide as the model"},
                {[](const ModelConfig& c) { return !c.sliding_window && !c.padding_id; },
                 "it has no window and no padding row"},
                {[](const ModelConfig& c) { return embedding_dropout(c) == c.dropout; },
                 "it has one dropout"},
                {[](const ModelConfig& c) { return c.linear_bias && c.qkv_bias == has_proj_bias(c); },
                 "its MLP has biases, and all of attention or none"}},
      .attributes = {{"head_dim", "gpt_neox.layers.0.attention.head_size"},
                     {"norm_eps", "gpt_neox.layers.0.input_layernorm.eps"},
                     {"parallel_residual", "gpt_neox.layers.0.use_parallel_residual"}},
  };
}

}  // namespace tessera::rows
