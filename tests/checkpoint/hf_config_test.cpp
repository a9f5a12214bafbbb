#include <cmath>
#include <functional>

#include "hf_folder.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::test {
namespace {

Architecture parse(const Json& config) { return parse_hf_config(config.dump(), "config.json"); }
Json llama() { return HfFolder::llama(false, false, false).config; }
Json gpt2() { return HfFolder::gpt2("", true, false).config; }
Json bigcode() {
  Json config = gpt2();
  config["model_type"] = "gpt_bigcode";
  config.erase("architectures");
  config.erase("activation_function");
  return config;
}
Json starcoder2() {
  return {{"model_type", "starcoder2"},
          {"hidden_size", 24},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 6},
          {"num_key_value_heads", 2},
          {"intermediate_size", 7},
          {"vocab_size", 11}};
}

void refuse(Json config, const char* key, const Json& value, const char* what) {
  config[key] = value;
  expect_error<ConfigError>([&] { parse(config); }, "config.json", what);
}

TEST(HfConfig, Gpt2Fields) {
  Json config = gpt2();
  config.erase("n_inner");
  config["resid_pdrop"] = 0.2;
  config["attn_pdrop"] = 0.0;
  config["embd_pdrop"] = 0.1;
  const Architecture got = parse(config);
  EXPECT_EQ(got.model.ffn_hidden_size, 24);
  EXPECT_EQ(got.model.max_positions, 5);
  EXPECT_EQ(got.model.dropout, 0.2);
  EXPECT_EQ(got.model.attention_dropout, 0.0);
  EXPECT_TRUE(got.model.tied_head && got.model.qkv_bias && got.model.linear_bias && !got.model.proj_bias);
  EXPECT_EQ(got.model.embedding_dropout, 0.1);
  for (const auto& [theirs, ours] :
       std::map<std::string, MlpActivation>{{"gelu_new", MlpActivation::gelu_tanh},
                                            {"gelu_pytorch_tanh", MlpActivation::gelu_tanh},
                                            {"gelu", MlpActivation::gelu},
                                            {"relu", MlpActivation::relu}}) {
    config["activation_function"] = theirs;
    EXPECT_EQ(parse(config).model.activation, ours);
  }
}

TEST(HfConfig, LlamaFieldsAndDefaults) {
  Json config = llama();
  for (const char* key : {"num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias",
                          "tie_word_embeddings", "max_position_embeddings"})
    config.erase(key);
  config["hidden_size"] = 24;
  const Architecture got = parse(config);
  EXPECT_EQ(got.model.num_kv_heads, 6);
  EXPECT_EQ(got.model.head_dim, 4);
  EXPECT_EQ(got.model.norm_eps, 1e-6);
  EXPECT_EQ(got.model.max_positions, 2048);
  EXPECT_EQ(got.model.rope_theta, 10000.0);
  EXPECT_EQ(got.model.rope_scaling, RopeScaling{});
  EXPECT_FALSE(got.model.tied_head || got.model.qkv_bias || got.model.proj_bias || got.model.linear_bias);
}

