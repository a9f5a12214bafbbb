#pragma once
/// Hugging Face folders made of random bytes, and their tensors read back by plain code.

#include <map>
#include <nlohmann/json.hpp>

#include "scratch.hpp"
#include "tessera/checkpoint/sharded.hpp"

namespace tessera::test {

using Json = nlohmann::json;

struct Stored {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
  friend bool operator==(const Stored&, const Stored&) = default;
};
using Tensors = std::map<std::string, Stored>;

class HfFolder {
 public:
  Json config;
  DType dtype = DType::f32;
  std::uint64_t max_shard_bytes = UINT64_MAX;

  void add(const std::string& name, std::vector<std::int64_t> shape) {
    TensorSpec spec{name, dtype, Shape(shape)};
    tensors_[name] = {dtype, shape,
                      random_bytes(spec.bytes(), static_cast<unsigned>(std::hash<std::string>()(name)))};
  }
  Tensors& tensors() { return tensors_; }

  void write(const fs::path& dir) const {
    fs::create_directories(dir);
    std::vector<TensorSpec> specs;
    for (const auto& [name, t] : tensors_) specs.push_back({name, t.dtype, Shape(t.shape)});
    ShardedWriter::Options options;
    options.max_shard_bytes = max_shard_bytes;
    ShardedWriter writer(dir, specs, options);
    for (const auto& [name, t] : tensors_) writer.append(name, t.bytes);
    writer.finish();
    spill(dir / "config.json", config.dump(2));
    spill(dir / "tokenizer.json", "{\"model\": {}}");
  }

  static HfFolder gpt2(const std::string& prefix, bool tied, bool masks) {
    HfFolder out;
    const std::int64_t vocab = 11, width = 6, positions = 5, ffn = 7;
    out.config = {{"model_type", "gpt2"},
                  {"architectures", {"GPT2LMHeadModel"}},
                  {"n_embd", width},
                  {"n_layer", 2},
                  {"n_head", 3},
                  {"n_positions", positions},
                  {"n_inner", ffn},
                  {"vocab_size", vocab},
                  {"activation_function", "gelu_new"},
                  {"tie_word_embeddings", tied},
                  {"anything_else", {1, nullptr}}};
    out.add(prefix + "wte.weight", {vocab, width});
    out.add(prefix + "wpe.weight", {positions, width});
    for (int i = 0; i < 2; ++i) {
      const std::string layer = prefix + "h." + std::to_string(i) + ".";
      for (const char* norm : {"ln_1", "ln_2"})
        for (const char* kind : {".weight", ".bias"}) out.add(layer + norm + kind, {width});
      out.add(layer + "attn.c_attn.weight", {width, 3 * width});
      out.add(layer + "attn.c_attn.bias", {3 * width});
      out.add(layer + "attn.c_proj.weight", {width, width});
      out.add(layer + "attn.c_proj.bias", {width});
      out.add(layer + "mlp.c_fc.weight", {width, ffn});
      out.add(layer + "mlp.c_fc.bias", {ffn});
      out.add(layer + "mlp.c_proj.weight", {ffn, width});
      out.add(layer + "mlp.c_proj.bias", {width});
      if (masks) out.add(layer + "attn.bias", {1, 1, positions, positions});
      if (masks) out.add(layer + "attn.masked_bias", {});
    }
    out.add(prefix + "ln_f.weight", {width});
    out.add(prefix + "ln_f.bias", {width});
    if (!tied) out.add("lm_head.weight", {vocab, width});
    return out;
  }

