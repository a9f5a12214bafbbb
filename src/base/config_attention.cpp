/// What a model's keys on attention, norms and stretched positions must be to each other.

#include <algorithm>

#include "base/config_rules.hpp"
#include "tessera/base/families.hpp"

namespace tessera {
namespace {

/// Of these letters, at least one.
bool made_of(const std::string& pattern, std::string_view letters) {
  return !pattern.empty() && pattern.find_first_not_of(letters) == pattern.npos;
}

void check_windows(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.window_pattern", "model.sliding_window"}, [&] {
    if (!c.window_pattern) return std::string();
    const std::string& pattern = *c.window_pattern;
    if (!made_of(pattern, "SF"))
      return detail::concat("model.window_pattern is '", pattern,
                            "'; it is an S (sliding) or F (full) for each layer, such as SSSSSF");
    return unless(c.sliding_window.has_value(),
                  "model.window_pattern says which layers have "
                  "model.sliding_window, and that is null; give both");
  });
  rules.rule({"model.attention_softcap", "model.position_embedding", "model.family"}, [&] {
    return unless(c.attention_softcap == 0.0 || c.position_embedding != PositionKind::alibi,
                  "model.attention_softcap is not computed with ALiBi positions; make it 0");
  });
}

void check_experts(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.num_experts", "model.router_topk", "model.family"}, [&] {
    return unless(!c.num_experts || c.router_topk <= *c.num_experts, "model.router_topk (", c.router_topk,
                  ") is more than model.num_experts (", c.num_experts.value_or(0), ")");
  });
  rules.rule({"model.num_experts", "model.moe_layers", "model.moe_ffn_hidden_size", "model.router_normalized",
              "model.router_aux_loss", "model.router_z_loss", "model.family"},
             [&] {
               if (c.num_experts) return std::string();
               const char* given = c.moe_layers              ? "moe_layers"
                                   : c.moe_ffn_hidden_size   ? "moe_ffn_hidden_size"
                                   : c.router_normalized     ? "router_normalized"
                                   : c.router_aux_loss > 0.0 ? "router_aux_loss"
                                   : c.router_z_loss > 0.0   ? "router_z_loss"
                                                             : nullptr;
               return unless(given == nullptr, "model.", given ? given : "",
                             " is about experts, and model.num_experts is null; give both");
             });
  rules.rule({"model.moe_layers", "model.num_layers", "model.num_experts"}, [&] {
    if (!c.moe_layers) return std::string();
    const std::string& pattern = *c.moe_layers;
    if (!made_of(pattern, "ED"))
      return detail::concat("model.moe_layers is '", pattern,
                            "'; it is an E (experts) or D (dense) for each layer, such as DE");
    return unless(layers_with_experts(c) > 0 || !c.num_experts, "model.moe_layers is '", pattern,
                  "': no layer has experts; leave it and model.num_experts out");
  });
  rules.rule({"model.num_experts", "model.linear_bias", "model.family"}, [&] {
    return unless(!c.num_experts || !c.linear_bias,
                  "model.num_experts: experts have no biases; make model.linear_bias false and "
                  "model.proj_bias what it is to be");
  });
}

void check_norms(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.norm_placement", "model.parallel_residual", "model.shared_norm", "model.norm",
              "model.norm_bias", "model.family"},
             [&] {
               if (c.parallel_residual && c.norm_placement != NormPlacement::pre)
                 return detail::concat("model.parallel_residual needs model.norm_placement pre, not ",
                                       name_of(c.norm_placement));
               if (c.shared_norm && !c.parallel_residual)
                 return std::string(
                     "model.shared_norm needs model.parallel_residual: branches that follow one "
                     "another have norms of their own");
               return unless(!*c.norm_bias || c.norm == NormStyle::layernorm,
                             "model.norm_bias: RMSNorm has no bias; leave it out or choose layernorm");
             });
  rules.rule({"model.family"}, [&] { return setting_of_others(c); });
}

void check_problem(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.problem_type", "model.num_labels"}, [&] {
    return unless(
        !c.problem_type || c.num_labels,
        "model.problem_type says what the head for model.num_labels is trained on, and that is null; "
        "give both");
  });
}

void check_scaling(Rules& rules, const ModelConfig& c) {
  const RopeScaling& s = c.rope_scaling;
  rules.rule({"model.rope_scaling.high_freq_factor", "model.rope_scaling.low_freq_factor"}, [&] {
    return unless(s.low_freq_factor < s.high_freq_factor, "model.rope_scaling.high_freq_factor (",
                  s.high_freq_factor, ") must be above low_freq_factor (", s.low_freq_factor, ")");
  });
  rules.rule({"model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow"}, [&] {
    return unless(s.beta_slow < s.beta_fast, "model.rope_scaling.beta_fast (", s.beta_fast,
                  ") must be above beta_slow (", s.beta_slow, ")");
  });
  rules.rule({"model.rope_scaling.attention_factor", "model.rope_scaling.type"}, [&] {
    return unless(!s.attention_factor || s.type == RopeType::yarn || s.type == RopeType::longrope,
                  "model.rope_scaling.attention_factor is of types yarn and longrope, not of ",
                  name_of(s.type));
  });
  rules.rule(
      {"model.rope_scaling.short_factor", "model.rope_scaling.long_factor", "model.rope_scaling.type",
       "model.rope_fraction", "model.head_dim", "model.num_heads", "model.hidden_size"},
      [&] {
        if (s.type != RopeType::longrope)
          return unless(s.short_factor.empty() && s.long_factor.empty(),
                        "model.rope_scaling.short_factor and long_factor are of type longrope, not of ",
                        name_of(s.type));
        const auto pairs = static_cast<std::size_t>(static_cast<double>(c.head_dim) * c.rope_fraction / 2);
        return unless(s.short_factor.size() == pairs && s.long_factor.size() == pairs,
                      "model.rope_scaling.short_factor and long_factor must have ", pairs,
                      " numbers each, one for each pair of rotated features, not ", s.short_factor.size(),
                      " and ", s.long_factor.size());
      });
}

}  // namespace

void check_attention(Rules& rules, const ModelConfig& config) {
  check_windows(rules, config);
  check_experts(rules, config);
  check_norms(rules, config);
  check_problem(rules, config);
  check_scaling(rules, config);
}

}  // namespace tessera
