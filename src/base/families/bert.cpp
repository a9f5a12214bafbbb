#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

/// What the layers of the two families have in common is their modules of attention and MLP.
std::vector<HfParameter> layer_names(const char* first_norm, const char* theirs_first,
                                     const char* second_norm, const char* theirs_second) {
  return {{first_norm, {{theirs_first}}},
          {"self_attention.linear_qkv",
           {{"attention.self.query", HfTensor::Rows::query},
            {"attention.self.key", HfTensor::Rows::key_value},
            {"attention.self.value", HfTensor::Rows::key_value}}},
          {"self_attention.linear_proj", {{"attention.output.dense"}}},
          {second_norm, {{theirs_second}}},
          {"mlp.linear_fc1", {{"intermediate.dense"}}},
          {"mlp.linear_fc2", {{"output.dense"}}}};
}

HfTensor outside(const char* name) { return {.name = name, .outside = true}; }

// Which of its heads a model has.
bool reads_samples(const ModelConfig& c) { return c.num_labels.has_value(); }
bool reads_tokens(const ModelConfig& c) { return !reads_samples(c); }
bool reads_pairs(const ModelConfig& c) { return c.binary_head.value_or(false); }
bool pools(const ModelConfig& c) { return reads_pairs(c) || reads_samples(c); }

HfNames bert_names() {
  return {.prefix = "bert.",
          .layers = "encoder.layer.",
          .embedding = "embeddings.word_embeddings",
          .positions = "embeddings.position_embeddings",
          .layer = {},
          .final_norm = nullptr,
          .head = "cls.predictions.decoder",
          .buffers = {"embeddings.position_ids"},
          .front = {{"embedding.token_type_embeddings", {{"embeddings.token_type_embeddings"}}}},
          .end = {{"lm_head.dense", {outside("cls.predictions.transform.dense")}, reads_tokens},
                  {"lm_head.layernorm", {outside("cls.predictions.transform.LayerNorm")}, reads_tokens},
                  {"lm_head.bias", {outside("cls.predictions.bias")}, reads_tokens, &ModelConfig::vocab_size},
                  {"pooler.dense", {{"pooler.dense"}}, pools},
                  {"binary_head", {outside("cls.seq_relationship")}, reads_pairs},
                  {"classifier", {outside("classifier")}, reads_samples}}};
}

/// Both: learned positions, segments, attention to both sides, a head for masked tokens and one for pairs of
/// sentences.
ModelSpec bert_shape(const char* name, const Sizes& absent) {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  return {
      .name = name,
      .family = {name},
      .model = {.position_embedding = PositionKind::learned,
                .norm = NormStyle::layernorm,
                .activation = MlpActivation::gelu,
                .tied_head = true,
                .linear_bias = true,
                .qkv_bias = true,
                .parallel_residual = false,
                .token_types = 2,
                .binary_head = true},
      .ffn_width = [](std::int64_t width) { return 4 * width; },
      .architectures = {},
      .keys = {HfKey::size("num_hidden_layers", &M::num_layers, {absent.layers}),
               HfKey::size("hidden_size", &M::hidden_size, {absent.width}),
               HfKey::size("num_attention_heads", &M::num_heads, {absent.heads}),
               HfKey::size("intermediate_size", &M::ffn_hidden_size, {absent.ffn}),
               HfKey::size("vocab_size", &M::vocab_size, {absent.vocabulary}),
               HfKey::size("max_position_embeddings", &M::max_positions, {absent.positions}),
               HfKey::size("type_vocab_size", &M::token_types, {2}),
               HfKey::positive("layer_norm_eps", &M::norm_eps, 1e-12),
               HfKey::probability("hidden_dropout_prob", &M::dropout, 0.1),
               HfKey::probability("attention_probs_dropout_prob", &M::attention_dropout, 0.1),
               HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)},
      .activations =
          [] {
            HfActivations names = plain_activations("hidden_act", "gelu_new");
            names.absent = MlpActivation::gelu;
            return names;
          }(),
      .padding_row = true,
      .absent_padding = 0,
      .heads_by_architecture = true,
      .demands = {{"is_decoder", Only::is_false},
                  {"add_cross_attention", Only::is_false},
                  {"tie_word_embeddings", Only::is_true}},
      .inert = {"classifier_dropout", "position_embedding_type"},
      .names = bert_names(),
      .needs = {{[](const ModelConfig& c) { return c.num_kv_heads == c.num_heads; },
                 "it has as many key and value heads as heads"},
                {[](const ModelConfig& c) { return c.head_dim * c.num_heads == c.hidden_size; },
                 "its heads together are as wide as the model"},
                {[](const ModelConfig& c) { return !c.sliding_window; }, "it has no window"},
                {[](const ModelConfig& c) { return embedding_dropout(c) == c.dropout; },
                 "it has one dropout"},
                {[](const ModelConfig& c) { return c.tied_head; }, "its head is its embedding"},
                {[](const ModelConfig& c) { return c.qkv_bias && c.linear_bias && has_proj_bias(c); },
                 "it has all biases"}},
      .attributes = {},
      .megatron_tokenizer = "BertWordPieceLowerCase",
      .body = name,
      .samples = ModelSpec::Samples::masked_sentences,
  };
}

}  // namespace

/// Norms behind each branch, and one behind the embedding.
ModelSpec bert() {
  ModelSpec row = bert_shape("bert", {12, 768, 12, 0, 3072, 30522, 512});
  row.architectures = {"BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"};
  row.names.front.push_back({"embedding.norm", {{"embeddings.LayerNorm"}}});
  row.names.layer = layer_names("post_attention_layernorm", "attention.output.LayerNorm",
                                "post_mlp_layernorm", "output.LayerNorm");
  return row;
}

/// Norms before each branch, and one behind the last layer.
ModelSpec megatron_bert() {
  ModelSpec row = bert_shape("megatron-bert", {24, 1024, 16, 0, 4096, 29056, 512});
  row.architectures = {"MegatronBertForPreTraining", "MegatronBertForMaskedLM",
                       "MegatronBertForSequenceClassification"};
  row.names.layer = layer_names("input_layernorm", "attention.ln", "pre_mlp_layernorm", "ln");
  row.names.final_norm = "encoder.ln";
  return row;
}

}  // namespace tessera::rows