  static HfFolder llama(bool tied, bool attention_bias, bool mlp_bias, const std::string& prefix = "model.") {
    HfFolder out;
    const std::int64_t vocab = 11, width = 10, heads = 6, kv = 2, dim = 4, ffn = 7;
    out.config = {{"model_type", "llama"},         {"architectures", {"LlamaForCausalLM"}},
                  {"hidden_size", width},          {"intermediate_size", ffn},
                  {"num_hidden_layers", 2},        {"num_attention_heads", heads},
                  {"num_key_value_heads", kv},     {"head_dim", dim},
                  {"max_position_embeddings", 64}, {"vocab_size", vocab},
                  {"rms_norm_eps", 1e-6},          {"hidden_act", "silu"},
                  {"tie_word_embeddings", tied},   {"attention_bias", attention_bias},
                  {"mlp_bias", mlp_bias},          {"rope_scaling", nullptr}};
    out.add(prefix + "embed_tokens.weight", {vocab, width});
    for (int i = 0; i < 2; ++i) {
      const std::string layer = prefix + "layers." + std::to_string(i) + ".";
      const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns, bool bias) {
        out.add(layer + name + ".weight", {rows, columns});
        if (bias) out.add(layer + name + ".bias", {rows});
      };
      out.add(layer + "input_layernorm.weight", {width});
      out.add(layer + "post_attention_layernorm.weight", {width});
      linear("self_attn.q_proj", heads * dim, width, attention_bias);
      linear("self_attn.k_proj", kv * dim, width, attention_bias);
      linear("self_attn.v_proj", kv * dim, width, attention_bias);
      linear("self_attn.o_proj", width, heads * dim, attention_bias);
      linear("mlp.gate_proj", ffn, width, mlp_bias);
      linear("mlp.up_proj", ffn, width, mlp_bias);
      linear("mlp.down_proj", width, ffn, mlp_bias);
    }
    out.add(prefix + "norm.weight", {width});
    if (!tied) out.add("lm_head.weight", {vocab, width});
    return out;
  }

  static HfFolder gpt_neox(const std::string& head) {
    HfFolder out;
    const std::int64_t vocab = 11, width = 12, ffn = 7;
    out.config = {{"model_type", "gpt_neox"}, {"hidden_size", width},     {"intermediate_size", ffn},
                  {"num_hidden_layers", 2},   {"num_attention_heads", 3}, {"vocab_size", vocab},
                  {"rotary_pct", 0.5}};
    out.add("gpt_neox.embed_in.weight", {vocab, width});
    for (int i = 0; i < 2; ++i) {
      const std::string layer = "gpt_neox.layers." + std::to_string(i) + ".";
      const auto module = [&](const std::string& name, std::vector<std::int64_t> shape) {
        out.add(layer + name + ".weight", shape);
        out.add(layer + name + ".bias", {shape[0]});
      };
      module("input_layernorm", {width});
      module("post_attention_layernorm", {width});
      module("attention.query_key_value", {3 * width, width});
      module("attention.dense", {width, width});
      module("mlp.dense_h_to_4h", {ffn, width});
      module("mlp.dense_4h_to_h", {width, ffn});
    }
    out.add("gpt_neox.final_layer_norm.weight", {width});
    out.add("gpt_neox.final_layer_norm.bias", {width});
    out.add(head + ".weight", {vocab, width});
    return out;
  }

  /// With the binary head or without it; of Megatron's shape or BERT's.
  static HfFolder bert(bool megatron, bool pairs) {
    HfFolder out;
    const std::int64_t vocab = 11, width = 12, ffn = 7;
    const std::string model = megatron ? "MegatronBert" : "Bert";
    out.config = {{"model_type", megatron ? "megatron-bert" : "bert"},
                  {"architectures", {model + (pairs ? "ForPreTraining" : "ForMaskedLM")}},
                  {"hidden_size", width},
                  {"intermediate_size", ffn},
                  {"num_hidden_layers", 2},
                  {"num_attention_heads", 3},
                  {"vocab_size", vocab},
                  {"max_position_embeddings", 9}};
    const auto module = [&](const std::string& name, std::vector<std::int64_t> shape) {
      out.add(name + ".weight", shape);
      out.add(name + ".bias", {shape[0]});
    };
    out.add("bert.embeddings.word_embeddings.weight", {vocab, width});
    out.add("bert.embeddings.position_embeddings.weight", {9, width});
    out.add("bert.embeddings.token_type_embeddings.weight", {2, width});
    module(megatron ? "bert.encoder.ln" : "bert.embeddings.LayerNorm", {width});
    for (int i = 0; i < 2; ++i) {
      const std::string layer = "bert.encoder.layer." + std::to_string(i) + ".";
      for (const char* part : {"query", "key", "value"})
        module(layer + "attention.self." + part, {width, width});
      module(layer + "attention.output.dense", {width, width});
      module(layer + "intermediate.dense", {ffn, width});
      module(layer + "output.dense", {width, ffn});
      module(layer + (megatron ? "attention.ln" : "attention.output.LayerNorm"), {width});
      module(layer + (megatron ? "ln" : "output.LayerNorm"), {width});
    }
    module("cls.predictions.transform.dense", {width, width});
    module("cls.predictions.transform.LayerNorm", {width});
    out.add("cls.predictions.bias", {vocab});
    if (pairs) module("bert.pooler.dense", {width, width});
    if (pairs) module("cls.seq_relationship", {2, width});
    return out;
  }

