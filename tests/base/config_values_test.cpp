#include <map>

#include "config_test_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

Config parse(const std::string& text) { return parse_config(text, "t.yaml"); }

TEST(Resolve, Gpt2Defaults) {
  const ModelConfig m = ModelSettings{};
  EXPECT_EQ(m.num_kv_heads, 12);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.ffn_hidden_size, 3072);
  EXPECT_EQ(m.position_embedding, PositionKind::learned);
  EXPECT_EQ(m.norm, NormStyle::layernorm);
  EXPECT_EQ(m.activation, MlpActivation::gelu_tanh);
  EXPECT_EQ(m.tied_head, true);
  EXPECT_EQ(m.linear_bias, true);
  EXPECT_EQ(m.qkv_bias, true);
  EXPECT_EQ(ModelConfig(ModelSettings(m)), m);
}

TEST(Resolve, LlamaDefaults) {
  ModelSettings c;
  c.family = Family::llama;
  const std::pair<std::int64_t, std::int64_t> widths[] = {
      {4096, 11008}, {5120, 13824}, {8192, 22016}, {256, 768}};
  for (const auto& [hidden, ffn] : widths) {
    c.hidden_size = hidden;
    c.num_heads = 32;
    EXPECT_EQ(ModelConfig(c).ffn_hidden_size, ffn) << hidden;
  }
  const ModelConfig m = c;
  EXPECT_EQ(m.position_embedding, PositionKind::rotary);
  EXPECT_EQ(m.norm, NormStyle::rmsnorm);
  EXPECT_EQ(m.activation, MlpActivation::swiglu);
  EXPECT_EQ(m.tied_head, false);
  EXPECT_EQ(m.linear_bias, false);
  EXPECT_EQ(m.qkv_bias, false);
}

TEST(Resolve, KeepsWhatIsGiven) {
  ModelSettings c;
  c.family = Family::llama;
  c.num_kv_heads = 4;
  c.head_dim = 32;
  c.ffn_hidden_size = 100;
  c.position_embedding = PositionKind::alibi;
  c.norm = NormStyle::layernorm;
  c.activation = MlpActivation::relu;
  c.tied_head = true;
  c.linear_bias = true;
  c.qkv_bias = true;
  c.parallel_residual = true;
  c.token_types = 3;
  c.binary_head = false;
  c.num_labels = 5;
  c.problem_type = ProblemType::multi_label_classification;
  c.qk_norm = QkNorm::head;
  c.norm_placement = NormPlacement::sandwich;
  c.shared_norm = true;
  c.norm_zero_centered = true;
  c.norm_bias = false;
  c.embedding_norm = true;
  c.embedding_scaled = true;
  c.attention_softcap = 3.0;
  c.logit_softcap = 4.0;
  c.sliding_window = 7;
  c.window_pattern = "SF";
  c.rope_local_theta = 5.0;
  EXPECT_EQ(c, ModelConfig(c));
}

TEST(Resolve, OtherSections) {
  const Config c = parse("training: {steps: 70}\noptimizer: {weight_decay: 0.2}\nlogging: {dir: runs/a}\n");
  EXPECT_EQ(c.lr_schedule.decay_steps, 70);
  EXPECT_EQ(c.lr_schedule.end_weight_decay, 0.2);
  EXPECT_EQ(c.checkpoint.dir, std::nullopt);  // derived, so that a copied folder keeps to itself
  EXPECT_EQ(c.parallel.data, std::nullopt);
  EXPECT_EQ(Config(Settings(c)), c);
}

TEST(Values, Numbers) {
  const std::pair<const char*, double> accepted[] = {
      {"6.0e-4", 6e-4}, {"1e-4", 1e-4}, {"3", 3.0},     {"+0.5", 0.5}, {".5", 0.5},
      {"5.", 5.0},      {"1E2", 100},   {"1.5e+1", 15}, {"0", 0.0},    {"0.1", 0.1}};
  for (const auto& [text, value] : accepted) {
    EXPECT_EQ(parse(std::string("optimizer: {weight_decay: ") + text + "}\n").optimizer.weight_decay, value)
        << text;
  }
  for (const char* text : {"1e", "e5", ".", "+", "1.2.3", "1e5.", "--1", "0x1p3", "1 2", "inf", "-.inf",
                           ".NaN", "nan", "1e-400", "1e400", "00.5", "'1'"}) {
    EXPECT_NE(refusal(std::string("optimizer: {weight_decay: ") + text + "}\n"), "") << text;
  }
}