TEST(HfConfig, BigcodeIsAGpt2WithOneKeyAndValueHead) {
  const Architecture got = parse(bigcode());
  EXPECT_EQ(got.model.num_heads, 3);
  EXPECT_EQ(got.model.num_kv_heads, 1);
  EXPECT_EQ(got.model.activation, MlpActivation::gelu_tanh);
  EXPECT_EQ(got.model.position_embedding, PositionKind::learned);
  // Its linears are stored [out, in].
  EXPECT_EQ(hf_mappings(got)[4].parts[0].name, "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(hf_mappings(got)[4].parts[0].shape, (Shape{10, 6}));
  EXPECT_FALSE(hf_mappings(got)[4].parts[0].transposed);
  refuse(bigcode(), "multi_query", false, "all heads full make a GPT-2");
}

TEST(HfConfig, Starcoder2FieldsAndDefaults) {
  const Architecture got = parse(starcoder2());
  EXPECT_EQ(got.model.position_embedding, PositionKind::rotary);
  EXPECT_EQ(got.model.norm, NormStyle::layernorm);
  EXPECT_EQ(got.model.norm_eps, 1e-5);
  EXPECT_EQ(got.model.activation, MlpActivation::gelu_tanh);
  EXPECT_EQ(got.model.head_dim, 4);
  EXPECT_EQ(got.model.max_positions, 4096);
  EXPECT_EQ(got.model.init_std, 0.018042);
  EXPECT_TRUE(got.model.tied_head && got.model.qkv_bias && got.model.linear_bias && !got.model.proj_bias);
  EXPECT_FALSE(got.model.sliding_window);
  Json config = starcoder2();
  config["use_bias"] = false;
  config["sliding_window"] = 5;
  config["residual_dropout"] = 0.2;
  config["hidden_act"] = "relu";
  EXPECT_FALSE(parse(config).model.qkv_bias || parse(config).model.proj_bias ||
               parse(config).model.linear_bias);
  EXPECT_EQ(parse(config).model.sliding_window, 5);
  EXPECT_EQ(parse(config).model.dropout, 0.2);
  EXPECT_EQ(parse(config).model.embedding_dropout, 0.0);
  EXPECT_EQ(parse(config).model.activation, MlpActivation::relu);
  refuse(starcoder2(), "hidden_act", "silu", "\"silu\" is not supported; gelu_new");
}

/// What Transformers has for a model that is changed in one thing.
std::string type_of(Json json, const std::function<void(ModelConfig&)>& change) {
  Architecture config = parse(json);
  change(config.model);
  return hf_model_type_of(config).value_or("none");
}

TEST(HfConfig, AChangedModelHasTheTypeThatComputesTheSame) {
  using C = ModelConfig;
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.activation = MlpActivation::relu; }), "gpt2");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.num_kv_heads = 1; }), "gpt_bigcode");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.position_embedding = PositionKind::rotary; }), "starcoder2");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.position_embedding = PositionKind::alibi; }), "none");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.norm = NormStyle::rmsnorm; }), "none");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.activation = MlpActivation::swiglu; }), "none");
  EXPECT_EQ(type_of(gpt2(), [](C& c) { c.proj_bias = c.linear_bias = false; }), "none");
  EXPECT_EQ(type_of(starcoder2(), [](C& c) { c.rope_interleaved = true; }), "none");
  EXPECT_EQ(type_of(starcoder2(), [](C& c) { c.qkv_bias = false; }), "none");
  EXPECT_EQ(type_of(llama(), [](C& c) { c.qkv_bias = true; }), "qwen2");
  EXPECT_EQ(type_of(llama(), [](C& c) { c.sliding_window = 8; }), "mistral");
  Architecture alibi = parse(gpt2());
  alibi.model.position_embedding = PositionKind::alibi;
  alibi.type.clear();
  expect_error<ConfigError>([&] { make_hf_config(alibi, "", DType::f32); }, "has no Hugging Face form",
                            "not gpt2 (its positions are learned, not alibi)", "not starcoder2");
  EXPECT_EQ(parse_model_json(to_model_json(alibi), "x"), alibi);
  EXPECT_EQ(parse_architecture(to_model_json(alibi), "x"), alibi);
}

TEST(HfConfig, GptNeoxFieldsAndDefaults) {
  const Json small = {
      {"model_type", "gpt_neox"}, {"hidden_size", 24}, {"num_hidden_layers", 2}, {"num_attention_heads", 3}};
  const Architecture got = parse(small);
  EXPECT_EQ(got.model.rope_fraction, 0.25);
  EXPECT_EQ(got.model.rope_theta, 10000.0);
  EXPECT_EQ(got.model.activation, MlpActivation::gelu);
  EXPECT_TRUE(got.model.parallel_residual && !got.model.tied_head);
  Json config = small;
  config["rotary_pct"] = 0.5;
  config["rotary_emb_base"] = 5e4;
  config["use_parallel_residual"] = false;
  config["attention_bias"] = false;
  EXPECT_EQ(parse(config).model.rope_fraction, 0.5);
  EXPECT_EQ(parse(config).model.rope_theta, 5e4);
  EXPECT_FALSE(parse(config).model.parallel_residual || parse(config).model.qkv_bias ||
               *parse(config).model.proj_bias);
  config["rope_parameters"] = {{"rope_theta", 7.0}, {"partial_rotary_factor", 1.0}, {"rope_type", "default"}};
  EXPECT_EQ(parse(config).model.rope_fraction, 1.0);
  EXPECT_EQ(parse(config).model.rope_theta, 7.0);
  for (const Json& each : {small, config}) {
    EXPECT_EQ(parse_model_json(to_model_json(parse(each)), "x"), parse(each));
    EXPECT_EQ(parse_hf_config(make_hf_config(parse(each), "", DType::f32), "x"), parse(each));
  }
  Architecture llama_like = parse(llama());
  llama_like.model.parallel_residual = true;
  EXPECT_EQ(hf_misfit(llama_like.model, "llama"), "its attention and MLP follow one another");
}

