#include <any>

#include "base/config_schema.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

namespace {

/// Visitor: where the members of one form of a section are.
struct Members {
  std::vector<std::any> all;

  template <typename T>
  void field(const char*, const T& member, const char*, const Limits& = {}) {
    all.emplace_back(&member);
  }
  void group(const char*, const auto& section, const char*) { all.emplace_back(&section); }
};

/// Visitor: takes them for the other form. What is open even in the family's row is as in most models: zero.
struct Taker {
  std::vector<std::any>::const_iterator next;

  template <typename T>
  void field(const char*, T& member, const char*, const Limits& = {}) {
    const std::any& from = *next++;
    if (const auto* same = std::any_cast<const T*>(&from))
      member = **same;
    else if constexpr (requires { member.has_value(); })
      member = *std::any_cast<const typename T::value_type*>(from);
    else
      member = std::any_cast<const std::optional<T>*>(from)->value_or(T{});
  }
  void group(const char*, auto& section, const char*) { field(nullptr, section, nullptr); }
};

void take_over(const auto& from, auto& to) {
  Members members;
  describe(members, from);
  Taker taker{members.all.begin()};
  describe(taker, to);
}

}  // namespace

ModelConfig::ModelConfig(const ModelSettings& settings) {
  using S = ModelSettings;
  S open = settings;
  const ModelSpec& row = spec_of(open.family);
  if (open.num_kv_heads == 0) open.num_kv_heads = open.num_heads;
  if (open.head_dim == 0 && open.num_heads > 0) open.head_dim = open.hidden_size / open.num_heads;
  if (open.ffn_hidden_size == 0) open.ffn_hidden_size = row.ffn_width(open.hidden_size);
  if (open.num_labels && !open.binary_head) open.binary_head = false;  // one head takes their place
  const auto fill = [&](auto... field) {
    ((open.*field = open.*field ? open.*field : row.model.*field), ...);
  };
  fill(&S::position_embedding, &S::norm, &S::activation, &S::tied_head, &S::linear_bias, &S::qkv_bias,
       &S::parallel_residual, &S::shared_norm, &S::qk_norm, &S::norm_placement, &S::norm_zero_centered,
       &S::norm_bias, &S::embedding_norm, &S::embedding_scaled, &S::attention_softcap, &S::logit_softcap,
       &S::rope_local_theta, &S::token_types, &S::binary_head, &S::relative_buckets,
       &S::relative_max_distance);
  if (!open.norm_bias) open.norm_bias = open.norm == NormStyle::layernorm;
  if (open.sliding_window) fill(&S::window_pattern);
  if (row.encoder_decoder && !open.encoder_layers) open.encoder_layers = open.num_layers / 2;
  if (row.model.scaled_head && !open.scaled_head) open.scaled_head = open.tied_head;
  take_over(open, *this);
}

ModelConfig::operator ModelSettings() const {
  ModelSettings settings;
  take_over(*this, settings);
  return settings;
}

Config::Config(const Settings& settings) : Sections(settings), model(settings.model) {
  parallel.virtual_stages = chunks_of(parallel.schedule, parallel.virtual_stages);
  if (lr_schedule.decay_steps == 0) lr_schedule.decay_steps = training.steps;
  if (!lr_schedule.end_weight_decay) lr_schedule.end_weight_decay = optimizer.weight_decay;
}

Config::operator Settings() const { return {*this, model}; }

SampleLengths sample_lengths(const Config& config) {
  const TrainingConfig& t = config.training;
  if (spec_of(config.model.family).samples != ModelSpec::Samples::corrupted_spans)
    return {.tokens = t.seq_length};
  return {.tokens = t.decoder_seq_length.value_or(t.seq_length), .encoder = t.seq_length};
}

std::string lengths_text(const Config& config) {
  const SampleLengths lengths = sample_lengths(config);
  if (lengths.encoder == 0) return detail::concat(lengths.tokens, " tokens");
  return detail::concat(lengths.encoder, " tokens and ", lengths.tokens, " in the decoder");
}

}  // namespace tessera
