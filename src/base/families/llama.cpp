#include <algorithm>

#include "base/families/rows.hpp"

namespace tessera::rows {

std::vector<HfKey> llama_sizes(const Sizes& absent, bool tied_head) {
  using M = ModelSettings;
  std::vector<HfKey> keys = {HfKey::size("num_hidden_layers", &M::num_layers, {absent.layers}),
                             HfKey::size("hidden_size", &M::hidden_size, {absent.width}),
                             HfKey::size("num_attention_heads", &M::num_heads, {absent.heads}),
                             HfKey::size("num_key_value_heads", &M::num_kv_heads, {1, &M::num_heads}),
                             HfKey::size("head_dim", &M::head_dim, {1, &M::hidden_size, &M::num_heads}),
                             HfKey::size("intermediate_size", &M::ffn_hidden_size, {absent.ffn}),
                             HfKey::size("vocab_size", &M::vocab_size, {absent.vocabulary}),
                             HfKey::size("max_position_embeddings", &M::max_positions, {absent.positions}),
                             HfKey::probability("attention_dropout", &M::attention_dropout, 0.0),
                             HfKey::flag("tie_word_embeddings", &M::tied_head, tied_head)};
  if (absent.kv_heads > 0) {  // null still means as many as heads
    keys[3].absent = {absent.kv_heads};
    keys[3].null = HfDefault{1, &M::num_heads};
  }
  return keys;
}

ModelSpec llama_shape(const char* name, const Sizes& absent) {
  using M = ModelSettings;
  using Rows = HfTensor::Rows;
  ModelSpec row{
      .name = name,
      .family = Family::llama,
      .model = {.position_embedding = PositionKind::rotary,
                .norm = NormStyle::rmsnorm,
                .activation = MlpActivation::swiglu,
                .tied_head = false,
                .linear_bias = false,
                .qkv_bias = false,
                .parallel_residual = false},
      .architectures = {},
      .keys = llama_sizes(absent, false),
      .activations = {.names = {{"silu", MlpActivation::swiglu}, {"swish", MlpActivation::swiglu}},
                      .absent = MlpActivation::swiglu,
                      .supported = "silu is",
                      .remedy = "Use a model with SwiGLU."},
      .padding_row = true,
      .inert = {"attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers",
                "pretraining_tp", "rope_interleaved", "resid_pdrop", "embd_pdrop", "attn_pdrop",
                "hidden_dropout", "embedding_dropout", "residual_dropout", "norm_epsilon", "use_bias"},
      .names = {.prefix = "model.",
                .layers = "layers.",
                .embedding = "embed_tokens",
                .positions = "embed_positions",
                .layer = {{"input_layernorm", {{"input_layernorm"}}},
                          {"self_attention.linear_qkv",
                           {{"self_attn.q_proj", Rows::query},
                            {"self_attn.k_proj", Rows::key_value},
                            {"self_attn.v_proj", Rows::key_value}}},
                          {"self_attention.linear_proj", {{"self_attn.o_proj"}}},
                          {"pre_mlp_layernorm", {{"post_attention_layernorm"}}},
                          {"mlp.linear_fc1",
                           {{.name = "mlp.gate_proj", .rows = Rows::ffn, .gate = true},
                            {"mlp.up_proj", Rows::ffn}}},
                          {"mlp.linear_fc2", {{"mlp.down_proj"}}}},
                .final_norm = "norm",
                .buffers = {"*rotary_emb.inv_freq"}},
      .attributes = {{"head_dim", "model.layers.0.self_attn.head_dim"},
                     {"norm_eps", "model.layers.0.input_layernorm.variance_epsilon"}},
      .megatron_tokenizer = "Llama2Tokenizer",
  };
  row.keys.push_back(HfKey::positive("rms_norm_eps", &M::norm_eps, 1e-6));
  row.keys.push_back(HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6));
  return row;
}

void set_head_dim(ModelSpec& row, double absent) {
  for (HfKey& key : row.keys) {
    if (key.field == HfKey::Field(&ModelSettings::head_dim)) key.absent = {absent};
  }
}

void add_head_norms(ModelSpec& row) {
  auto& layer = row.names.layer;
  const auto projection = std::ranges::find_if(layer, [](const HfParameter& each) {
    return std::string_view(each.ours) == "self_attention.linear_proj";
  });
  layer.insert(projection + 1, {{"self_attention.q_layernorm", {{"self_attn.q_norm"}}},
                                {"self_attention.k_layernorm", {{"self_attn.k_norm"}}}});
}

ModelSpec llama() {
  using M = ModelSettings;
  ModelSpec row = llama_shape("llama", {32, 4096, 32, 0, 11008, 32000, 2048});
  // Two thirds of 4 * width, rounded up to a multiple of 256.
  row.ffn_width = [](std::int64_t width) { return (8 * width / 3 + 255) / 256 * 256; };
  row.architectures = {"LlamaForCausalLM", "LlamaModel"};
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, false));
  row.keys.push_back(HfKey::flag("attention_bias", &M::proj_bias, false));
  row.keys.push_back(HfKey::flag("mlp_bias", &M::linear_bias, false));
  row.names_untyped = true;
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias == has_proj_bias(c); },
                "its four projections of attention have biases, or none has"},
               {[](const ModelConfig& c) { return !c.sliding_window; }, "it has no window"}};
  return row;
}

}  // namespace tessera::rows