/// A type's switches that Transformers may grow: what no row knows is not skipped.
TEST(HfConfig, UnknownSettingsThatMayCountAreRefused) {
  for (const auto& base : {gpt2(), llama(), bigcode(), starcoder2()}) {
    refuse(base, "attention_scaling_factor", 2.0,
           "$.attention_scaling_factor: is a setting that may change the numbers");
    refuse(base, "qk_norm", true, "$.qk_norm");
    refuse(base, "local_window", 128, "$.local_window");
    refuse(base, "linear_bias_terms", "all", "$.linear_bias_terms");
    refuse(base, "rope_type", "yarn", "$.rope_type");
    Json off = base;
    off["qk_norm"] = false;
    off["local_window"] = nullptr;
    off["residual_scale"] = 0;
    off["my_notes"] = "trained on a Tuesday";
    EXPECT_EQ(parse(off), parse(base));
  }
  Json mistral = llama();
  mistral["model_type"] = "mistral";
  mistral.erase("architectures");
  mistral["attention_bias"] = true;  // Transformers' Mistral passes over it
  EXPECT_FALSE(parse(mistral).model.qkv_bias);
}

TEST(HfConfig, RopeInBothSpellings) {
  const RopeScaling llama3{8.0, 1.0, 4.0, 8192}, linear{.factor = 2.0, .type = RopeType::linear};
  Json config = llama();
  config["rope_theta"] = 5e5;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(parse(config).model.rope_scaling, llama3);
  EXPECT_EQ(parse(config).model.rope_theta, 5e5);
  Json dict = config["rope_scaling"];
  dict["rope_theta"] = 5e5;
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = dict;
  EXPECT_EQ(parse(config).model.rope_scaling, llama3);
  EXPECT_EQ(parse(config).model.rope_theta, 5e5);
  config["rope_parameters"] = {{"type", "linear"}, {"factor", 2}};
  EXPECT_EQ(parse(config).model.rope_scaling, linear);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 7.0}};
  EXPECT_EQ(parse(config).model.rope_scaling, RopeScaling{});
  EXPECT_EQ(parse(config).model.rope_theta, 7.0);
  refuse(llama(), "rope_scaling", {{"rope_type", "ntk"}, {"factor", 2}},
         "\"ntk\" is not supported; default, linear, dynamic, llama3, yarn and longrope are");
  refuse(llama(), "rope_scaling", {{"rope_type", "linear"}}, "$.rope_scaling: \"factor\" is missing");
  refuse(llama(), "rope_scaling", {{"rope_type", "linear"}, {"factor", 2}, {"beta_fast", 1}}, "beta_fast");
  refuse(llama(), "rope_parameters", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor");
}

