#include "checkpoint/hf_names.hpp"

#include <initializer_list>

namespace tessera {
namespace checkpoint_detail {
namespace {

constexpr const char* kPositions = "embedding.position_embeddings.weight";

bool is_gated(const HfModelConfig& config) { return config.activation == "swiglu"; }

/// Collects mappings; every method adds one parameter.
class Mapper {
 public:
  explicit Mapper(std::vector<HfMapping>& out) : out_(out) {}

  void tensor(const std::string& ours, const std::string& theirs, const Shape& shape) {
    out_.push_back({ours, shape, {{theirs, shape, false}}});
  }
  void norm(const std::string& ours, const std::string& theirs, const HfModelConfig& config) {
    tensor(ours + ".weight", theirs + ".weight", {config.hidden_size});
    if (config.norm == "layernorm") tensor(ours + ".bias", theirs + ".bias", {config.hidden_size});
  }
  /// A weight [out, in] that GPT-2 stores as [in, out].
  void conv1d(const std::string& ours, const std::string& theirs, std::int64_t out, std::int64_t in,
              bool bias) {
    out_.push_back({ours + ".weight", {out, in}, {{theirs + ".weight", {in, out}, true}}});
    if (bias) out_.push_back({ours + ".bias", {out}, {{theirs + ".bias", {out}, false}}});
  }
  struct Rows {
    std::string name;
    std::int64_t count;
  };
  /// A linear whose rows are those of several Hugging Face linears.
  void linear(const std::string& ours, std::initializer_list<Rows> theirs, std::int64_t in, bool bias) {
    HfMapping weight{ours + ".weight", {0, in}, {}}, vector{ours + ".bias", {0}, {}};
    for (const Rows& rows : theirs) {
      weight.shape[0] += rows.count;
      vector.shape[0] += rows.count;
      weight.parts.push_back({rows.name + ".weight", {rows.count, in}, false});
      vector.parts.push_back({rows.name + ".bias", {rows.count}, false});
    }
    out_.push_back(std::move(weight));
    if (bias) out_.push_back(std::move(vector));
  }