TEST(Values, Integers) {
  EXPECT_EQ(parse("training: {seed: +7}\n").training.seed, 7);
  EXPECT_EQ(parse("training: {seed: 9223372036854775807}\n").training.seed, 9223372036854775807LL);
  for (const char* text :
       {"9223372036854775808", "1.0", "1e3", "1_0", "0o7", "0b1", "7L", "", "-", "+-1", "1 1"}) {
    EXPECT_NE(refusal(std::string("training: {seed: ") + text + "}\n"), "") << text;
  }
}

TEST(Values, NoFormOfBooleanButTrueAndFalse) {
  EXPECT_TRUE(parse("parallel: {sequence: true}\n").parallel.sequence);
  for (const char* text : {"y", "Y", "yes", "Yes", "on", "ON", "n", "no", "No", "off", "Off", "True", "TRUE",
                           "False", "0", "1", "t", "null", "[true]"}) {
    expect_contains(refusal(std::string("parallel: {sequence: ") + text + "}\n"), "must be true or false");
  }
}

TEST(Values, Texts) {
  EXPECT_EQ(parse("logging: {dir: 123}\n").logging.dir, "123");
  EXPECT_EQ(parse("logging: {dir: 'a b: c # d'}\n").logging.dir, "a b: c # d");
  EXPECT_EQ(parse("logging: {dir: 'null'}\n").logging.dir, "null");
  EXPECT_EQ(parse("checkpoint: {resume: none}\n").checkpoint.resume, "none");
  EXPECT_EQ(parse("logging: {trackers: [jsonl]}\n").logging.trackers, std::vector<std::string>{"jsonl"});
  EXPECT_EQ(parse("data: {path: null}\n").data.path.size(), 0u);
}

TEST(Rules, LateRules) {
  EXPECT_EQ(refusal("model: {hidden_size: 100, num_heads: 7, head_dim: 16}\n"), "");
  EXPECT_EQ(refusal("model: {position_embedding: alibi, max_positions: 8}\n"), "");
  expect_contains(refusal("model: {family: llama, hidden_size: 21, num_heads: 7}\n"),
                  "even number of features");
  EXPECT_EQ(refusal("model: {family: llama, max_positions: 8}\n"), "");
  expect_contains(refusal("model: {family: gpt2, max_positions: 8}\n"),
                  "training.seq_length (1024) is more than");
  EXPECT_EQ(refusal("model: {family: llama, sliding_window: 8, window_pattern: SSF}\n"), "");
  expect_contains(refusal("model: {family: llama, sliding_window: 8, window_pattern: SsF}\n"),
                  "model.window_pattern is 'SsF'; it is an S (sliding) or F (full) for each layer");
  expect_contains(refusal("model: {family: llama, window_pattern: SF}\n"), "that is null; give both");
  expect_contains(refusal("model: {position_embedding: alibi, attention_softcap: 5}\n"),
                  "model.attention_softcap is not computed with ALiBi positions");
  expect_contains(refusal("model: {parallel_residual: true, norm_placement: sandwich}\n"),
                  "needs model.norm_placement pre, not sandwich");
  expect_contains(refusal("model: {shared_norm: true}\n"), "model.shared_norm needs model.parallel_residual");
  expect_contains(refusal("model: {family: llama, norm_bias: true}\n"), "RMSNorm has no bias");
  expect_contains(refusal("model: {family: bert, qk_norm: head}\n"),
                  "model.qk_norm is a setting of decoders, not of model.family bert");
  expect_contains(
      refusal(
          "model: {family: llama, rope_scaling: {type: longrope, short_factor: [1.0], long_factor: []}}\n"),
      "must have 32 numbers each, one for each pair of rotated features, not 1 and 0");
  expect_contains(refusal("model: {family: llama, rope_scaling: {type: linear, attention_factor: 2}}\n"),
                  "is of types yarn and longrope, not of linear");
  expect_contains(refusal("model: {family: llama, rope_scaling: {type: yarn, beta_fast: 1}}\n"),
                  "beta_fast (1) must be above beta_slow (1)");
  expect_contains(refusal("model: {family: llama, rope_scaling: {type: ntk}}\n"),
                  "must be llama3, linear, dynamic, yarn or longrope, not 'ntk'");
  expect_contains(refusal("model: {padding_id: 50257}\n"), "is not below model.vocab_size (50257)");
  EXPECT_EQ(refusal("logging: {profile: [1, 1001]}\n"), "");
  expect_contains(refusal("logging: {profile: [1, 1002]}\n"),
                  "logging.profile ends with step 1001, but training.steps is 1000");
  expect_contains(refusal("logging: {profile: [3, 3]}\n"), "holds no step");
  expect_contains(refusal("logging: {profile: [3]}\n"), "must be two steps, [START, STOP], not 1");
  expect_contains(refusal("logging: {profile: [0, 3]}\n"), "element must be at least 1, not 0");
  expect_contains(refusal("logging: {profile: [1.5, 3]}\n"), "element must be an integer");
  expect_contains(refusal("logging: {profile: 3}\n"), "must be a list of integers");
  expect_contains(refusal("lr_schedule: {warmup_steps: 1001}\n"),
                  "training.steps, as decay_steps is 0, (1000)");
  EXPECT_EQ(refusal("lr_schedule: {warmup_steps: 1000}\n"), "");
  EXPECT_EQ(refusal("lr_schedule: {style: wsd, wsd_decay_steps: 1000}\n"), "");
  expect_contains(refusal("lr_schedule: {style: wsd, warmup_steps: 1, wsd_decay_steps: 1000}\n"),
                  "from 1 to 999");
}