TEST(HfConfig, UnsupportedOptionsAreRefusedByName) {
  refuse(gpt2(), "model_type", "opt",
         "\"opt\" is not supported; gpt2, gpt_bigcode, llama, qwen2, mistral, starcoder2, gpt_neox, bert, "
         "megatron-bert, qwen3, gemma2, gemma3_text, bloom, t5, mt5, phi3, glm, glm4, olmo2, mpt, falcon, "
         "mixtral, qwen3_moe and olmoe are");
  refuse(gpt2(), "architectures", {"GPT2ForSequenceClassification"}, "GPT2LMHeadModel");
  refuse(gpt2(), "activation_function", "quick_gelu", "\"quick_gelu\" is not supported; gelu_new");
  refuse(gpt2(), "scale_attn_by_inverse_layer_idx", true, "$.scale_attn_by_inverse_layer_idx");
  refuse(gpt2(), "scale_attn_weights", false, "$.scale_attn_weights");
  refuse(gpt2(), "add_cross_attention", true, "$.add_cross_attention");
  refuse(gpt2(), "quantization_config", {{"bits", 4}}, "quantized");
  refuse(gpt2(), "n_head", 4, "not a multiple");
  refuse(gpt2(), "n_embd", 0, "$.n_embd: 0 is outside");
  refuse(gpt2(), "n_embd", -6, "$.n_embd");
  refuse(gpt2(), "n_layer", "2", "expected an integer, found string");
  refuse(gpt2(), "n_layer", 1000000000, "$.n_layer");
  refuse(gpt2(), "vocab_size", 18446744073709551615u, "$.vocab_size");
  refuse(gpt2(), "resid_pdrop", 1.0, "$.resid_pdrop");
  refuse(gpt2(), "tie_word_embeddings", "true", "expected true or false");
  refuse(llama(), "hidden_act", "gelu", "\"gelu\" is not supported; silu is");
  refuse(llama(), "num_key_value_heads", 4, "not a multiple");
  refuse(llama(), "head_dim", 5, "even");
  Json config = llama();
  config["model_type"] = "mistral";
  config["architectures"] = {"MistralForCausalLM"};
  config["sliding_window"] = nullptr;
  EXPECT_EQ(parse(config).type, "mistral");
  EXPECT_FALSE(parse(config).model.sliding_window);
  config["sliding_window"] = 100;
  EXPECT_EQ(parse(config).model.sliding_window, 100);
  config.erase("sliding_window");
  EXPECT_EQ(parse(config).model.sliding_window, 4096);
  config = llama();
  config["model_type"] = "qwen2";
  config.erase("architectures");
  config["sliding_window"] = 4096;
  config["use_sliding_window"] = false;
  EXPECT_TRUE(parse(config).model.qkv_bias);
  EXPECT_EQ(parse(config).model.proj_bias, std::nullopt);
  refuse(config, "layer_types", {"full_attention", "sliding_attention"}, "$.layer_types[1]");
  config.erase("vocab_size");
  EXPECT_EQ(parse(config).model.vocab_size, 151936);
  expect_error<ConfigError>([] { parse_hf_config(R"({"model_type":"gpt2","model_type":"llama"})", "f"); },
                            "twice");
}

TEST(HfConfig, WindowsOfLayers) {
  const auto layers = [](const Json& config) {
    const ModelConfig model = parse(config).model;
    std::string text;
    for (std::int64_t i = 0; i < model.num_layers; ++i)
      text += detail::concat(i > 0 ? " " : "", window_of(model, i));
    return text;
  };
  Json config = {{"model_type", "gemma2"}, {"num_hidden_layers", 3}};
  EXPECT_EQ(layers(config), "4096 0 4096");
  config["sliding_window"] = 9;
  config["layer_types"] = {"full_attention", "sliding_attention", "sliding_attention"};
  EXPECT_EQ(layers(config), "0 9 9");
  config["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention"};
  EXPECT_EQ(layers(config), "9 9 9");
  refuse(config, "layer_types", {"sliding_attention"}, "says 1 layers, and there are 3");
  refuse(config, "layer_types", {"chunked_attention", "full_attention", "full_attention"},
         "$.layer_types[0]");
  EXPECT_EQ(layers({{"model_type", "gemma3_text"}, {"num_hidden_layers", 8}}),
            "4096 4096 4096 4096 4096 0 4096 4096");
  config = {
      {"model_type", "qwen3"}, {"num_hidden_layers", 4}, {"max_window_layers", 3}, {"sliding_window", 5}};
  EXPECT_EQ(layers(config), "0 0 0 0");
  config["use_sliding_window"] = true;
  EXPECT_EQ(layers(config), "0 0 0 5");
  EXPECT_EQ(layers({{"model_type", "mistral"}, {"num_hidden_layers", 2}}), "4096 4096");
}

