/// Law 1: any layout trains the same model. Every layout below, ranks as threads, against the serial run.

#include <fstream>
#include <set>

#include "tests/engine/engine_support.hpp"
#include "tests/engine/layout_support.hpp"

namespace tessera::test {
namespace {

enum class Kind {
  gpt2,
  llama4,
  llama6,
  llama12,
  llama2,
  alibi,
  bert,
  megatron_bert,
  bert_classes,
  mistral,
  qwen3,
  gemma2,
  gemma3,
  bloom,
  post_norm,
  gpt_neox,
  gpt_bigcode,
  qwen2,
  olmo2,
  falcon,
  glm4,
  t5,
  t5_v1_1,
  megatron_t5,
  mixtral,
  qwen3_moe
};

struct LayoutCase {
  Kind kind = Kind::gpt2;
  int tp = 1;
  bool sp = false;
  int pp = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int virtual_stages = 1;
  int dp = 1;
  int zero = 1;
  Recompute recompute = Recompute::none;
  std::int64_t micro_batch = 1;
  RecomputeMethod method = RecomputeMethod::uniform;
  std::int64_t recompute_layers = 1;
  const char* pipeline_layout = nullptr;
  bool partition = false;
  std::int64_t chunks = 0;
  ZeroReshard reshard = ZeroReshard::automatic;
  std::int64_t group = 0;
  std::int64_t split_rank = 0;
  int cp = 1;
  ContextMethod context_method = ContextMethod::automatic;
  int ep = 1;

