#include "checkpoint/megatron_args.hpp"

#include <array>

#include "checkpoint/megatron_training.hpp"
#include "checkpoint/megatron_values.hpp"
#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {
namespace {

/// Models that Tessera has not are refused, not read as another one.
void refuse_others(const MegatronValues& args) {
  for (const char* name :
       {"num_experts", "window_size", "mtp_num_layers", "rotary_seq_len_interpolation_factor"}) {
    if (args.holds(name)) args.refuse(name, "is set; such models are not read");
  }
  for (const char* name : {"apply_layernorm_1p", "qk_layernorm", "squared_relu", "multi_latent_attention",
                           "use_rope_scaling", "apply_residual_connection_post_layernorm"}) {
    if (args.flag(name).value_or(false)) args.refuse(name, "is true; such models are not read");
  }
}

MlpActivation activation(const MegatronValues& args) {
  if (args.flag("swiglu").value_or(false)) return MlpActivation::swiglu;
  if (!args.holds("openai_gelu") && !args.holds("bias_gelu_fusion"))
    args.refuse("bias_gelu_fusion",
                "and openai_gelu and swiglu are missing: which activation the MLP has is not known");
  // Megatron's fused GELU is the one with tanh, as OpenAI's; without either it is torch's own.
  const bool tanh = args.flag("openai_gelu").value_or(false) || args.flag("bias_gelu_fusion").value_or(false);
  return tanh ? MlpActivation::gelu_tanh : MlpActivation::gelu;
}

void read_positions(const MegatronValues& args, ModelSettings& model) {
  const bool rotary = args.flag("use_rotary_position_embeddings").value_or(false);
  const std::string kind = args.text("position_embedding_type", rotary ? "rope" : "learned_absolute");
  if (kind == "learned_absolute" && !rotary) {
    model.position_embedding = PositionKind::learned;
  } else if (kind == "rope" || rotary) {
    model.position_embedding = PositionKind::rotary;
    model.rope_theta = args.real({"rotary_base"}, 10000.0);
    model.rope_fraction = args.real({"rotary_percent"}, 1.0);
    model.rope_interleaved = args.flag("rotary_interleaved").value_or(false);
  } else if (kind == "none") {
    model.position_embedding = PositionKind::none;
  } else {
    args.refuse("position_embedding_type", "'" + kind + "' is not read; learned_absolute, rope and none are");
  }
}

void read_norm(const MegatronValues& args, ModelSettings& model) {
  const std::string norm = args.text("normalization", "LayerNorm");
  if (norm != "LayerNorm" && norm != "RMSNorm")
    args.refuse("normalization", "'" + norm + "' is not read; LayerNorm and RMSNorm are");
  model.norm = norm == "LayerNorm" ? NormStyle::layernorm : NormStyle::rmsnorm;
  model.norm_eps = args.real({"layernorm_epsilon", "norm_epsilon"}, 1e-5);
}

}  // namespace

MegatronArgs read_megatron_args(const PickleValue& value, const std::filesystem::path& file) {
  const MegatronValues args(value, file);
  refuse_others(args);
  MegatronArgs out;
  out.tensor = args.integer({"tensor_model_parallel_size", "model_parallel_size"}, 1);
  out.pipeline = args.integer({"pipeline_model_parallel_size"}, 1);
  out.virtual_stages = args.integer({"virtual_pipeline_model_parallel_size"}, 1);
  out.fused_gelu = args.flag("bias_gelu_fusion").value_or(false) && !args.flag("openai_gelu").value_or(false);
  out.data = args.integer({"data_parallel_size"}, 1) * args.integer({"context_parallel_size"}, 1);
  out.true_vocab = args.integer({"orig_vocab_size", "vocab_size"}, 0);
  ModelSettings& model = out.model;
  model.num_layers = args.size("num_layers");
  out.encoder_layers = args.integer({"encoder_num_layers", "num_layers"}, 0);
  out.decoder_layers = args.integer({"decoder_num_layers", "encoder_num_layers", "num_layers"}, 0);
  model.hidden_size = args.size("hidden_size");
  model.num_heads = args.size("num_attention_heads");
  model.max_positions = args.size("max_position_embeddings");
  model.head_dim = args.integer({"kv_channels"}, 0);
  model.ffn_hidden_size = args.integer({"ffn_hidden_size"}, 4 * model.hidden_size);
  if (args.flag("group_query_attention").value_or(false)) model.num_kv_heads = args.size("num_query_groups");
  model.activation = activation(args);
  model.dropout = args.real({"hidden_dropout"}, 0.1);
  model.attention_dropout = args.real({"attention_dropout"}, 0.1);
  model.init_std = args.real({"init_method_std"}, 0.02);
  model.linear_bias = args.flag("add_bias_linear").value_or(true);
  model.qkv_bias = *model.linear_bias || args.flag("add_qkv_bias").value_or(false);
  model.tied_head = !args.flag("untie_embeddings_and_output_weights").value_or(false);
  model.parallel_residual = false;
  read_positions(args, model);
  read_norm(args, model);
  model.family = model.norm == NormStyle::rmsnorm ? Family::llama : Family::gpt2;
  return out;
}

