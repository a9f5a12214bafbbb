#include "base/families/rows.hpp"

namespace tessera::rows {

HfActivations plain_activations(const char* key, const char* gelu_tanh) {
  return {.key = key,
          .names = {{"gelu_new", MlpActivation::gelu_tanh},
                    {"gelu_pytorch_tanh", MlpActivation::gelu_tanh},
                    {"gelu_fast", MlpActivation::gelu_tanh},
                    {"gelu", MlpActivation::gelu},
                    {"relu", MlpActivation::relu}},
          .gelu_tanh = gelu_tanh,
          .supported = "gelu_new, gelu_pytorch_tanh, gelu_fast, gelu and relu are",
          .remedy = "Use a model with one of these."};
}

ModelSpec gpt2() {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  return {
      .name = "gpt2",
      .family = Family::gpt2,
      .model = {.position_embedding = PositionKind::learned,
                .norm = NormStyle::layernorm,
                .activation = MlpActivation::gelu_tanh,
                .tied_head = true,
                .linear_bias = true,
                .qkv_bias = true,
                .parallel_residual = false},
      .ffn_width = [](std::int64_t width) { return 4 * width; },
      .architectures = {"GPT2LMHeadModel", "GPT2Model"},
      .keys = {HfKey::size("n_layer", &M::num_layers, {12}, "num_hidden_layers"),
               HfKey::size("n_embd", &M::hidden_size, {768}, "hidden_size"),
               HfKey::size("n_head", &M::num_heads, {12}, "num_attention_heads"),
               HfKey::size("n_inner", &M::ffn_hidden_size, {4, &M::hidden_size}),
               HfKey::size("vocab_size", &M::vocab_size, {50257}),
               HfKey::size("n_positions", &M::max_positions, {1024}, "max_position_embeddings"),
               HfKey::positive("layer_norm_epsilon", &M::norm_eps, 1e-5),
               HfKey::flag("tie_word_embeddings", &M::tied_head, true),
               HfKey::probability("resid_pdrop", &M::dropout, 0.1),
               HfKey::probability("attn_pdrop", &M::attention_dropout, 0.1),
               HfKey::probability("embd_pdrop", &M::embedding_dropout, 0.1),
               HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)},
      .activations = plain_activations("activation_function", "gelu_new"),
      .demands = {{"scale_attn_weights", Only::is_true},
                  {"scale_attn_by_inverse_layer_idx", Only::is_false},
                  {"add_cross_attention", Only::is_false}},
      .inert = {"attention_softmax_in_fp32", "reorder_and_upcast_attn", "scale_attention_softmax_in_fp32",
                "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                "summary_use_proj", "attention_dropout", "hidden_dropout", "embedding_dropout",
                "residual_dropout"},
      .names = {.prefix = "transformer.",
                .layers = "h.",
                .embedding = "wte",
                .positions = "wpe",
                .layer = {{"input_layernorm", {{"ln_1"}}},
                          {"self_attention.linear_qkv", {{"attn.c_attn"}}},
                          {"self_attention.linear_proj", {{"attn.c_proj"}}},
                          {"pre_mlp_layernorm", {{"ln_2"}}},
                          {"mlp.linear_fc1", {{"mlp.c_fc"}}},
                          {"mlp.linear_fc2", {{"mlp.c_proj"}}}},
                .final_norm = "ln_f",
                .transposed = true,
                .buffers = {"h.*.attn.bias", "h.*.attn.masked_bias"}},
      .needs = {{[](const ModelConfig& c) { return c.num_kv_heads == c.num_heads; },
                 "it has as many key and value heads as heads"},
                {[](const ModelConfig& c) { return c.head_dim * c.num_heads == c.hidden_size; },
                 "its heads together are as wide as the model"},
                {[](const ModelConfig& c) { return !c.sliding_window; }, "it has no window"},
                {[](const ModelConfig& c) { return c.qkv_bias && c.linear_bias && has_proj_bias(c); },
                 "it has all biases"}},
      .attributes = {{"num_heads", "transformer.h.0.attn.num_heads"},
                     {"head_dim", "transformer.h.0.attn.head_dim"},
                     {"norm_eps", "transformer.h.0.ln_1.eps"}},
  };
}

}  // namespace tessera::rows
