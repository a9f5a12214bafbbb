#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

bool has_two_norms(const ModelConfig& c) { return c.parallel_residual && !c.shared_norm; }

HfNames falcon_names() {
  return {
      .prefix = "transformer.",
      .layers = "h.",
      .embedding = "word_embeddings",
      .positions = "position_embeddings",
      .layer = {{"input_layernorm", {{"input_layernorm"}}, [](const auto& c) { return !has_two_norms(c); }},
                {"input_layernorm", {{"ln_attn"}}, has_two_norms},
                {"self_attention.linear_qkv",
                 {{.name = "self_attention.query_key_value", .order = HfTensor::Order::grouped}}},
                {"self_attention.linear_proj", {{"self_attention.dense"}}},
                {"pre_mlp_layernorm", {{"ln_mlp"}}, has_two_norms},
                {"pre_mlp_layernorm",
                 {{"post_attention_layernorm"}},
                 [](const auto& c) { return !c.parallel_residual; }},
                {"mlp.linear_fc1", {{"mlp.dense_h_to_4h"}}},
                {"mlp.linear_fc2", {{"mlp.dense_4h_to_h"}}}},
      .final_norm = "ln_f",
      .buffers = {"*rotary_emb.inv_freq"}};
}

}  // namespace

/// Attention and MLP beside each other behind one norm (7B) or one each (40B).
ModelSpec falcon() {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  constexpr const char* kDropout = "is not supported: Falcon drops out the sum of both branches at once";
  constexpr const char* kNoDropout = "Set it to 0.";
  return {
      .name = "falcon",
      .family = {"falcon"},
      .model = {.position_embedding = PositionKind::rotary,
                .norm = NormStyle::layernorm,
                .activation = MlpActivation::gelu,
                .tied_head = true,
                .linear_bias = false,
                .qkv_bias = false,
                .parallel_residual = true,
                .shared_norm = true},
      .ffn_width = [](std::int64_t width) { return 4 * width; },
      .architectures = {"FalconForCausalLM", "FalconModel"},
      .keys = {HfKey::size("num_hidden_layers", &M::num_layers, {32}),
               HfKey::size("hidden_size", &M::hidden_size, {4544}),
               HfKey::size("num_attention_heads", &M::num_heads, {71}),
               HfKey::size("ffn_hidden_size", &M::ffn_hidden_size, {4, &M::hidden_size}),
               HfKey::size("vocab_size", &M::vocab_size, {65024}),
               HfKey::size("max_position_embeddings", &M::max_positions, {2048}),
               HfKey::positive("layer_norm_epsilon", &M::norm_eps, 1e-5),
               HfKey::flag("tie_word_embeddings", &M::tied_head, true),
               HfKey::flag("bias", &M::linear_bias, false), HfKey::flag("bias", &M::qkv_bias, false),
               HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)},
      .activations =
          [] {
            HfActivations names = plain_activations("activation", "gelu_new");
            names.absent = MlpActivation::gelu;
            return names;
          }(),
      .falcon_layers = true,
      .demands = {{"alibi", Only::is_false, "is not supported: Falcon rounds ALiBi's distances to bfloat16",
                   "Use a Falcon with rotary positions."},
                  {"hidden_dropout", Only::zero, kDropout, kNoDropout},
                  {"attention_dropout", Only::zero, kDropout, kNoDropout}},
      .inert = {"apply_residual_connection_post_layernorm", "attn_config"},
      .names = falcon_names(),
      .needs =
          {{[](const ModelConfig& c) { return c.head_dim * c.num_heads == c.hidden_size; },
            "its heads together are as wide as the model"},
           {[](const ModelConfig& c) { return !c.sliding_window && !c.padding_id; },
            "it has no window and no padding row"},
           {[](const ModelConfig& c) {
              return c.linear_bias == c.qkv_bias && has_proj_bias(c) == c.linear_bias;
            },
            "it has all biases or none"},
           {[](const ModelConfig& c) {
              return c.parallel_residual || c.num_kv_heads == 1 || c.num_kv_heads == c.num_heads;
            },
            "where attention and MLP follow one another it has one key and value head, or as many as heads"}},
      .attributes = {{"num_heads", "transformer.h.0.self_attention.num_heads"},
                     {"head_dim", "transformer.h.0.self_attention.head_dim"},
                     {"norm_eps", "transformer.ln_f.eps"}},
  };
}

}  // namespace tessera::rows