  int ranks() const { return tp * cp * pp * dp; }
};

/// By Kind.
constexpr const char* kNames[] = {"gpt2",         "llama_kv4",   "llama_kv6",     "llama_kv12",   "llama_kv2",
                                  "alibi_untied", "bert",        "megatron_bert", "bert_classes", "mistral",
                                  "qwen3",        "gemma2",      "gemma3",        "bloom",        "post_norm",
                                  "gpt_neox",     "gpt_bigcode", "qwen2",         "olmo2",        "falcon",
                                  "glm4",         "t5",          "t5_v1_1",       "megatron_t5",  "mixtral",
                                  "qwen3_moe"};
static_assert(std::size(kNames) == static_cast<std::size_t>(Kind::qwen3_moe) + 1);
const char* name_of(Kind kind) { return kNames[static_cast<std::size_t>(kind)]; }

std::string describe(const LayoutCase& c) {
  std::string text = tessera::detail::concat(name_of(c.kind), "_tp", c.tp, c.sp ? "sp" : "", "_pp", c.pp);
  if (c.cp > 1) text += tessera::detail::concat("_cp", c.cp);
  if (c.context_method != ContextMethod::automatic) text += tessera::name_of(c.context_method);
  if (c.pp > 1) {
    std::string schedule(tessera::name_of(c.schedule));
    std::erase(schedule, '-');
    text += "_" + schedule;
  }
  if (c.virtual_stages > 1) text += tessera::detail::concat("_v", c.virtual_stages);
  if (c.pipeline_layout) text += "_uneven";
  if (c.ep > 1) text += tessera::detail::concat("_ep", c.ep);
  text += tessera::detail::concat("_dp", c.dp, "_zero", c.zero);
  if (c.reshard != ZeroReshard::automatic) text += tessera::name_of(c.reshard);
  if (c.group > 0) text += tessera::detail::concat("_group", c.group);
  text += tessera::detail::concat("_mbs", c.micro_batch);
  if (c.recompute != Recompute::none) text += "_" + std::string(tessera::name_of(c.recompute));
  if (c.recompute == Recompute::full)
    text += tessera::detail::concat(tessera::name_of(c.method), c.recompute_layers);
  if (c.partition) text += "_partition";
  if (c.split_rank > 0) text += tessera::detail::concat("_split", c.split_rank);
  if (c.chunks > 0) text += tessera::detail::concat("_chunks", c.chunks);
  return text;
}

/// Windows, caps, norms: what later families have.
void set_later(Kind kind, ModelSettings& model) {
  const auto windowed = [&](const char* family, std::int64_t kv, const char* pattern) {
    model.family = {family};
    model.num_kv_heads = kv;
    model.sliding_window = 4;
    if (pattern) model.window_pattern = pattern;
  };
  if (kind == Kind::mistral) windowed("llama", 4, nullptr);
  if (kind == Kind::qwen3) windowed("qwen3", 2, "FFS");
  if (kind == Kind::gemma2) windowed("gemma2", 4, nullptr);
  if (kind == Kind::gemma3) windowed("gemma3_text", 4, "SSF");
  if (kind == Kind::gemma2)
    model.attention_softcap = 1.0, model.logit_softcap = 2.0, model.attention_scale = 0.4;
  if (kind == Kind::bloom) model.family = {"bloom"};
  if (kind == Kind::post_norm) model.norm_placement = NormPlacement::post;
  if (kind == Kind::gpt_neox) model.family = {"gpt_neox"}, model.rope_fraction = 0.5;
  if (kind == Kind::gpt_bigcode) model.family = Family::gpt2, model.num_kv_heads = 1;
  if (kind == Kind::qwen2) model.num_kv_heads = 4, model.qkv_bias = true;
  if (kind == Kind::olmo2) model.family = {"olmo2"}, model.num_kv_heads = 2;
  if (kind == Kind::falcon) model.family = {"falcon"}, model.num_kv_heads = 1;
  if (kind == Kind::glm4)
    model.family = {"glm4"}, model.num_kv_heads = 2, model.rope_fraction = 0.5, model.rope_interleaved = true;
}

/// Experts in each layer, or in every other one, and what balances them.
void set_experts(Kind kind, ModelSettings& model) {
  if (kind != Kind::mixtral && kind != Kind::qwen3_moe) return;
  model.num_experts = 6;
  model.num_kv_heads = 4;
  model.router_aux_loss = 0.2;
  if (kind == Kind::mixtral) {
    model.router_z_loss = 0.05;
    return;
  }
  model.family = {"qwen3"};
  model.router_topk = 3;
  model.router_normalized = false;
  model.moe_ffn_hidden_size = 36;
  model.moe_layers = "DE";
}

/// 12 heads, odd vocabulary, dropout on, 5 layers so that stages are uneven.
Config matrix_config(Kind kind) {
  Settings c;
  c.model = {.family = kind == Kind::gpt2 || kind == Kind::alibi ? Family::gpt2 : Family::llama,
             .num_layers = 5,
             .hidden_size = 48,
             .num_heads = 12,
             .ffn_hidden_size = 60,
             .vocab_size = 211,
             .max_positions = 24,
             .dropout = 0.1,
             .attention_dropout = 0.1,
             .init_std = 0.1};
  c.training.seq_length = 12;
  if (kind == Kind::bert) c.model.family = {"bert"};
  if (kind == Kind::bert_classes) {
    c.model.family = {"bert"};
    c.model.num_labels = 3;
  }
  if (kind == Kind::megatron_bert) c.model.family = {"megatron-bert"};
  set_later(kind, c.model);
  set_experts(kind, c.model);
  if (kind == Kind::t5 || kind == Kind::t5_v1_1) {
    // Two layers of an encoder, three of a decoder; heads together are not as wide as the model.
    c.model.family = {"t5"};
    c.model.head_dim = 5;
    c.model.ffn_hidden_size = 48;
    c.model.relative_buckets = 8;
    c.model.relative_max_distance = 10;
    c.model.init_std = 0.01;
    c.training.seq_length = 18;
    c.training.decoder_seq_length = 12;
  }
  if (kind == Kind::megatron_t5) {
    c.model.family = {"megatron_t5"};
    c.training.seq_length = 18;
    c.training.decoder_seq_length = 12;
  }
  if (kind == Kind::t5_v1_1) {
    c.model.activation = MlpActivation::geglu;
    c.model.tied_head = false;
  }
  if (kind == Kind::llama4) c.model.num_kv_heads = 4;
  if (kind == Kind::llama6) c.model.num_kv_heads = 6;
  if (kind == Kind::llama2) c.model.num_kv_heads = 2;
  if (kind == Kind::alibi) {
    c.model.position_embedding = PositionKind::alibi;
    c.model.tied_head = false;
  }
  c.optimizer.lr = 1e-3;
  c.optimizer.eps = 1e-5;
  c.lr_schedule.style = LrStyle::constant;
  c.training.steps = 5;
  c.training.global_batch_size = 12;
  c.training.micro_batch_size = 2;
  c.training.eval_interval = 0;
  c.device.threads = 1;
  return c;
}

Config config_of(const LayoutCase& c) {
  Config config = matrix_config(c.kind);
  config.parallel.tensor = c.tp;
  config.parallel.sequence = c.sp;
  config.parallel.tensor_chunks = c.chunks;
  config.parallel.context = c.cp;
  config.parallel.context_method = c.context_method;
  config.parallel.expert = c.ep;
  config.parallel.pipeline = c.pp;
  config.parallel.schedule = c.schedule;
  config.parallel.virtual_stages = c.virtual_stages;
  config.parallel.data = c.dp;
  config.parallel.zero_stage = c.zero;
  config.parallel.zero_reshard = c.reshard;
  if (c.group > 0) config.parallel.zero_group = c.group;
  if (c.pipeline_layout) config.parallel.pipeline_layout = c.pipeline_layout;
  if (c.split_rank > 0) config.parallel.pipeline_split_rank = c.split_rank;
  config.training.micro_batch_size = c.micro_batch;
  config.training.recompute = c.recompute;
  config.training.recompute_method = c.method;
  config.training.recompute_layers = c.recompute_layers;
  config.training.recompute_partition = c.partition;
  return config;
}

/// What BERT reads besides; the labels of some pairs do not count.
void add_segments(Batch& batch, std::int64_t types) {
  for (std::size_t i = 0; i < batch.tokens.size(); ++i)
    batch.token_types.push_back(static_cast<std::int32_t>(batch.tokens[i] * 7 % types));
  for (std::int64_t i = 0; i < batch.batch; ++i)
    batch.sample_labels.push_back(i % 5 == 2   ? kIgnoredLabel
                                  : i % 3 == 0 ? 1
                                               : 0);  // uneven: the bias has a gradient
}

/// What an encoder reads: padded on either side, as the decoder's tokens are in some samples.
void add_encoder(Batch& batch, std::int64_t length, unsigned seed) {
  batch.encoder_seq_length = length;
  batch.encoder_tokens = random_batch(batch.batch, length, seed, 211).tokens;
  for (std::int64_t i = 0; i < batch.batch; ++i) {
    batch.encoder_key_begin.push_back(i % 3 == 1 ? 5 : 0);
    batch.encoder_key_end.push_back(static_cast<std::int32_t>(i % 4 == 2 ? length - 7 : length));
    batch.key_begin.push_back(0);
    batch.key_end.push_back(static_cast<std::int32_t>(i % 5 == 3 ? batch.seq_length - 3 : batch.seq_length));
    for (std::int64_t j = batch.key_end.back(); j < batch.seq_length; ++j)
      batch.labels[static_cast<std::size_t>(i * batch.seq_length + j)] = kIgnoredLabel;
  }
}

/// Padding on either side of some samples.
void add_padding(Batch& batch) {
  for (std::int64_t i = 0; i < batch.batch; ++i) {
    const auto length = static_cast<std::int32_t>(batch.seq_length);
    batch.key_begin.push_back(i % 3 == 1 ? 5 : 0);
    batch.key_end.push_back(i % 4 == 2 ? length - 4 : length);
    for (std::int32_t j = 0; j < length; ++j) {
      if (j < batch.key_begin.back() || j >= batch.key_end.back())
        batch.labels[static_cast<std::size_t>(i * batch.seq_length + j)] = kIgnoredLabel;
    }
  }
}

std::vector<Batch> batches_of(const Config& config) {
  std::vector<Batch> batches;
  for (unsigned step = 0; step < 5; ++step) {
    Batch batch =
        random_batch(config.training.global_batch_size, sample_lengths(config).tokens, 100 + step, 211);
    if (config.model.token_types) add_segments(batch, *config.model.token_types);
    if (config.model.num_labels) batch.labels.clear();
    if (const std::int64_t encoded = sample_lengths(config).encoder; encoded > 0)
      add_encoder(batch, encoded, 200 + step);
    if (config.model.router_z_loss > 0) add_padding(batch);
    batches.push_back(std::move(batch));
  }
  return batches;
}

const TrainedRun& serial_run(Kind kind) {
  static std::map<Kind, TrainedRun> runs;
  const auto found = runs.find(kind);
  if (found != runs.end()) return found->second;
  const Config config = matrix_config(kind);
  return runs.emplace(kind, train_serially(config, batches_of(config))).first->second;
}

/// One line per layout, in the folder the test runner asks for: docs/benchmarks of exactness are made of
/// these.
void note_errors(const LayoutCase& c, const LayoutErrors& e) {
  ::testing::Test::RecordProperty("loss_error", tessera::detail::concat(e.loss));
  ::testing::Test::RecordProperty("gradient_error", tessera::detail::concat(e.gradient));
  ::testing::Test::RecordProperty("weight_error", tessera::detail::concat(e.weight));
  ::testing::Test::RecordProperty("ranks", std::to_string(c.ranks()));
}

constexpr auto k1f1b = PipelineSchedule::one_f_one_b;
constexpr auto kGpipe = PipelineSchedule::gpipe;
constexpr auto kInterleaved = PipelineSchedule::interleaved;
constexpr auto kZbH1 = PipelineSchedule::zb_h1;
constexpr auto kZbV = PipelineSchedule::zb_v;
constexpr auto kFull = Recompute::full;
constexpr auto kSelective = Recompute::selective;

/// Data ranks that hold shares of gradients, or of weights too, with every other axis.
void add_shards(int zero, std::vector<LayoutCase>& list) {
  const auto add = [&](LayoutCase c) {
    c.zero = zero;
    list.push_back(c);
  };
  for (const int dp : {2, 3, 4}) add({.dp = dp, .micro_batch = dp == 2 ? 2 : 1});  // 3, 4 and 3 micro-batches
  add({.tp = 2, .sp = true, .dp = 2});
  for (const auto schedule : {k1f1b, kGpipe, kZbH1}) add({.pp = 2, .schedule = schedule, .dp = 2});
  add({.pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .dp = 2});
  add({.pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2});
  add({.tp = 2, .sp = true, .pp = 2, .dp = 2, .recompute = kFull});
  add({.kind = Kind::llama2, .tp = 4, .sp = true, .dp = 2, .recompute = kSelective, .micro_batch = 2});
  add({.kind = Kind::llama4, .dp = 2, .recompute = kFull, .micro_batch = 2, .recompute_layers = 2});
  add({.kind = Kind::llama4, .pp = 2, .schedule = kZbH1, .dp = 3, .recompute = kSelective, .micro_batch = 2});
  add({.kind = Kind::alibi, .dp = 2, .recompute = kFull, .method = RecomputeMethod::block});
  add({.kind = Kind::bert, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .dp = 2});
  add({.kind = Kind::bert_classes, .tp = 2, .dp = 2});
  add({.kind = Kind::megatron_bert, .dp = 3, .recompute = kSelective, .micro_batch = 2});
  add({.kind = Kind::gemma3, .tp = 2, .dp = 2, .micro_batch = 2});
  add({.kind = Kind::bloom, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2});
  add({.kind = Kind::t5, .dp = 2, .recompute = kFull, .micro_batch = 2});
  add({.kind = Kind::t5, .tp = 2, .sp = true, .pp = 2, .dp = 2});
  add({.kind = Kind::t5_v1_1, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2});
  add({.dp = 4, .group = 2});
  add({.tp = 2, .sp = true, .pp = 2, .schedule = kZbH1, .dp = 4, .group = 2});
  if (zero < 3) return;
  add({.dp = 2, .micro_batch = 2, .reshard = ZeroReshard::never});
  add({.pp = 2, .dp = 2, .reshard = ZeroReshard::always});
  add({.kind = Kind::t5, .pp = 2, .schedule = kZbH1, .dp = 2, .reshard = ZeroReshard::always});
}

/// What each family is cut by at least, beside what the list has of it already.
void add_families(std::vector<LayoutCase>& list) {
  const std::set<std::string> known = [&] {
    std::set<std::string> names;
    for (const LayoutCase& c : list) names.insert(describe(c));
    return names;
  }();
  for (const Kind kind :
       {Kind::bert, Kind::megatron_bert, Kind::mistral, Kind::qwen2, Kind::qwen3, Kind::gemma2, Kind::gemma3,
        Kind::gpt_neox, Kind::gpt_bigcode, Kind::bloom, Kind::t5, Kind::t5_v1_1, Kind::megatron_t5}) {
    for (const LayoutCase& c :
         {LayoutCase{.kind = kind, .tp = 2, .sp = true}, LayoutCase{.kind = kind, .pp = 2},
          LayoutCase{.kind = kind, .tp = 2, .pp = 2},
          LayoutCase{.kind = kind, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2},
          LayoutCase{.kind = kind, .dp = 2, .zero = 1}, LayoutCase{.kind = kind, .recompute = kFull}}) {
      if (!known.contains(describe(c))) list.push_back(c);
    }
  }
}

/// Ranks that hold parts of the samples, with every other axis. With as many heads of keys as of queries,
/// heads are exchanged unless all_gather is asked for.
void add_contexts(std::vector<LayoutCase>& list) {
  const auto add = [&](int cp, LayoutCase c) {
    c.cp = cp;
    list.push_back(c);
  };
  for (const ContextMethod method : {ContextMethod::ulysses, ContextMethod::all_gather}) {
    for (const int cp : {2, 3, 6}) add(cp, {.micro_batch = cp == 3 ? 2 : 1, .context_method = method});
  }
  for (const int zero : {0, 1, 2, 3}) add(2, {.dp = 2, .zero = zero});
  add(2, {.dp = 2, .zero = 3, .micro_batch = 2, .reshard = ZeroReshard::always});
  add(2, {.dp = 2, .zero = 2, .group = 2});
  add(2, {.tp = 2, .sp = true, .pp = 2, .dp = 2, .recompute = kSelective});
  add(3, {.kind = Kind::llama4, .tp = 2, .sp = true, .recompute = kFull, .recompute_layers = 2});
  add(2, {.kind = Kind::llama4,
          .tp = 2,
          .recompute = kFull,
          .partition = true,
          .context_method = ContextMethod::ulysses});
  add(2, {.kind = Kind::llama2, .tp = 4, .chunks = 2});
  add(2, {.kind = Kind::llama6, .pp = 2, .schedule = kZbH1, .recompute = kFull});
  add(2, {.kind = Kind::alibi, .pp = 2, .schedule = kZbV, .virtual_stages = 2});
  add(2, {.kind = Kind::gpt_bigcode, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
  add(3, {.kind = Kind::mistral});
  add(2, {.kind = Kind::gemma2, .tp = 2, .sp = true});
  add(3, {.kind = Kind::gemma3, .recompute = kFull});
  add(2, {.kind = Kind::qwen3, .dp = 2, .context_method = ContextMethod::ulysses});
  add(2, {.kind = Kind::olmo2, .tp = 2, .pp = 2});
  add(2, {.kind = Kind::bloom, .tp = 3});
  add(2, {.kind = Kind::gpt_neox, .micro_batch = 2, .context_method = ContextMethod::all_gather});
}

/// Tokens that go to experts, with every other axis.
void add_experts(std::vector<LayoutCase>& list) {
  for (const Kind kind : {Kind::mixtral, Kind::qwen3_moe}) {
    list.push_back({.kind = kind, .tp = 2});
    list.push_back({.kind = kind, .tp = 4, .sp = true});
    list.push_back({.kind = kind, .dp = 2, .zero = 1, .micro_batch = 2});
    list.push_back({.kind = kind, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
    list.push_back({.kind = kind, .recompute = kFull, .recompute_layers = 2});
    list.push_back({.kind = kind, .cp = 2});
  }
  list.push_back({.kind = Kind::mixtral, .recompute = kSelective, .micro_batch = 4});
  list.push_back({.kind = Kind::mixtral, .pp = 2, .schedule = kZbH1, .dp = 2, .zero = 2});
  list.push_back({.kind = Kind::mixtral, .dp = 3, .zero = 3, .recompute = kFull, .cp = 2});
  list.push_back({.kind = Kind::qwen3_moe, .pp = 2, .schedule = kZbV, .virtual_stages = 2});
  list.push_back({.kind = Kind::qwen3_moe, .tp = 2, .recompute = kFull, .partition = true});
  list.push_back({.kind = Kind::qwen3_moe, .tp = 2, .sp = true, .pp = 2, .dp = 2, .cp = 2});
  for (const int zero : {0, 1, 2, 3}) list.push_back({.kind = Kind::mixtral, .dp = 4, .zero = zero, .ep = 2});
  list.push_back({.kind = Kind::mixtral, .dp = 3, .zero = 0, .recompute = kFull, .micro_batch = 2, .ep = 3});
  list.push_back({.kind = Kind::mixtral, .tp = 2, .sp = true, .dp = 2, .ep = 2});
  list.push_back({.kind = Kind::mixtral, .pp = 2, .schedule = kZbH1, .dp = 2, .zero = 2, .ep = 2});
  list.push_back({.kind = Kind::qwen3_moe, .dp = 6, .zero = 3, .recompute = kSelective, .ep = 6});
  list.push_back({.kind = Kind::qwen3_moe, .tp = 2, .recompute = kFull, .partition = true, .cp = 2, .ep = 2});
  list.push_back({.kind = Kind::qwen3_moe, .dp = 3, .zero = 2, .cp = 2, .ep = 3});
  list.push_back({.kind = Kind::qwen3_moe, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2, .ep = 2});
}

/// A sanitizer takes ten times as long: every third layout, which are of all kinds, shows it what there is.
void thin_out([[maybe_unused]] std::vector<LayoutCase>& list) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::vector<LayoutCase> third;
  for (std::size_t i = 0; i < list.size(); i += 3) third.push_back(list[i]);
  list = std::move(third);
#endif
}

std::vector<LayoutCase> layouts() {
  std::vector<LayoutCase> list;
  // One axis at a time.
  for (const Kind kind : {Kind::gpt2, Kind::llama4}) {
    for (const int tp : {2, 3, 4}) {
      if (kind == Kind::llama4 && tp == 3) continue;
      list.push_back({.kind = kind, .tp = tp});
      list.push_back({.kind = kind, .tp = tp, .sp = true});
    }
    for (const int dp : {2, 3}) {
      for (const int zero : {0, 1}) list.push_back({.kind = kind, .dp = dp, .zero = zero, .micro_batch = 2});
    }
    for (const int pp : {2, 3, 4}) list.push_back({.kind = kind, .pp = pp});
  }
  for (const auto schedule : {kGpipe, kZbH1}) {
    for (const int pp : {2, 4}) list.push_back({.pp = pp, .schedule = schedule});
    list.push_back({.kind = Kind::llama4, .pp = 3, .schedule = schedule, .micro_batch = 2});
  }
  list.push_back({.pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
  list.push_back(
      {.kind = Kind::llama12, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .micro_batch = 2});
  list.push_back({.kind = Kind::alibi, .pp = 2, .schedule = kZbV, .virtual_stages = 2});
  list.push_back({.pp = 2, .schedule = kZbV, .virtual_stages = 2});
  list.push_back({.kind = Kind::llama4, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .micro_batch = 2});
  list.push_back({.pp = 3, .pipeline_layout = "1,3,1"});
  list.push_back({.kind = Kind::llama6, .pp = 2, .schedule = kZbH1, .pipeline_layout = "4,1"});
  list.push_back({.pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .pipeline_layout = "2,1,1,1"});
  // Key-value heads: fewer than ranks, as many, more.
  list.push_back({.kind = Kind::llama2, .tp = 4});
  list.push_back({.kind = Kind::llama2, .tp = 4, .sp = true, .dp = 2});
  list.push_back({.kind = Kind::llama6, .tp = 3, .sp = true});
  list.push_back({.kind = Kind::llama6, .tp = 2, .pp = 2});
  list.push_back({.kind = Kind::llama12, .tp = 4, .dp = 2, .zero = 0});
  list.push_back({.kind = Kind::alibi, .tp = 3, .dp = 2});
  list.push_back({.kind = Kind::alibi, .tp = 2, .sp = true, .pp = 2});
  // Recomputation.
  list.push_back({.recompute = kSelective});
  list.push_back({.recompute = kFull});
  list.push_back({.kind = Kind::llama4, .recompute = kFull, .recompute_layers = 2});
  list.push_back({.kind = Kind::llama4, .tp = 2, .recompute = kFull, .partition = true});
  list.push_back({.tp = 2, .sp = true, .recompute = kSelective});
  list.push_back({.tp = 2, .sp = true, .recompute = kFull, .recompute_layers = 3});
  list.push_back({.pp = 2, .recompute = kFull, .method = RecomputeMethod::block, .recompute_layers = 1});
  list.push_back({.pp = 2, .schedule = kZbH1, .recompute = kFull});
  list.push_back(
      {.kind = Kind::llama4, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .recompute = kSelective});
  list.push_back({.dp = 3, .recompute = kSelective, .micro_batch = 4});
  // Products of tensor ranks in pieces.
  list.push_back({.tp = 2, .chunks = 2});
  list.push_back({.tp = 3, .sp = true, .chunks = 3});
  list.push_back({.kind = Kind::llama4, .tp = 2, .recompute = kSelective, .chunks = 3});
  list.push_back({.kind = Kind::llama2, .tp = 4, .sp = true, .recompute = kFull, .chunks = 2});
  list.push_back({.kind = Kind::llama6, .tp = 3, .sp = true, .pp = 2, .schedule = kZbH1, .chunks = 2});
  // Several axes.
  list.push_back({.tp = 2, .pp = 2});
  list.push_back({.tp = 2, .dp = 2});
  list.push_back({.pp = 2, .dp = 2});
  list.push_back({.pp = 2, .dp = 3, .zero = 0});
  list.push_back({.tp = 2, .sp = true, .pp = 2, .dp = 2});
  list.push_back({.kind = Kind::llama4, .tp = 2, .sp = true, .pp = 2, .dp = 2, .recompute = kSelective});
  list.push_back({.kind = Kind::llama4, .tp = 4, .sp = true, .pp = 2, .dp = 2});
  list.push_back({.kind = Kind::llama4, .tp = 2, .pp = 4, .dp = 2, .zero = 0});
  list.push_back({.tp = 3, .sp = true, .pp = 2, .schedule = kZbH1, .dp = 2});
  list.push_back({.tp = 2, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .dp = 2});
  list.push_back(
      {.kind = Kind::llama6, .tp = 2, .sp = true, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 3});
  list.push_back({.kind = Kind::llama12, .tp = 3, .pp = 4, .dp = 1, .micro_batch = 2});
  list.push_back(
      {.kind = Kind::llama2, .tp = 4, .sp = true, .pp = 2, .schedule = kGpipe, .dp = 2, .micro_batch = 3});
  list.push_back({.tp = 4, .sp = true, .pp = 4, .micro_batch = 2});
  list.push_back({.tp = 1, .pp = 4, .dp = 3, .micro_batch = 1});
  // Layers that look to both sides, a head with a bias and a loss of its own.
  for (const Kind kind : {Kind::bert, Kind::megatron_bert}) {
    list.push_back({.kind = kind, .tp = 2, .sp = true});
    list.push_back({.kind = kind, .tp = 2, .pp = 2, .recompute = kSelective});
    list.push_back({.kind = kind, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
    list.push_back({.kind = kind, .dp = 2, .zero = 1, .recompute = kFull});
  }
  list.push_back({.kind = Kind::bert_classes, .tp = 2, .sp = true});
  list.push_back({.kind = Kind::bert_classes, .pp = 2, .recompute = kFull});
  list.push_back({.kind = Kind::bert_classes, .tp = 2, .pp = 2, .dp = 2, .zero = 1});
  list.push_back({.kind = Kind::bert_classes, .dp = 2, .recompute = kSelective, .micro_batch = 2});
  list.push_back({.kind = Kind::bert, .tp = 3, .sp = true, .pp = 2, .schedule = kZbH1, .dp = 2});
  list.push_back({.kind = Kind::megatron_bert, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2});
  // Windows, caps, norms in other places: each family by some layouts in turn.
  list.push_back({.kind = Kind::mistral, .tp = 2, .sp = true, .pp = 2});
  list.push_back({.kind = Kind::mistral, .dp = 2, .recompute = kFull});
  list.push_back({.kind = Kind::qwen3, .tp = 2, .sp = true, .recompute = kSelective});
  list.push_back({.kind = Kind::qwen3, .tp = 4, .pp = 2, .schedule = kZbH1});
  list.push_back({.kind = Kind::gemma2, .tp = 2, .sp = true, .pp = 2, .schedule = kZbV, .virtual_stages = 2});
  list.push_back({.kind = Kind::gemma2, .tp = 4, .recompute = kFull});
  list.push_back({.kind = Kind::gemma3, .tp = 2, .sp = true, .recompute = kFull, .recompute_layers = 2});
  list.push_back({.kind = Kind::gemma3, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2, .dp = 2});
  list.push_back({.kind = Kind::bloom, .tp = 2, .sp = true, .pp = 2});
  list.push_back({.kind = Kind::bloom, .dp = 2, .recompute = kSelective});
  list.push_back({.kind = Kind::post_norm, .tp = 2, .sp = true, .pp = 2, .recompute = kFull});
  // One norm over heads of all ranks (of two key heads that two ranks each hold), one norm for both branches.
  list.push_back({.kind = Kind::olmo2, .tp = 4, .sp = true, .pp = 2, .schedule = kZbH1});
  list.push_back({.kind = Kind::olmo2, .tp = 2, .dp = 2, .recompute = kFull});
  list.push_back({.kind = Kind::falcon, .tp = 2, .sp = true, .pp = 2});
  list.push_back({.kind = Kind::glm4, .tp = 2, .sp = true, .recompute = kSelective});
  // An encoder and a decoder: cut in the encoder, between the two (2,3), in the decoder.
  list.push_back({.kind = Kind::t5, .tp = 2, .sp = true});
  list.push_back({.kind = Kind::t5, .pp = 2, .pipeline_layout = "2,3"});
  list.push_back({.kind = Kind::t5, .pp = 2, .schedule = kGpipe, .pipeline_layout = "1,4"});
  list.push_back({.kind = Kind::t5, .pp = 3, .recompute = kFull, .pipeline_layout = "1,2,2"});
  list.push_back({.kind = Kind::t5, .pp = 4});
  list.push_back({.kind = Kind::t5, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
  list.push_back({.kind = Kind::t5, .pp = 3, .schedule = kZbH1, .pipeline_layout = "2,1,2"});
  list.push_back({.kind = Kind::t5, .pp = 2, .schedule = kZbV, .virtual_stages = 2, .dp = 2});
  list.push_back({.kind = Kind::t5, .tp = 2, .sp = true, .pp = 2, .recompute = kSelective});
  list.push_back({.kind = Kind::t5, .dp = 2, .zero = 1, .recompute = kFull});
  list.push_back({.kind = Kind::t5, .tp = 2, .pp = 2, .recompute = kFull, .partition = true});
  list.push_back({.kind = Kind::t5_v1_1, .tp = 3, .sp = true, .recompute = kFull, .recompute_layers = 2});
  list.push_back({.kind = Kind::t5_v1_1, .tp = 2, .pp = 2, .dp = 2, .zero = 1});
  list.push_back({.kind = Kind::t5_v1_1, .pp = 4, .schedule = kGpipe, .micro_batch = 2});
  list.push_back({.kind = Kind::t5_v1_1, .dp = 3, .micro_batch = 2});
  for (const int zero : {2, 3}) add_shards(zero, list);
  list.push_back({.dp = 4, .zero = 1, .group = 2});
  list.push_back({.kind = Kind::t5, .pp = 2, .dp = 2, .zero = 3, .group = 1});
  list.push_back({.kind = Kind::t5, .tp = 2, .pp = 3, .split_rank = 1});
  list.push_back({.kind = Kind::megatron_t5, .tp = 2, .sp = true, .recompute = kSelective});
  list.push_back(
      {.kind = Kind::megatron_t5, .pp = 2, .dp = 2, .zero = 1, .recompute = kFull, .split_rank = 1});
  list.push_back({.kind = Kind::megatron_t5, .tp = 2, .pp = 2, .pipeline_layout = "3,2"});
  list.push_back({.kind = Kind::megatron_t5, .pp = 2, .schedule = kInterleaved, .virtual_stages = 2});
  list.push_back(
      {.kind = Kind::megatron_t5, .tp = 3, .sp = true, .pp = 2, .schedule = kZbH1, .micro_batch = 2});
  add_families(list);
  add_contexts(list);
  add_experts(list);
  thin_out(list);
  return list;
}

class LayoutMatrix : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(LayoutMatrix, EqualsTheSerialRun) {
  const LayoutCase& c = GetParam();
  const Config config = config_of(c);
  const LayoutErrors errors = compare_layout(config, c.ranks(), batches_of(config), serial_run(c.kind));
  note_errors(c, errors);
  EXPECT_LE(errors.loss, 1e-5);
  EXPECT_LE(errors.gradient, 1e-5) << errors.worst_gradient;
  // Adam divides by the gradient's size: where that is rounding, which differs by CPU, so are updates.
  EXPECT_LE(errors.weight, 1e-4) << errors.worst_weight;
}

INSTANTIATE_TEST_SUITE_P(All, LayoutMatrix, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return describe(info.param); });

TEST(LayoutMatrixSize, HasSixtyLayoutsOfAtMostSixteenRanks) {
  const auto list = layouts();
  EXPECT_GE(list.size(), 60u);
  for (const LayoutCase& c : list) EXPECT_LE(c.ranks(), 16) << describe(c);
}

}  // namespace
}  // namespace tessera::test