TEST(Rules, OffloadNeedsWhatItTakesAway) {
  expect_contains(refusal("offload: {gradients: nvme}\n"),
                  "offload.gradients: nvme is for offload.optimizer");
  expect_contains(refusal("offload: {gradients: cpu}\n"), "from parallel.zero_stage 2 on, not with 1");
  EXPECT_EQ(refusal("offload: {gradients: cpu}\nparallel: {zero_stage: 2}\n"), "");
  expect_contains(refusal("offload: {parameters: cpu}\nparallel: {zero_stage: 2}\n"),
                  "as parallel.zero_stage 3 does, which is 2 here");
  EXPECT_EQ(refusal("offload: {parameters: cpu}\nparallel: {zero_stage: 3}\n"), "");
  expect_contains(
      refusal("offload: {parameters: cpu}\nparallel: {zero_stage: 3}\ntraining: {precision: bf16}\n"
              "optimizer: {split_main_weights: true}\n"),
      "give one of the two");
  expect_contains(refusal("offload: {activations: cpu}\n"), "needs training.recompute full, which is none");
  EXPECT_EQ(refusal("offload: {activations: cpu}\ntraining: {recompute: full}\n"), "");
  expect_contains(refusal("offload: {optimizer: cpu, ratio: 0}\n"), "offload.ratio must be above 0");
  expect_contains(refusal("offload: {optimizer: cpu, ratio: 1.5}\n"), "offload.ratio must be");
  expect_contains(refusal("offload: {ratio: 0.5}\n"), "none of them is offloaded");
}

TEST(Rules, NothingOverflows) {
  expect_contains(refusal("model: {num_layers: 100000, hidden_size: 16777216, num_heads: 8}\n"),
                  "parameters is beyond any machine");
  expect_contains(
      refusal(
          "model: {max_positions: 2147483647}\n"
          "training: {seq_length: 2147483647, micro_batch_size: 10000000, global_batch_size: 10000000}\n"),
      "activations is beyond any machine");
  expect_contains(refusal("training: {steps: 1000000000000, global_batch_size: 2147483644}\n"),
                  "cannot be counted");
}

TEST(Rules, ValidateStructsWithoutAFile) {
  Settings config;
  EXPECT_NO_THROW(validate(config));
  config.model.num_heads = 0;
  config.optimizer.lr = std::numeric_limits<double>::quiet_NaN();
  config.training.micro_batch_size = 5;
  try {
    validate(config);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "model.num_heads must be at least 1, not 0\n"
                 "optimizer.lr must be a finite number, not nan\n"
                 "training.global_batch_size (32) is not a multiple of training.micro_batch_size (5)");
  }
  ModelSettings model;
  EXPECT_NO_THROW(validate(model));
  model.num_kv_heads = 5;
  EXPECT_THROW(validate(model), ConfigError);
  EXPECT_NO_THROW(validate(Config(Settings{})));
}

