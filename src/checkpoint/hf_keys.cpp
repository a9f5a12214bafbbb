#include "checkpoint/hf_keys.hpp"

#include <algorithm>
#include <set>
#include <vector>

namespace tessera::checkpoint_detail {
namespace {

using Only = HfDemand::Only;

constexpr const char* kQuantized = "quantized weights are not supported";
constexpr const char* kUnquantized = "Use the float32, bfloat16 or float16 version of the model.";
constexpr const char* kUneven = "layers that differ are not supported";

/// What changes a model of every family.
constexpr HfDemand kCommon[] = {{"quantization_config", Only::absent, kQuantized, kUnquantized},
                                {"compression_config", Only::absent, kQuantized, kUnquantized},
                                {"is_causal", Only::is_true},
                                {"is_encoder_decoder", Only::is_false},
                                {"chunk_size_feed_forward", Only::zero},
                                {"per_layer_config", Only::empty, kUneven},
                                {"pruned_heads", Only::empty, kUneven},
                                {"attn_logit_softcapping", Only::zero},
                                {"final_logit_softcapping", Only::zero},
                                {"attention_chunk_size", Only::zero},
                                {"logit_scale", Only::one},
                                {"attention_multiplier", Only::one},
                                {"embedding_multiplier", Only::one},
                                {"residual_multiplier", Only::one},
                                {"logits_scaling", Only::one}};

/// Read beside the rows' keys, or known to change nothing in any family.
constexpr const char* kKnown[] = {"rope_scaling",
                                  "rope_parameters",
                                  "original_max_position_embeddings",
                                  "sliding_window",
                                  "use_sliding_window",
                                  "max_window_layers",
                                  "layer_types",
                                  "attn_implementation",
                                  "_attn_implementation",
                                  "output_attentions",
                                  "tie_encoder_decoder",
                                  "length_penalty",
                                  "repetition_penalty",
                                  "cross_attention_hidden_size",
                                  "_attn_implementation_autoset",
                                  "_attn_implementation_internal",
                                  "_experts_implementation",
                                  "encoder_no_repeat_ngram_size",
                                  "output_scores",
                                  "diversity_penalty",
                                  "exponential_decay_length_penalty",
                                  "remove_invalid_values",
                                  "use_flash_attn",
                                  "use_flash_attention",
                                  "flash_attention",
                                  "_flash_attn_2_enabled"};

/// Parts of names of settings that change numbers.
constexpr const char* kCounting[] = {
    "rope",       "rotary", "alibi", "scal",      "multiplier", "softcap", "bias", "window",  "quant",
    "norm",       "clip",   "attn",  "attention", "residual",   "expert",  "moe",  "dropout", "pdrop",
    "activation", "mlp",    "ffn",   "parallel",  "interleav",  "sparse",  "sink", "gate"};

bool holds(const JsonView& value, Only only) {
  const Json& json = value.json();
  switch (only) {
    case Only::is_true:
      return value.boolean();
    case Only::is_false:
      return !value.boolean();
    case Only::zero:
      return json.is_number() && value.number() == 0.0;
    case Only::one:
      return json.is_number() && value.number() == 1.0;
    case Only::empty:
      return json.empty();
    case Only::absent:
      break;
  }
  return false;
}

void demand(const JsonView& root, const HfDemand& each) {
  const auto found = root.find(each.key);
  if (!found || holds(*found, each.only)) return;
  const bool is_flag = each.only == Only::is_true || each.only == Only::is_false;
  const char* usual = each.only == Only::is_true    ? "is not supported; it must be true or absent"
                      : each.only == Only::is_false ? "is not supported; it must be false or absent"
                                                    : "is not supported";
  found->fail(each.reason ? each.reason : usual, each.remedy ? each.remedy
                                                 : is_flag   ? "Use a model without this option."
                                                             : "Change it, or use another model.");
}

/// Whether a setting cannot switch anything on.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == 0 || value == "" ||
         (value.is_structured() && value.empty());
}

std::set<std::string_view> known_keys(const ModelSpec& spec) {
  std::set<std::string_view> known(std::begin(kKnown), std::end(kKnown));
  for (const HfDemand& each : kCommon) known.insert(each.key);
  for (const HfDemand& each : spec.demands) known.insert(each.key);
  for (const HfKey& key : spec.keys) {
    known.insert(key.key);
    if (key.alias) known.insert(key.alias);
  }
  known.insert(spec.inert.begin(), spec.inert.end());
  known.insert({spec.activations.key, spec.rope.theta, spec.rope.fraction});
  if (spec.rope.local_theta) known.insert(spec.rope.local_theta);
  if (spec.window.every_key) known.insert(spec.window.every_key);
  if (spec.sparse_layers) known.insert({"decoder_sparse_step", "mlp_only_layers"});
  if (spec.falcon_layers) known.insert({"parallel_attn", "num_ln_in_parallel_attn"});
  return known;
}

}  // namespace

void refuse_what_is_not_had(const JsonView& root, const ModelSpec& spec) {
  const auto said = [&](const char* name) {
    return std::ranges::any_of(spec.keys,
                               [&](const HfKey& key) { return std::string_view(key.key) == name; }) ||
           std::ranges::any_of(spec.demands,
                               [&](const HfDemand& each) { return std::string_view(each.key) == name; });
  };
  for (const HfDemand& each : kCommon) {
    if (!said(each.key)) demand(root, each);
  }
  for (const HfDemand& each : spec.demands) demand(root, each);
  const std::set<std::string_view> known = known_keys(spec);
  for (const auto& [key, value] : root.object().items()) {
    const std::string begin = spec.nested ? detail::concat(spec.nested, ".") : std::string();
    const std::string name = !begin.empty() && key.starts_with(begin) ? key.substr(begin.size()) : key;
    const bool counts = std::any_of(std::begin(kCounting), std::end(kCounting),
                                    [&](const char* part) { return name.find(part) != std::string::npos; });
    if (!counts || known.contains(key) || known.contains(name) || is_off(value)) continue;
    root[key].fail(
        detail::concat("is a setting that may change the numbers and that Tessera does not know of a ",
                       spec.name),
        "Take it out if Transformers' model does not read it; otherwise use another model.");
  }
}

}  // namespace tessera::checkpoint_detail