  /// Version 1.0, or with a gate and a head of its own as version 1.1; two layers of an encoder, one of a
  /// decoder.
  static HfFolder t5(bool gated, const std::string& type = "t5") {
    HfFolder out;
    const std::int64_t vocab = 11, width = 12, ffn = 7, heads = 3, inner = heads * 5;
    out.config = {
        {"model_type", type},
        {"architectures", {type == "t5" ? "T5ForConditionalGeneration" : "MT5ForConditionalGeneration"}},
        {"d_model", width},
        {"d_kv", 5},
        {"d_ff", ffn},
        {"num_heads", heads},
        {"num_layers", 2},
        {"num_decoder_layers", 1},
        {"vocab_size", vocab},
        {"is_encoder_decoder", true},
        {"relative_attention_num_buckets", 6},
        {"feed_forward_proj", gated ? "gated-gelu" : "relu"}};
    if (gated) out.config["tie_word_embeddings"] = false;
    const auto attention = [&](const std::string& at) {
      for (const char* part : {"q", "k", "v"}) out.add(at + part + ".weight", {inner, width});
      out.add(at + "o.weight", {width, inner});
    };
    const auto layers = [&](const std::string& stack, int count, bool decodes) {
      for (int i = 0; i < count; ++i) {
        const std::string block = stack + ".block." + std::to_string(i) + ".layer.";
        const std::string mlp = block + (decodes ? "2" : "1");
        attention(block + "0.SelfAttention.");
        if (decodes) attention(block + "1.EncDecAttention.");
        for (const char* wi :
             gated ? std::vector<const char*>{"wi_0", "wi_1"} : std::vector<const char*>{"wi"})
          out.add(mlp + ".DenseReluDense." + wi + ".weight", {ffn, width});
        out.add(mlp + ".DenseReluDense.wo.weight", {width, ffn});
        for (int norm = 0; norm < (decodes ? 3 : 2); ++norm)
          out.add(block + std::to_string(norm) + ".layer_norm.weight", {width});
      }
      out.add(stack + ".block.0.layer.0.SelfAttention.relative_attention_bias.weight", {6, heads});
      out.add(stack + ".final_layer_norm.weight", {width});
    };
    out.add("shared.weight", {vocab, width});
    layers("encoder", 2, false);
    layers("decoder", 1, true);
    if (gated) out.add("lm_head.weight", {vocab, width});
    return out;
  }

 private:
  Tensors tensors_;
};

/// Every tensor of every safetensors file of a folder, found without index or library.
inline Tensors read_folder(const fs::path& dir) {
  const std::map<std::string, DType> dtypes = {
      {"F32", DType::f32}, {"BF16", DType::bf16}, {"F16", DType::f16}};
  Tensors out;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string file = slurp(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), 8);
    const Json header = Json::parse(file.substr(8, length));
    for (const auto& item : header.items()) {
      if (item.key() == "__metadata__") continue;
      const std::size_t begin = item.value()["data_offsets"][0], end = item.value()["data_offsets"][1];
      const auto* data = reinterpret_cast<const std::byte*>(file.data() + 8 + length);
      EXPECT_FALSE(out.contains(item.key())) << item.key();
      out[item.key()] = {dtypes.at(item.value()["dtype"]), item.value()["shape"], {data + begin, data + end}};
    }
  }
  return out;
}

inline std::vector<std::string> files_of(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera::test
