#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

/// The MLP is the last part of a block: number 1 of the encoder's, 2 of the decoder's.
void add_mlp(std::vector<HfParameter>& layer, const char* norm, const char* wi, const char* wi_0,
             const char* wi_1, const char* wo) {
  layer.push_back({"pre_mlp_layernorm", {{norm}}});
  layer.push_back({"mlp.linear_fc1",
                   {{.name = wi, .plain = true},
                    {.name = wi_0, .rows = HfTensor::Rows::ffn, .gate = true},
                    {.name = wi_1, .rows = HfTensor::Rows::ffn, .gate = true}}});
  layer.push_back({"mlp.linear_fc2", {{wo}}});
}

std::vector<HfParameter> self_attention() {
  using Rows = HfTensor::Rows;
  return {{"input_layernorm", {{"layer.0.layer_norm"}}},
          {"self_attention.linear_qkv",
           {{"layer.0.SelfAttention.q", Rows::query},
            {"layer.0.SelfAttention.k", Rows::key_value},
            {"layer.0.SelfAttention.v", Rows::key_value}}},
          {"self_attention.linear_proj", {{"layer.0.SelfAttention.o"}}}};
}

std::vector<HfParameter> encoder_layer() {
  std::vector<HfParameter> layer = self_attention();
  add_mlp(layer, "layer.1.layer_norm", "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wi_0",
          "layer.1.DenseReluDense.wi_1", "layer.1.DenseReluDense.wo");
  return layer;
}

std::vector<HfParameter> decoder_layer() {
  using Rows = HfTensor::Rows;
  std::vector<HfParameter> layer = self_attention();
  layer.push_back({"pre_cross_attn_layernorm", {{"layer.1.layer_norm"}}});
  layer.push_back({"cross_attention.linear_q", {{"layer.1.EncDecAttention.q"}}});
  layer.push_back(
      {"cross_attention.linear_kv",
       {{"layer.1.EncDecAttention.k", Rows::key_value}, {"layer.1.EncDecAttention.v", Rows::key_value}}});
  layer.push_back({"cross_attention.linear_proj", {{"layer.1.EncDecAttention.o"}}});
  add_mlp(layer, "layer.2.layer_norm", "layer.2.DenseReluDense.wi", "layer.2.DenseReluDense.wi_0",
          "layer.2.DenseReluDense.wi_1", "layer.2.DenseReluDense.wo");
  return layer;
}

HfNames t5_names() {
  return {.prefix = "",
          .layers = "decoder.block.",
          .embedding = "shared",
          .positions = nullptr,
          .layer = decoder_layer(),
          .final_norm = "decoder.final_layer_norm",
          // Old versions stored a table that nothing reads.
          .buffers = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"},
          .front = {{"encoder.relative_attention_bias",
                     {{"encoder.block.0.layer.0.SelfAttention.relative_attention_bias"}}}},
          .encoder_layers = "encoder.block.",
          .encoder_layer = encoder_layer(),
          .encoder_end = {{"encoder.final_layernorm", {{"encoder.final_layer_norm"}}},
                          {"decoder.relative_attention_bias",
                           {{"decoder.block.0.layer.0.SelfAttention.relative_attention_bias"}}}},
          .embedding_copies = {"encoder.embed_tokens", "decoder.embed_tokens"}};
}

/// What T5's config class has where config.json says nothing.
struct T5Sizes {
  double width, head_dim, ffn, layers, heads, vocabulary;
};

HfActivations activations(MlpActivation absent) {
  return {.key = "feed_forward_proj",
          .names = {{"relu", MlpActivation::relu},
                    {"gated-gelu", MlpActivation::geglu},
                    {"gated-silu", MlpActivation::swiglu},
                    {"gelu", MlpActivation::gelu},
                    {"gelu_new", MlpActivation::gelu_tanh}},
          .absent = absent,
          .gelu_tanh = "gelu_new",
          .supported = "relu, gated-gelu, gated-silu, gelu and gelu_new are",
          .remedy = "Use a model with one of these."};
}