TEST(Split, SharesSumToOne) {
  const std::array<double, 3> expected{0.98, 0.01, 0.01};
  const auto shares = split_shares("98,1,1");
  for (int i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(shares[i], expected[i]);
  EXPECT_EQ(split_shares("7"), (std::array<double, 3>{1.0, 0.0, 0.0}));
  EXPECT_EQ(split_shares(" 0.75 , 0.25"), (std::array<double, 3>{0.75, 0.25, 0.0}));
  for (const char* text : {"", ",", "1,", "1,2,3,4", "1,-1,0", "a,b", "nan", "inf,1,1", "0,0,0",
                           "1e308,1e308,1e308", "1 2", "0x1"}) {
    EXPECT_THROW(split_shares(text), ConfigError) << text;
  }
}

/// Every member away from its default, so that none can be lost on the way.
Config unusual() {
  return parse(R"(
model: {family: llama, num_layers: 3, hidden_size: 60, num_heads: 6, num_kv_heads: 3, head_dim: 12, ffn_hidden_size: 9,
  vocab_size: 211, max_positions: 99, sliding_window: 88, dropout: 0.1, attention_dropout: 0.3, embedding_dropout: 0.2, position_embedding: learned, norm: layernorm,
  window_pattern: SSF, qk_norm: head, shared_norm: true, norm_zero_centered: true, norm_bias: true, embedding_norm: true,
  embedding_scaled: true, attention_scale: 0.3, attention_softcap: 11, logit_softcap: 12, rope_local_theta: 777,
  norm_eps: 1.0e-6, activation: relu, tied_head: true, linear_bias: false, proj_bias: true, qkv_bias: true, parallel_residual: true, token_types: 4, binary_head: true, num_labels: 7, problem_type: regression, padding_id: 3, rope_theta: 123456.789,
  rope_fraction: 0.5, rope_interleaved: true, num_experts: 5, router_topk: 3, router_normalized: false, moe_ffn_hidden_size: 18, moe_layers: DE,
  router_aux_loss: 0.01, router_z_loss: 0.001, init_std: 0.0123456789012345678, reinitialize: true, init_from: "a \"quoted\" \\ name\twith\x01 ünïcode",
  rope_scaling: {type: longrope, factor: 8, low_freq_factor: 1.5, high_freq_factor: 4.5, original_max_positions: 77, beta_fast: 33, beta_slow: 2,
    truncate: false, attention_factor: 1.5, short_factor: [1, 2, 3], long_factor: [4, 5, 6]}}
parallel: {tensor: 3, sequence: true, tensor_chunks: 2, pipeline: 2, context: 2, context_method: all_gather, virtual_stages: 2, schedule: interleaved,
  pipeline_layout: "0,1,2,0", data: 3, zero_stage: 3, zero_group: 3, zero_reshard: never, gradient_dtype: bf16, timeout_s: 12.5}
optimizer: {name: sgd, lr: 1e-22, betas: [0.1, 0.3333333333333333], eps: 1e-300, weight_decay: 0, momentum: 0.5, nesterov: true,
  clip_grad: 1e22, no_decay: ["*.a", "b: c", "y"]}
offload: {optimizer: nvme, gradients: cpu, parameters: cpu, activations: cpu, path: "/fast disk", ratio: 0.5, pin_memory: false, tile: 2048,
  buffers: 5}
lr_schedule: {style: wsd, warmup_steps: 3, decay_steps: 44, min_lr: 1e-23, init_lr: 1e-24, wsd_style: minus_sqrt,
  wsd_decay_steps: 5, weight_decay_style: linear, end_weight_decay: 0.7}
training: {steps: 44, seq_length: 84, micro_batch_size: 3, global_batch_size: 18, precision: fp16, fp32_residual: false,
  loss_scale: 1024.5, initial_loss_scale: 65536, min_loss_scale: 0.25, loss_scale_window: 500, hysteresis: 3,
  recompute: full, recompute_method: block, recompute_layers: 2,
  seed: 5, eval_interval: 0, eval_iters: 2, max_skipped_steps: 7}
data: {path: [[0.1, a], [1e-5, "on"]], split: "1", tokenizer: "no", cache_dir: "~", reset_position_ids: true,
  reset_attention_mask: true, eod_mask_loss: true, mask_prob: 0.123, short_seq_prob: 1, masking_max_ngram: 4, masking_do_full_word: false,
  masking_use_longer_ngrams: true, masking_use_geometric_distribution: true, cls_id: 5, sep_id: 6, mask_id: 7, pad_id: 8,
  bos_id: 9, eos_id: 10, vocab_extra_ids: 3, sentinel_ids: [90, 80], loader: cached}
checkpoint: {dir: "12", every: 0, keep: 1, resume: "- x", on_interrupt: true, async: true}
logging: {dir: "a#b", every: 3, trackers: [jsonl], peak_tflops: 312.5, profile: [2, 5]}
device: {type: cpu, index: 1, threads: 3, cuda_graph: false, tune_gemm: true, gemm_cache: runs/gemm.txt, require_fast_attention: true, deterministic: false, memory_gb: 7.5}
)");
}

TEST(ToYaml, RoundTripIsExact) {
  const Config config = unusual();
  EXPECT_EQ(parse_config(to_yaml(config), "printed"), config) << to_yaml(config);
  const Config defaults = Settings{};
  EXPECT_EQ(parse_config(to_yaml(defaults), "printed"), defaults);
  // An unresolved one is kept open.
  EXPECT_EQ(parse_config(to_yaml(Settings{}), "printed"), defaults);
}

TEST(ToYaml, BiasesOfLinearsComeBack) {
  for (const char* value : {"true", "false"}) {
    const Config config =
        parse(tessera::detail::concat("model: {family: llama, linear_bias: ", value, "}\n"));
    EXPECT_EQ(parse(to_yaml(config)), config);
    EXPECT_EQ(config.model.linear_bias, value == std::string("true"));
  }
}

TEST(ExpertKeys, WhatDoesNotFitIsRefused) {
  const auto refused = [](const std::string& keys, const std::string& words) {
    expect_contains(refusal("model: {family: llama, " + keys + "}\n"), words);
  };
  EXPECT_EQ(refusal("model: {family: llama, num_experts: 4, router_topk: 4, moe_layers: DE}\n"), "");
  refused("num_experts: 4, router_topk: 5", "model.router_topk (5) is more than model.num_experts (4)");
  refused("moe_layers: DE", "model.moe_layers is about experts, and model.num_experts is null");
  refused("router_aux_loss: 0.1", "model.router_aux_loss is about experts");
  refused("num_experts: 4, moe_layers: EF", "model.moe_layers is 'EF'");
  refused("num_experts: 4, num_layers: 2, moe_layers: DDE", "no layer has experts");
  refused("num_experts: 4, linear_bias: true", "experts have no biases");
  expect_contains(refusal("model: {family: llama, num_experts: 4}\ndevice: {cuda_graph: true}\n"),
                  "device.cuda_graph: the host reads how many tokens each expert gets");
  expect_contains(refusal("model: {family: gpt2, num_experts: 4}\n"), "experts have no biases");
  expect_contains(refusal("model: {family: t5, num_experts: 4, linear_bias: false}\n"),
                  "model.num_experts is a setting of decoders");
  expect_contains(
      refusal("model: {family: llama, num_experts: 4, moe_ffn_hidden_size: 9}\nparallel: {tensor: 2}\n"),
      "does not divide model.moe_ffn_hidden_size (9); the next that fits is 10");
}

TEST(ToYaml, EveryKeyDiffersInTheRoundTripTest) {
  Settings llama;
  llama.model.family = Family::llama;
  const auto defaults = list_items(Config(llama));
  const auto items = list_items(unusual());
  ASSERT_EQ(items.size(), defaults.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    // Of these only one value exists in this build (the family is not the default one in both lists);
    // norm_placement excludes parallel_residual, recompute_partition parallel.sequence, expert ranks
    // parallel.zero_group; split_main_weights is
    // for bf16, a loss scale for fp16; experts exclude linear_bias; those of an encoder are for t5; data are
    // named in one way.
    const std::string& key = items[i].key;
    const bool single = key == "model.family" || key == "parallel.expert" || key == "model.linear_bias" ||
                        key == "training.recompute_partition" || key == "model.norm_placement" ||
                        key == "optimizer.split_main_weights" || key == "model.encoder_layers" ||
                        key == "training.decoder_seq_length" || key == "model.scaled_head" ||
                        key == "parallel.pipeline_split_rank" || key.starts_with("model.relative_") ||
                        (key.starts_with("data.") && key.ends_with("_path"));
    EXPECT_EQ(items[i].value == defaults[i].value, single) << key << " = " << items[i].value;
  }
}

TEST(ListValues, WordsAreTextsAndNullIsEmpty) {
  const Config config = unusual();
  const auto values = list_values(config);
  const auto items = list_items(config);
  ASSERT_EQ(values.size(), items.size());
  std::map<std::string, ConfigValue> by_key;
  for (std::size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(values[i].first, items[i].key);
    EXPECT_EQ(std::holds_alternative<std::monostate>(values[i].second), items[i].value == "null")
        << items[i].key;
    by_key.insert(values[i]);
  }
  EXPECT_EQ(by_key["model.num_layers"], ConfigValue(config.model.num_layers));
  EXPECT_EQ(by_key["model.family"], ConfigValue(std::string(name_of(config.model.family))));
  EXPECT_EQ(by_key["model.rope_scaling.factor"], ConfigValue(config.model.rope_scaling.factor));
  EXPECT_EQ(by_key["training.recompute"], ConfigValue(std::string("full")));
  EXPECT_EQ(by_key["data.reset_position_ids"], ConfigValue(true));
  EXPECT_EQ(by_key["data.sentinel_ids"], ConfigValue(config.data.sentinel_ids));
  EXPECT_EQ(by_key["logging.trackers"], ConfigValue(config.logging.trackers));
}

TEST(ToYaml, DataAreNamedInOneOfSeveralWays) {
  for (const char* data : {"train_path: a, valid_path: [[0.5, b], [2, c]], test_path: [d, \"e f\"]",
                           "args_path: list.txt", "per_split_args_path: \"lists.json\"", "path: [a, b]"}) {
    const Config config = parse("data: {" + std::string(data) + "}");
    EXPECT_EQ(parse_config(to_yaml(config), "printed"), config) << to_yaml(config);
    EXPECT_TRUE(config.data.names_data());
  }
  const Config sized = parse("data: {path: [a, b]}");
  EXPECT_EQ(sized.data.path.front(), (std::pair{kWeightBySize, std::string("a")}));
  for (const auto& [data, says] :
       {std::pair{"path: a, train_path: b", "give one of them"},
        std::pair{"valid_path: b", "data.train_path"}, std::pair{"path: [[-1, a], [2, b]]", "above 0"},
        std::pair{"path: [a, [1, b]]", "list of prefixes"}})
    expect_contains(test::message_of<ConfigError>([&] { parse("data: {" + std::string(data) + "}"); }), says);
}

// YAML 1.1 readers, Python's among them, take 1e-05 for a text: a number needs a point and a signed exponent.
TEST(ToYaml, NumbersSuitOtherReaders) {
  Settings config;
  config.optimizer.lr = 1e-5;
  config.optimizer.clip_grad = 1e30;
  const std::string yaml = to_yaml(config);
  expect_contains(yaml, "  lr: 1.0e-05\n");
  expect_contains(yaml, "  clip_grad: 1.0e+30\n");
  expect_contains(yaml, "  timeout_s: 600.0\n");
  expect_contains(yaml, "  schedule: 1f1b\n");
}

TEST(Names, SpelledAsInYaml) {
  EXPECT_EQ(name_of(Family::gpt2), "gpt2");
  EXPECT_EQ(name_of(PositionKind::none), "none");
  EXPECT_EQ(name_of(NormStyle::rmsnorm), "rmsnorm");
  EXPECT_EQ(name_of(MlpActivation::gelu_tanh), "gelu_tanh");
  EXPECT_EQ(name_of(Precision::bf16), "bf16");
  EXPECT_EQ(name_of(Precision::fp16), "fp16");
  EXPECT_EQ(name_of(Recompute::none), "none");
  EXPECT_EQ(name_of(Recompute::automatic), "auto");
  EXPECT_EQ(name_of(PipelineSchedule::one_f_one_b), "1f1b");
  EXPECT_EQ(name_of(OptimizerName::sgd), "sgd");
  EXPECT_EQ(name_of(LrStyle::inverse_sqrt), "inverse-square-root");
  EXPECT_EQ(name_of(WsdStyle::minus_sqrt), "minus_sqrt");
  EXPECT_EQ(name_of(WeightDecayStyle::cosine), "cosine");
  EXPECT_EQ(name_of(DeviceChoice::automatic), "auto");
}

}  // namespace
}  // namespace tessera