 private:
  std::vector<HfMapping>& out_;
};

/// Whether a model's tensors have GPT-2's names.
bool named_as_gpt2(const HfModelConfig& config) {
  return config.model_type == "gpt2" || config.model_type == "gpt_bigcode";
}

/// Both maps hold for what Tessera's own folders may have and the type in Transformers has not: grouped
/// heads, missing biases, other norms, gates and positions.
void map_gpt2(const HfModelConfig& c, const std::string& prefix, std::vector<HfMapping>& out) {
  Mapper map(out);
  const std::int64_t width = c.hidden_size, heads = c.num_heads * c.head_dim,
                     kv = c.num_kv_heads * c.head_dim, fc1 = c.ffn_hidden_size * (is_gated(c) ? 2 : 1);
  const auto linear = [&](const std::string& ours, const std::string& theirs, std::int64_t rows,
                          std::int64_t columns, bool bias) {
    c.model_type == "gpt2" ? map.conv1d(ours, theirs, rows, columns, bias)
                           : map.linear(ours, {{theirs, rows}}, columns, bias);
  };
  map.tensor(kEmbedding, prefix + "wte.weight", {c.vocab_size, width});
  if (c.position_embedding == "learned")
    map.tensor(kPositions, prefix + "wpe.weight", {c.max_positions, width});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = "decoder.layers." + std::to_string(i) + ".";
    const std::string theirs = prefix + "h." + std::to_string(i) + ".";
    map.norm(ours + "input_layernorm", theirs + "ln_1", c);
    linear(ours + "self_attention.linear_qkv", theirs + "attn.c_attn", heads + 2 * kv, width, c.qkv_bias);
    linear(ours + "self_attention.linear_proj", theirs + "attn.c_proj", width, heads, c.proj_bias);
    map.norm(ours + "pre_mlp_layernorm", theirs + "ln_2", c);
    linear(ours + "mlp.linear_fc1", theirs + "mlp.c_fc", fc1, width, c.linear_bias);
    linear(ours + "mlp.linear_fc2", theirs + "mlp.c_proj", width, c.ffn_hidden_size, c.linear_bias);
  }
  map.norm("decoder.final_layernorm", prefix + "ln_f", c);
}

void map_llama(const HfModelConfig& c, const std::string& prefix, std::vector<HfMapping>& out) {
  Mapper map(out);
  const bool starcoder = c.model_type == "starcoder2";
  const std::int64_t width = c.hidden_size, heads = c.num_heads * c.head_dim,
                     kv = c.num_kv_heads * c.head_dim, ffn = c.ffn_hidden_size;
  map.tensor(kEmbedding, prefix + "embed_tokens.weight", {c.vocab_size, width});
  if (c.position_embedding == "learned")
    map.tensor(kPositions, prefix + "embed_positions.weight", {c.max_positions, width});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = "decoder.layers." + std::to_string(i) + ".";
    const std::string theirs = prefix + "layers." + std::to_string(i) + ".";
    const std::string attention = theirs + "self_attn.", mlp = theirs + "mlp.";
    map.norm(ours + "input_layernorm", theirs + "input_layernorm", c);
    map.linear(ours + "self_attention.linear_qkv",
               {{attention + "q_proj", heads}, {attention + "k_proj", kv}, {attention + "v_proj", kv}}, width,
               c.qkv_bias);
    map.linear(ours + "self_attention.linear_proj", {{attention + "o_proj", width}}, heads, c.proj_bias);
    map.norm(ours + "pre_mlp_layernorm", theirs + "post_attention_layernorm", c);
    if (starcoder) {
      map.linear(ours + "mlp.linear_fc1", {{mlp + "c_fc", ffn * (is_gated(c) ? 2 : 1)}}, width,
                 c.linear_bias);
    } else if (is_gated(c)) {
      map.linear(ours + "mlp.linear_fc1", {{mlp + "gate_proj", ffn}, {mlp + "up_proj", ffn}}, width,
                 c.linear_bias);
    } else {
      map.linear(ours + "mlp.linear_fc1", {{mlp + "up_proj", ffn}}, width, c.linear_bias);
    }
    map.linear(ours + "mlp.linear_fc2", {{mlp + (starcoder ? "c_proj" : "down_proj"), width}}, ffn,
               c.linear_bias);
  }
  map.norm("decoder.final_layernorm", prefix + "norm", c);
}

}  // namespace

std::vector<HfMapping> map_names(const HfModelConfig& config, const std::string& prefix) {
  std::vector<HfMapping> out;
  named_as_gpt2(config) ? map_gpt2(config, prefix, out) : map_llama(config, prefix, out);
  if (!config.tied_head)
    Mapper(out).tensor("output_layer.weight", kHfHead, {config.vocab_size, config.hidden_size});
  return out;
}

std::vector<std::string> architectures_of(const std::string& model_type) {
  if (model_type == "gpt2") return {"GPT2LMHeadModel", "GPT2Model"};
  if (model_type == "gpt_bigcode") return {"GPTBigCodeForCausalLM", "GPTBigCodeModel"};
  if (model_type == "llama") return {"LlamaForCausalLM", "LlamaModel"};
  if (model_type == "mistral") return {"MistralForCausalLM", "MistralModel"};
  if (model_type == "qwen2") return {"Qwen2ForCausalLM", "Qwen2Model"};
  if (model_type == "starcoder2") return {"Starcoder2ForCausalLM", "Starcoder2Model"};
  return {};
}

std::string usual_prefix(const HfModelConfig& config) {
  return named_as_gpt2(config) ? "transformer." : "model.";
}

bool is_stored_buffer(const HfModelConfig& config, const std::string& prefix, std::string_view name) {
  if (named_as_gpt2(config))
    return name.starts_with(prefix + "h.") &&
           (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
  return name.starts_with(prefix) && name.ends_with("rotary_emb.inv_freq");
}

}  // namespace checkpoint_detail

std::vector<HfMapping> hf_mappings(const HfModelConfig& config) {
  return checkpoint_detail::map_names(config, checkpoint_detail::usual_prefix(config));
}

std::vector<TensorSpec> parameter_specs(const HfModelConfig& config) {
  std::vector<TensorSpec> specs;
  for (const auto& mapping : checkpoint_detail::map_names(config, ""))
    specs.push_back({mapping.name, DType::f32, mapping.shape});
  return specs;
}

}  // namespace tessera