ModelSpec t5_shape(const char* name, const char* architecture, const T5Sizes& absent,
                   MlpActivation activation) {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  return {
      .name = name,
      .family = {"t5"},
      .model = {.position_embedding = PositionKind::relative,
                .norm = NormStyle::rmsnorm,
                .activation = activation,
                .tied_head = true,
                .linear_bias = false,
                .qkv_bias = false,
                .parallel_residual = false,
                .relative_buckets = 32,
                .relative_max_distance = 128,
                .scaled_head = true},
      .ffn_width = [](std::int64_t width) { return 4 * width; },
      .architectures = {architecture},
      .keys = {HfKey::size("d_model", &M::hidden_size, {absent.width}, "hidden_size"),
               HfKey::size("num_layers", &M::encoder_layers, {absent.layers}),
               HfKey::size("num_heads", &M::num_heads, {absent.heads}, "num_attention_heads"),
               HfKey::size("d_kv", &M::head_dim, {absent.head_dim}),
               HfKey::size("d_ff", &M::ffn_hidden_size, {absent.ffn}),
               HfKey::size("vocab_size", &M::vocab_size, {absent.vocabulary}),
               HfKey::size("n_positions", &M::max_positions, {512}),
               HfKey::size("relative_attention_num_buckets", &M::relative_buckets, {32}),
               HfKey::size("relative_attention_max_distance", &M::relative_max_distance, {128}),
               HfKey::positive("layer_norm_epsilon", &M::norm_eps, 1e-6),
               HfKey::probability("dropout_rate", &M::dropout, 0.1),
               HfKey::probability("dropout_rate", &M::attention_dropout, 0.1)},
      .activations = activations(activation),
      .demands = {{"is_encoder_decoder", Only::is_true}, {"is_decoder", Only::is_false}},
      .inert = {"classifier_dropout", "tie_word_embeddings", "scale_decoder_outputs", "is_gated_act",
                "dense_act_fn"},
      .names = t5_names(),
      .needs = {{[](const ModelConfig& c) { return c.num_kv_heads == c.num_heads; },
                 "it has as many key and value heads as heads"},
                {[](const ModelConfig& c) { return !c.padding_id; }, "it has no padding row"},
                {[](const ModelConfig& c) {
                   return c.attention_dropout == c.dropout && embedding_dropout(c) == c.dropout;
                 },
                 "it has one dropout"},
                {[](const ModelConfig& c) { return !c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                 "it has no biases"}},
      .attributes = {},
      .body = "t5",
      .encoder_decoder = true,
      .head_by_weights = true,
      .samples = ModelSpec::Samples::corrupted_spans,
  };
}

}  // namespace

/// Version 1.0: ReLU, a head tied to the embedding and scaled. Version 1.1: a gate, a head of its own.
ModelSpec t5() {
  return t5_shape("t5", "T5ForConditionalGeneration", {512, 64, 2048, 6, 8, 32128}, MlpActivation::relu);
}

/// The same as version 1.1, of many languages; its head is never scaled.
ModelSpec mt5() {
  ModelSpec row =
      t5_shape("mt5", "MT5ForConditionalGeneration", {512, 64, 1024, 8, 6, 250112}, MlpActivation::geglu);
  row.model.scaled_head = false;
  row.needs.push_back({[](const ModelConfig& c) { return !*c.scaled_head; }, "its head is not scaled"});
  return row;
}

/// Megatron-LM's: another model, with learned positions, LayerNorm, biases and scaled scores, which
/// Transformers has no type for. Tensors go by Megatron-LM's names.
ModelSpec megatron_t5() {
  HfNames names{.prefix = "",
                .layers = "decoder.layers.",
                .embedding = "embedding.word_embeddings",
                .positions = "embedding.position_embeddings",
                .layer = {},
                .final_norm = "decoder.final_layernorm",
                .end = {{"output_layer.bias", {{"output_layer.bias"}}, nullptr, &ModelConfig::vocab_size}},
                .encoder_layers = "encoder.layers.",
                .encoder_end = {{"encoder.final_layernorm", {{"encoder.final_layernorm"}}}}};
  for (const char* each :
       {"input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj",
        "pre_cross_attn_layernorm", "cross_attention.linear_q", "cross_attention.linear_kv",
        "cross_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"}) {
    names.layer.push_back({each, {{each}}});
    if (std::string_view(each).find("cross_att") == std::string_view::npos)
      names.encoder_layer.push_back({each, {{each}}});
  }
  return {.name = "megatron_t5",
          .family = {"megatron_t5"},
          .model = {.position_embedding = PositionKind::learned,
                    .norm = NormStyle::layernorm,
                    .activation = MlpActivation::gelu_tanh,
                    .tied_head = true,
                    .linear_bias = true,
                    .qkv_bias = true,
                    .parallel_residual = false},
          .ffn_width = [](std::int64_t width) { return 4 * width; },
          .architectures = {},
          .keys = {},
          .activations = {},
          .names = std::move(names),
          .attributes = {},
          .megatron_tokenizer = "BertWordPieceLowerCase",
          .body = "megatron_t5",
          .encoder_decoder = true,
          .samples = ModelSpec::Samples::corrupted_spans};
}

}  // namespace tessera::rows