TEST(HfConfig, CapsAndScales) {
  const ModelConfig gemma2 = parse({{"model_type", "gemma2"}}).model;
  EXPECT_EQ(gemma2.attention_softcap, 50.0);
  EXPECT_EQ(gemma2.logit_softcap, 30.0);
  EXPECT_EQ(gemma2.attention_scale, std::nullopt);  // 256 features a head
  EXPECT_EQ(parse({{"model_type", "gemma2"}, {"attn_logit_softcapping", nullptr}}).model.attention_softcap,
            0.0);
  EXPECT_EQ(parse({{"model_type", "gemma2"}, {"query_pre_attn_scalar", 144}}).model.attention_scale,
            1.0 / 12.0);
  const ModelConfig gemma3 = parse({{"model_type", "gemma3_text"}}).model;
  EXPECT_EQ(gemma3.attention_softcap, 0.0);
  EXPECT_EQ(gemma3.rope_theta, 1e6);
  EXPECT_EQ(gemma3.rope_local_theta, 1e4);
  refuse({{"model_type", "gemma2"}}, "attn_logit_softcapping", 0, "must be above 0");
  refuse({{"model_type", "gemma3_text"}}, "use_bidirectional_attention", true, "use_bidirectional_attention");
  refuse({{"model_type", "gemma3_text"}}, "rope_parameters", {{"rope_theta", 1e4}}, "is not a kind of layer");
  refuse({{"model_type", "gemma3_text"}}, "rope_parameters",
         {{"sliding_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}},
         "layers with a window are not supported");
  refuse({{"model_type", "bloom"}}, "apply_residual_connection_post_layernorm", true,
         "apply_residual_connection_post_layernorm");
  refuse(llama(), "rope_scaling",
         {{"rope_type", "longrope"},
          {"factor", 2.0},
          {"short_factor", {1.0}},
          {"long_factor", {1.0, 1.0, 1.0, 1.0}}},
         "has 1 numbers; it must have one for each of the");
}

TEST(HfConfig, EveryConfigSurvivesBothOfItsTexts) {
  std::vector<Json> configs = {gpt2(), llama(), HfFolder::llama(true, true, true).config,
                               HfFolder::llama(true, true, false).config};
  configs.push_back(llama());
  configs.back()["rope_scaling"] = {{"rope_type", "llama3"},
                                    {"factor", 8.0},
                                    {"low_freq_factor", 1.0},
                                    {"high_freq_factor", 4.0},
                                    {"original_max_position_embeddings", 8192}};
  configs.push_back(llama());
  configs.back()["model_type"] = "qwen2";
  configs.back().erase("architectures");
  configs.back().erase("head_dim");
  configs.back()["hidden_size"] = 24;
  configs.push_back(bigcode());
  configs.push_back(starcoder2());
  configs.push_back(starcoder2());
  configs.back()["use_bias"] = false;
  configs.back()["sliding_window"] = 16;
  configs.back()["embedding_dropout"] = 0.25;
  configs.back()["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  for (const char* type : {"mistral", "qwen2"}) {  // with a window, and a padding row
    configs.push_back(llama());
    configs.back()["model_type"] = type;
    configs.back().erase("architectures");
    configs.back().erase("sliding_window");
    configs.back()["use_sliding_window"] = true;
    configs.back()["max_window_layers"] = 0;
    configs.back()["pad_token_id"] = -1;
    configs.back()["initializer_range"] = 0.01;
  }
  for (const Json& scaling :
       {Json{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}},
        Json{{"rope_type", "yarn"},
             {"factor", 4.0},
             {"mscale", 1.0},
             {"mscale_all_dim", 0.5},
             {"truncate", false}},
        Json{{"rope_type", "longrope"},
             {"short_factor", {1.0, 1.5}},
             {"long_factor", {2.0, 3.0}},
             {"original_max_position_embeddings", 16}},
        Json{{"type", "dynamic"}, {"factor", 2.0}}}) {
    configs.push_back(llama());
    configs.back()["rope_scaling"] = scaling;
  }
  for (const char* type : {"qwen3", "gemma2", "gemma3_text"}) {
    configs.push_back({{"model_type", type},
                       {"num_hidden_layers", 5},
                       {"hidden_size", 60},
                       {"num_attention_heads", 6},
                       {"num_key_value_heads", 2},
                       {"head_dim", 14},
                       {"intermediate_size", 131},
                       {"vocab_size", 211}});
    configs.push_back(configs.back());  // with the layers of its own choice
    configs.back()["use_sliding_window"] = true;
    configs.back()["sliding_window"] = 7;
    configs.back()["layer_types"] = {"full_attention", "sliding_attention", "full_attention",
                                     "full_attention", "sliding_attention"};
    configs.back()["attention_bias"] = true;
  }
  configs.push_back({{"model_type", "gemma3_text"},
                     {"sliding_window_pattern", 3},
                     {"query_pre_attn_scalar", 168},
                     {"final_logit_softcapping", 20.0},
                     {"rope_local_base_freq", 500.0},
                     {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}});
  configs.push_back(
      {{"model_type", "bloom"}, {"n_layer", 3}, {"hidden_size", 60}, {"n_head", 5}, {"vocab_size", 211}});
  const Json small = {
      {"num_hidden_layers", 3}, {"hidden_size", 60}, {"num_attention_heads", 6}, {"vocab_size", 211}};
  const auto add = [&](const char* type, const Json& more) {
    configs.push_back(small);
    configs.back()["model_type"] = type;
    configs.back().update(more);
  };
  add("phi3",
      {{"sliding_window", 7}, {"partial_rotary_factor", 0.4}, {"resid_pdrop", 0.1}, {"pad_token_id", 3}});
  add("glm", {{"attention_bias", false}, {"pad_token_id", nullptr}});
  add("glm4", {{"num_key_value_heads", 2}, {"head_dim", 12}, {"pad_token_id", 210}});
  add("olmo2", {{"num_key_value_heads", 2}, {"attention_bias", true}});
  for (const Json& dropout : {Json(0), Json(0.25)})
    configs.push_back(
        {{"model_type", "mpt"},
         {"n_layers", 3},
         {"d_model", 60},
         {"n_heads", 5},
         {"vocab_size", 211},
         {"attn_config", {{"attn_pdrop", dropout}, {"attn_impl", "triton"}, {"clip_qkv", nullptr}}}});
  // Each kind of layers that Falcon's four switches make.
  add("falcon", Json::object());
  add("falcon", {{"multi_query", false}, {"bias", true}});
  add("falcon", {{"parallel_attn", false}});
  add("falcon", {{"new_decoder_architecture", true}, {"num_kv_heads", 2}});
  add("falcon", {{"new_decoder_architecture", true}, {"num_kv_heads", 1}, {"num_ln_in_parallel_attn", 1}});
  for (const Json& json : configs) {
    const Architecture config = parse(json);
    EXPECT_EQ(parse_model_json(to_model_json(config), "x"), config) << json;
    EXPECT_EQ(parse_hf_config(make_hf_config(config, "", DType::f32), "x"), config) << json;
    EXPECT_EQ(parse_hf_config(make_hf_config(config, json.dump(), DType::f32), "x"), config) << json;
  }
}

TEST(ConvertFloats, AllHalvesSurviveAFloatAndRoundingIsToNearestEven) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> all(65536), back(65536);
    std::vector<float> floats(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    convert_floats(dtype, std::as_bytes(std::span(all)), DType::f32,
                   std::as_writable_bytes(std::span(floats)));
    convert_floats(DType::f32, std::as_bytes(std::span(floats)), dtype,
                   std::as_writable_bytes(std::span(back)));
    for (std::size_t i = 0; i < all.size(); ++i)
      if (!std::isnan(floats[i])) {
        ASSERT_EQ(all[i], back[i]);
      }
    if (dtype == DType::f16) {
      EXPECT_EQ(floats[0x4248], 3.140625f);
    }
  }
  const std::vector<std::pair<float, std::uint16_t>> table = {{1.0f + 0x1p-11f, 0x3c00},
                                                              {1.0f + 0x1.8p-10f, 0x3c02},
                                                              {65519.0f, 0x7bff},
                                                              {65520.0f, 0x7c00},
                                                              {1e9f, 0x7c00},
                                                              {-0x1p-25f, 0x8000},
                                                              {0x1.8p-25f, 0x0001},
                                                              {0x1.ff8p-15f, 0x03ff},
                                                              {0x1.ffcp-15f, 0x0400},
                                                              {INFINITY, 0x7c00}};
  for (const auto& [value, bits] : table) {
    std::uint16_t got = 0;
    convert_floats(DType::f32, std::as_bytes(std::span(&value, 1)), DType::f16,
                   std::as_writable_bytes(std::span(&got, 1)));
    EXPECT_EQ(got, bits) << value;
  }
  EXPECT_THROW(convert_floats(DType::i32, {}, DType::f32, {}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