namespace {

/// What the checkpoint is one of.
void write_saving_args(TorchPickle& pickle, const MegatronExportOptions& options, const RunSource* run) {
  if (options.format == MegatronExportOptions::Format::torch_dist) {
    pickle.text("ckpt_format").text("torch_dist");
    pickle.text("no_save_rng").boolean(true).text("no_save_optim").boolean(run == nullptr);
  }
  if (!run) return;
  pickle.text("use_distributed_optimizer").boolean(options.distributed_optimizer);
  pickle.text("overlap_grad_reduce").boolean(false);  // all of a buffer is one bucket
}

}  // namespace

void write_megatron_args(TorchPickle& pickle, const ModelConfig& m, std::int64_t padded_vocab, DType dtype,
                         const MegatronExportOptions& options, const RunSource* run) {
  const bool swiglu = m.activation == MlpActivation::swiglu, tanh = m.activation == MlpActivation::gelu_tanh;
  const bool rotary = m.position_embedding == PositionKind::rotary;
  pickle.begin_namespace();
  const auto integer = [&](const char* name, std::int64_t value) { pickle.text(name).integer(value); };
  const auto flag = [&](const char* name, bool value) { pickle.text(name).boolean(value); };
  const auto real = [&](const char* name, double value) { pickle.text(name).real(value); };
  const auto text = [&](const char* name, std::string_view value) { pickle.text(name).text(value); };
  integer("orig_vocab_size", m.vocab_size);
  integer("padded_vocab_size", padded_vocab);
  integer("max_position_embeddings", m.max_positions);
  integer("hidden_size", m.hidden_size);
  integer("num_layers", m.encoder_layers.value_or(m.num_layers));
  if (m.encoder_layers) {
    integer("encoder_num_layers", *m.encoder_layers);
    integer("decoder_num_layers", m.num_layers - *m.encoder_layers);
  }
  integer("num_attention_heads", m.num_heads);
  integer("kv_channels", m.head_dim);
  integer("ffn_hidden_size", m.ffn_hidden_size);
  flag("group_query_attention", m.num_kv_heads != m.num_heads);
  integer("num_query_groups", m.num_kv_heads);
  integer("tensor_model_parallel_size", options.tensor);
  integer("pipeline_model_parallel_size", options.pipeline);
  if (options.virtual_stages > 1) integer("virtual_pipeline_model_parallel_size", options.virtual_stages);
  integer("data_parallel_size", options.data);
  integer("make_vocab_size_divisible_by", options.vocab_divisible_by);
  integer("rank", 0);
  text("tokenizer_type", spec_of(m.family).megatron_tokenizer);
  if (m.binary_head) flag("bert_binary_head", *m.binary_head);
  pickle.text("params_dtype").dtype(dtype);
  flag("swiglu", swiglu);
  flag("bias_gelu_fusion", false);
  flag("openai_gelu", tanh);
  flag("add_bias_linear", m.linear_bias);
  flag("add_qkv_bias", m.qkv_bias && !m.linear_bias);
  flag("untie_embeddings_and_output_weights", !m.tied_head);
  text("position_embedding_type", rotary                                       ? "rope"
                                  : m.position_embedding == PositionKind::none ? "none"
                                                                               : "learned_absolute");
  flag("use_rotary_position_embeddings", rotary);
  flag("add_position_embedding", m.position_embedding == PositionKind::learned);
  real("rotary_base", m.rope_theta);
  real("rotary_percent", m.rope_fraction);
  flag("rotary_interleaved", m.rope_interleaved);
  text("normalization", m.norm == NormStyle::rmsnorm ? "RMSNorm" : "LayerNorm");
  real("layernorm_epsilon", m.norm_eps);
  real("norm_epsilon", m.norm_eps);
  const ModelConfig& trained = run ? run->config().model : m;  // an architecture says nothing of these
  real("hidden_dropout", trained.dropout);
  real("attention_dropout", trained.attention_dropout);
  real("init_method_std", trained.init_std);
  write_saving_args(pickle, options, run);
  if (run) write_training_args(pickle, run->config(), run->counters());
  pickle.end_namespace();
}

}  // namespace tessera::checkpoint_detail
