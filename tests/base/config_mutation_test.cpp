/// One sound configuration and about a hundred ways to spoil one spot of it; each has to be refused at that
/// spot.

#include <algorithm>
#include <random>

#include "config_test_support.hpp"

namespace tessera {
namespace {

// Lines are counted by the test; columns are given in the table.
const std::string kSound = R"(model:
  family: llama
  num_layers: 2
  hidden_size: 64
  num_heads: 8
  num_kv_heads: 2
  head_dim: 8
  ffn_hidden_size: 96
  vocab_size: 257
  max_positions: 128
  dropout: 0.1
  attention_dropout: 0.0
  position_embedding: rotary
  norm: rmsnorm
  norm_eps: 1e-5
  activation: swiglu
  tied_head: false
  rope_fraction: 0.5
  rope_scaling: {factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_positions: 64}
  init_from: null
parallel:
  tensor: 1
  sequence: false
  pipeline: 1
  virtual_stages: 1
  schedule: 1f1b
  context: 1
  expert: 1
  data: null
  zero_stage: 1
  timeout_s: 600
optimizer:
  name: adamw
  lr: 6.0e-4
  betas: [0.9, 0.95]
  eps: 1.0e-8
  weight_decay: 0.1
  clip_grad: 1
  no_decay: ["*.bias"]
lr_schedule:
  style: cosine
  warmup_steps: 10
  decay_steps: 100
  min_lr: 6.0e-5
  weight_decay_style: constant
training:
  steps: 100
  seq_length: 128
  micro_batch_size: 4
  global_batch_size: 8
  precision: bf16
  recompute: none
  seed: 1234
  eval_interval: 100
data:
  path: data/corpus
  split: "98,1,1"
  tokenizer: bytes
checkpoint:
  every: 20
  keep: 3
  resume: auto
  on_interrupt: false
logging:
  dir: runs/t
  trackers: []
device:
  type: auto
  threads: 0
)";

struct Mutation {
  const char* before;  ///< occurs exactly once in the sound text
  const char* after;
  int column;
  const char* message;  ///< part of the line at that place
};

void PrintTo(const Mutation& mutation, std::ostream* out) {
  *out << mutation.before << " -> " << mutation.after;
}

class Mutated : public ::testing::TestWithParam<Mutation> {};

TEST_P(Mutated, IsRefusedAtItsPlace) {
  const Mutation& m = GetParam();
  std::string text = kSound;
  const auto at = text.find(m.before);
  ASSERT_NE(at, std::string::npos);
  ASSERT_EQ(text.find(m.before, at + 1), std::string::npos) << "ambiguous";
  text.replace(at, std::string(m.before).size(), m.after);
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  const std::string place = "t.yaml:" + std::to_string(line) + ":" + std::to_string(m.column) + ": ";
  const std::string message = refusal(text);
  EXPECT_EQ(message.find(place), 0u) << "expected at " << place << "\ngot " << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << "more than one fault: " << message;
  expect_contains(message, m.message);
}

TEST(Mutated, SoundTextIsAccepted) { EXPECT_EQ(refusal(kSound), ""); }

const Mutation kNames[] = {
    {"model:", "modle:", 1, "unknown section 'modle'; did you mean 'model'?"},
    {"parallel:", "paralell:", 1, "did you mean 'parallel'?"},
    {"optimizer:", "optimiser:", 1, "did you mean 'optimizer'?"},
    {"lr_schedule:", "lr_scheduler:", 1, "did you mean 'lr_schedule'?"},
    {"lr_schedule:", "LR-schedule:", 1, "did you mean 'lr_schedule'?"},
    {"training:", "train:", 1, "did you mean 'training'?"},
    {"checkpoint:", "checkpoints:", 1, "did you mean 'checkpoint'?"},
    {"logging:", "log:", 1, "did you mean 'logging'?"},
    {"device:", "zzz:", 1, "known: model, parallel, optimizer"},
    {"model:\n", "Model:\n", 1, "did you mean 'model'?"},
    {"num_layers", "num_layer", 3, "unknown key 'num_layer' in 'model'; did you mean 'num_layers'?"},
    {"num_layers", "n_layer", 3, "did you mean 'num_layers'?"},
    {"num_layers", "num_hidden_layers", 3, "did you mean 'num_layers'?"},
    {"hidden_size: 64", "hiden_size: 64", 3, "did you mean 'hidden_size'?"},
    {"hidden_size: 64", "d_model: 64", 3, "did you mean 'hidden_size'?"},
    {"num_heads: 8", "num_attention_heads: 8", 3, "did you mean 'num_heads'?"},
    {"num_kv_heads: 2", "num_key_value_heads: 2", 3, "did you mean 'num_kv_heads'?"},
    {"num_kv_heads: 2", "num_kv_head: 2", 3, "did you mean 'num_kv_heads'?"},
    {"  ffn_hidden_size", "  intermediate_size", 3, "did you mean 'ffn_hidden_size'?"},
    {"vocab_size", "vocabsize", 3, "did you mean 'vocab_size'?"},
    {"tied_head", "tie_word_embeddings", 3, "did you mean 'tied_head'?"},
    {"{factor: 8", "{facotr: 8", 18, "unknown key 'facotr' in 'model.rope_scaling'; did you mean 'factor'?"},
    {"tensor: 1", "tensor_model_parallel_size: 1", 3, "did you mean 'tensor'?"},
    {"lr: 6.0e-4", "learning_rate: 6.0e-4", 3, "did you mean 'lr'?"},
    {"betas:", "beta:", 3, "did you mean 'betas'?"},
    {"weight_decay: 0.1", "weigth_decay: 0.1", 3, "did you mean 'weight_decay'?"},
    {"warmup_steps", "warmup_setps", 3, "did you mean 'warmup_steps'?"},
    {"eval_interval", "lr", 3, "unknown key 'lr' in 'training'; did you mean optimizer.lr?"},
    {"seq_length", "sequence_length", 3, "did you mean 'seq_length'?"},
    {"precision", "mixed_precision", 3, "did you mean 'precision'?"},
    {"global_batch_size: 8", "global_batch: 8\n  global_batch_size: 8", 3,
     "did you mean 'global_batch_size'?"},
    {"tokenizer", "tokeniser", 3, "did you mean 'tokenizer'?"},
    {"resume", "resum", 3, "did you mean 'resume'?"},
    {"threads: 0", "? [threads]\n  : 0", 5, "a key must be a word, not a list"},
    {"threads: 0", "[threads]: 0", 3, "a key must be a word, not a list"},
};
INSTANTIATE_TEST_SUITE_P(Names, Mutated, ::testing::ValuesIn(kNames));

const Mutation kValues[] = {
    {"family: llama", "family: lama", 11,
     "must be gpt2, llama, gpt_neox, bert, megatron-bert, qwen3, gemma2, gemma3_text, bloom, "
     "t5, megatron_t5, glm4, olmo2, mpt or falcon, not 'lama'; did you mean 'llama'?"},
    {"family: llama", "family: gtp2", 11, "did you mean 'gpt2'?"},
    {"family: llama", "family: GPT2", 11, "did you mean 'gpt2'?"},
    {"family: llama", "family: null", 3,
     "model.family must be gpt2, llama, gpt_neox, bert, megatron-bert, qwen3, gemma2, gemma3_text, bloom, "
     "t5, megatron_t5, glm4, olmo2, mpt or falcon, not null"},
    {"family: llama", "family: [llama]", 11, "not a list"},
    {"family: llama", "family:", 3, "not null"},
    {"family: llama", "family: brt", 11, "did you mean 'bert'?"},
    {"num_layers: 2", "num_layers: two", 15, "model.num_layers must be an integer, not 'two'"},
    {"num_layers: 2", "num_layers: 2.0", 15, "must be an integer, not '2.0'; write 2"},
    {"num_layers: 2", "num_layers: 2.5", 15, "must be an integer, not '2.5'"},
    {"num_layers: 2", "num_layers: 1e3", 15, "must be an integer, not '1e3'; write 1000"},
    {"num_layers: 2", "num_layers: \"2\"", 15, "leave the quotes out"},
    {"num_layers: 2", "num_layers: 1_000", 15, "write 1000"},
    {"num_layers: 2", "num_layers: 010", 15, "leading zero"},
    {"num_layers: 2", "num_layers: 0x10", 15, "must be an integer"},
    {"num_layers: 2", "num_layers: 99999999999999999999", 15, "does not fit 64 bits"},
    {"num_layers: 2", "num_layers: true", 15, "must be an integer, not 'true'"},
    {"num_layers: 2", "num_layers: {a: 1}", 15, "not a mapping"},
    {"num_layers: 2", "num_layers: 0", 15, "model.num_layers must be at least 1, not 0"},
    {"num_layers: 2", "num_layers: -2", 15, "must be at least 1, not -2"},
    {"hidden_size: 64", "hidden_size: 9223372036854775807", 16, "must be at most 16777216"},
    {"dropout: 0.1", "dropout: 1.0", 12, "model.dropout must be below 1, not 1"},
    {"dropout: 0.1", "dropout: -0.1", 12, "must be at least 0"},
    {"dropout: 0.1", "dropout: .nan", 12, "must be a finite number"},
    {"dropout: 0.1", "dropout: ten", 12, "must be a number, not 'ten'"},
    {"dropout: 0.1", "dropout: 0,1", 12, "must be a number"},
    {"norm: rmsnorm", "norm: rms_norm", 9, "did you mean 'rmsnorm'?"},
    {"position_embedding: rotary", "position_embedding: rope", 23,
     "must be learned, rotary, alibi, none or relative, not 'rope'"},
    {"activation: swiglu", "activation: false", 15,
     "must be gelu_tanh, gelu, relu, swiglu or geglu, not 'false'"},
    {"norm_eps: 1e-5", "norm_eps: 0", 13, "must be above 0"},
    {"tied_head: false", "tied_head: no", 14, "must be true or false, not 'no'; write false"},
    {"tied_head: false", "tied_head: Yes", 14, "write true"},
    {"tied_head: false", "tied_head: 0", 14, "must be true or false, not '0'"},
    {"tied_head: false", "tied_head: False", 14, "write it in small letters"},
    {"tied_head: false", "tied_head: \"false\"", 14, "leave the quotes out"},
    {"init_from: null", "init_from: \"\"", 14, "must not be empty"},
    {"init_from: null", "init_from: true", 14, "must be text"},
    {"tensor: 1", "tensor: 0", 11, "must be at least 1"},
    {"tensor: 1", "tensor: 5000", 11, "must be at most 4096"},
    {"pipeline: 1", "pipeline: 5000", 13, "must be at most 4096"},
    {"virtual_stages: 1", "virtual_stages: 0", 19, "must be at least 1"},
    {"schedule: 1f1b", "schedule: 1fb1", 13, "did you mean '1f1b'?"},
    {"context: 1", "context: 0", 12, "must be at least 1"},
    {"expert: 1", "expert: 0", 11, "must be at least 1"},
    {"expert: 1", "expert: 8", 11, "shares out the experts of a layer, and model.num_experts is null"},
    {"data: null", "data: 0", 9, "must be at least 1"},
    {"zero_stage: 1", "zero_stage: 4", 15, "must be at most 3"},
    {"zero_stage: 1", "zero_reshard: sometimes", 17, "zero_reshard"},
    {"zero_stage: 1", "gradient_dtype: fp64", 19, "gradient_dtype"},
    {"zero_stage: 1", "pipeline_layout: \"\"", 20, "must not be empty"},
    {"timeout_s: 600", "timeout_s: .inf", 14, "must be a finite number, not '.inf'"},
    {"timeout_s: 600", "timeout_s: 0", 14, "must be above 0"},
    {"name: adamw", "name: adamx", 9, "did you mean 'adamw'?"},
    {"lr: 6.0e-4", "lr: 0", 7, "optimizer.lr must be above 0"},
    {"lr: 6.0e-4", "lr: 1e999", 7, "too large or too small"},
    {"betas: [0.9, 0.95]", "betas: 0.9", 10, "must be a list of numbers"},
    {"betas: [0.9, 0.95]", "betas: [0.9]", 10, "must be two numbers, not 1"},
    {"betas: [0.9, 0.95]", "betas: [0.9, 1.0]", 10, "element must be below 1"},
    {"betas: [0.9, 0.95]", "betas: [0.9, x]", 10, "element must be a number"},
    {"no_decay: [\"*.bias\"]", "no_decay: bias", 13, "must be a list of texts"},
    {"style: cosine", "style: inverse_sqrt", 10, "did you mean 'inverse-square-root'?"},
    {"precision: bf16", "precision: fp8", 14, "'fp8' is not in this build yet; use bf16 or fp32"},
    {"precision: bf16", "precision: bfloat16", 14, "must be fp32, bf16 or fp16"},
    {"recompute: none", "loss_scale: 0", 15, "training.loss_scale must be above 0"},
    {"recompute: none", "initial_loss_scale: 1e19", 23, "must be at most 1.0e+18"},
    {"recompute: none", "min_loss_scale: 0", 19, "must be above 0"},
    {"recompute: none", "loss_scale_window: 0", 22, "must be at least 1"},
    {"recompute: none", "hysteresis: 0", 15, "must be at least 1"},
    {"recompute: none", "recompute: ful", 14, "did you mean 'full'?"},
    {"recompute: none", "recompute: automatic", 14, "must be none, selective, full or auto"},
    {"recompute: none", "recompute_method: blocks", 21, "did you mean 'block'?"},
    {"recompute: none", "recompute_layers: 0", 21, "must be at least 1"},
    {"seed: 1234", "seed: -1", 9, "must be at least 0"},
    {"path: data/corpus", "path: []", 9, "not an empty list"},
    {"path: data/corpus", "path: [[0.5, a], b]", 9, "an element is 'b'"},
    {"path: data/corpus", "path: [[-1, a]]", 9, "weight must be above 0"},
    {"path: data/corpus", "path: [[a, 1]]", 9, "weight must be a number"},
    {"split: \"98,1,1\"", "split: \"98,1,1,1\"", 10, "more than three shares"},
    {"split: \"98,1,1\"", "split: 98;1;1", 10, "data.split must be up to three shares"},
    {"split: \"98,1,1\"", "split: \"0,1,1\"", 10, "leaves nothing to training"},
    {"resume: auto", "resume: false", 11, "must be text"},
    {"trackers: []", "trackers: [wandb]", 13, "'wandb' is not in this build yet"},
    {"trackers: []", "trackers: [tensorbord]", 13, "did you mean 'tensorboard'?"},
    {"trackers: []", "trackers: jsonl", 13, "must be a list"},
    {"type: auto", "type: gpu", 9, "must be auto, cpu or cuda"},
    {"threads: 0", "threads: -1", 12, "must be at least 0"},
};
INSTANTIATE_TEST_SUITE_P(Values, Mutated, ::testing::ValuesIn(kValues));

const Mutation kRules[] = {
    {"num_kv_heads: 2", "num_kv_heads: 3", 17,
     "model.num_heads (8) is not a multiple of model.num_kv_heads (3)"},
    {"init_from: null", "reinitialize: true", 17, "about the weights that model.init_from names"},
    {"head_dim: 8\n", "head_dim: 9\n", 13, "even number of features per head, not 4.5"},
    {"high_freq_factor: 4", "high_freq_factor: 0.5", 67, "must be above low_freq_factor (1)"},
    {"global_batch_size: 8", "global_batch_size: 6", 22,
     "is not a multiple of training.micro_batch_size (4)"},
    {"warmup_steps: 10", "warmup_steps: 101", 17, "is more than lr_schedule.decay_steps (100)"},
    {"min_lr: 6.0e-5", "min_lr: 6.0e-3", 11, "is above optimizer.lr"},
    {"style: cosine", "style: wsd", 10, "wsd_decay_steps must be from 1 to 90"},
    {"min_lr: 6.0e-5", "end_weight_decay: 0.2", 21, "weight_decay_style is constant"},
    {"tensor: 1", "tensor: 16", 11,
     "parallel.tensor (16) does not divide model.num_heads (8); use 1, 2, 4 or 8"},
    {"pipeline: 1", "pipeline: 3", 13,
     "model.num_layers (2) is less than the 3 pieces of the pipeline (pipeline 3 x 1 chunks)"},
    {"virtual_stages: 1", "virtual_stages: 2", 19,
     "schedule 1f1b has one model chunk per stage; use schedule interleaved"},
    {"zero_stage: 1", "pipeline_layout: \"2,2\"", 20, "has 2 numbers, but there are 1 pieces"},
    {"zero_stage: 1", "pipeline_layout: \"3\"", 20, "adds up to 3 layers, but model.num_layers is 2"},
    {"recompute: none", "recompute_partition: true", 24, "needs training.recompute full, not none"},
    {"recompute: none", "loss_scale: 1024", 15,
     "training.loss_scale is 1024, but training.precision is bf16: only fp16 scales the loss"},
    {"recompute: none", "min_loss_scale: 4294967297", 19, "is above training.initial_loss_scale"},
};
INSTANTIATE_TEST_SUITE_P(Rules, Mutated, ::testing::ValuesIn(kRules));

const Mutation kYaml[] = {
    {"num_layers: 2", "num_layers: &n 2", 15, "YAML anchors (&name) are refused"},
    {"num_layers: 2", "num_layers: !!int 2", 15, "YAML tags (!name) are refused"},
    {"num_layers: 2", "num_layers: !!python/object:os.system 2", 15, "YAML tags (!name) are refused"},
    {"rope_scaling: {factor", "rope_scaling: !m {factor", 17, "YAML tags (!name) are refused"},
    {"tensor: 1", "<<: {tensor: 1}", 3, "YAML merge keys (<<) are refused"},
    {"threads: 0", "threads: @0", 12, "not valid YAML"},
    {"threads: 0", "threads: 0\x01", 13, "control character number 1"},
    {"threads: 0", "threads: 0\x04", 13, "control character number 4"},
};
INSTANTIATE_TEST_SUITE_P(Yaml, Mutated, ::testing::ValuesIn(kYaml));

// Whatever happens to the bytes: a ConfigError or a configuration that prints and reads back, nothing else.
TEST(Mutated, RandomDamageIsRefusedOrSound) {
  std::mt19937 random(20240607);
  const std::string alphabet = ":-[]{},&*!|>'\"%@`#?\n \t~0.e<=xyz\r\x80\xff";
  int accepted = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string text = kSound;
    const auto edits = 1 + random() % 4;
    for (unsigned edit = 0; edit < edits; ++edit) {
      const std::size_t at = random() % text.size();
      const char c = alphabet[random() % alphabet.size()];
      switch (random() % 4) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, 1, c);
          break;
        case 2:
          text.erase(at, 1 + random() % 5);
          break;
        case 3:
          text.insert(at, text.substr(random() % text.size(), random() % 30));
          break;
      }
    }
    try {
      const Config config = parse_config(text, "t.yaml");
      EXPECT_EQ(parse_config(to_yaml(config), "printed"), config) << text;
      ++accepted;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("t.yaml:", 0), 0u) << error.what();
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_LT(accepted, 500);
}

}  // namespace
}  // namespace tessera
