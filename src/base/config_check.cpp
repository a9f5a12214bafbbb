#include "base/config_check.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/config_rules.hpp"
#include "base/config_schema.hpp"
#include "base/config_values.hpp"
#include "base/model_counts.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

namespace {

// Sizes in bytes stay far below what a signed 64-bit number holds.
constexpr double kMostElements = 288230376151711744.0;  // 2^58

std::string number_text(double value) {
  if (!std::isfinite(value)) return detail::concat(value);
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  return whole ? std::to_string(static_cast<std::int64_t>(value)) : yaml_text(value);
}

/// Visitor: every number against its limits, no text empty.
class RangeCheck {
 public:
  RangeCheck(std::string prefix, const KeySet& unreadable, std::vector<Finding>& findings)
      : prefix_(std::move(prefix)), unreadable_(unreadable), findings_(findings) {}

  template <typename T>
  void field(const char* name, const T& value, const char*, const Limits& limits = {}) {
    const std::string fault = find_fault(value, limits);
    if (fault.empty()) return;
    const std::string key = prefix_ + name;
    if (!unreadable_.contains(key)) findings_.push_back({{key}, key + " " + fault});
  }
  template <typename Section>
  void group(const char* name, const Section& section, const char*) {
    RangeCheck inner(prefix_ + name + ".", unreadable_, findings_);
    describe(inner, section);
  }

 private:
  static bool is_low(double value, const Limits& limits) {
    return limits.above ? value <= limits.min : value < limits.min;
  }
  static bool is_high(double value, const Limits& limits) {
    return limits.below ? value >= limits.max : value > limits.max;
  }
  static bool is_sound(double value, const Limits& limits) {
    return std::isfinite(value) && !is_low(value, limits) && !is_high(value, limits);
  }
  /// What is wrong with a value that is not sound.
  static std::string describe_fault(double value, const Limits& limits, const std::string& text) {
    if (!std::isfinite(value)) return "must be a finite number, not " + text;
    if (is_low(value, limits))
      return (limits.above ? "must be above " : "must be at least ") + number_text(limits.min) + ", not " +
             text;
    return (limits.below ? "must be below " : "must be at most ") + number_text(limits.max) + ", not " + text;
  }
  static std::string find_fault(std::int64_t value, const Limits& limits) {
    const auto number = static_cast<double>(value);
    return is_sound(number, limits) ? "" : describe_fault(number, limits, std::to_string(value));
  }
  static std::string find_fault(double value, const Limits& limits) {
    return is_sound(value, limits) ? "" : describe_fault(value, limits, number_text(value));
  }
  static std::string find_fault(bool, const Limits&) { return {}; }
  static std::string find_fault(const std::string& value, const Limits&) {
    return value.empty() ? "must not be empty" : "";
  }
  template <IsChoice E>
  static std::string find_fault(E, const Limits&) {
    return {};
  }
  template <typename T>
  static std::string find_fault(const std::optional<T>& value, const Limits& limits) {
    return value ? find_fault(*value, limits) : std::string();
  }
  template <typename T>
  static std::string find_fault(const std::vector<T>& values, const Limits& limits) {
    for (const T& value : values) {
      if (std::string fault = find_fault(value, limits); !fault.empty()) return "element " + fault;
    }
    return {};
  }
  static std::string find_fault(const std::pair<double, std::string>& value, const Limits&) {
    const bool by_size = value.first == kWeightBySize;
    const std::string fault = by_size ? std::string() : find_fault(value.first, positive());
    if (!fault.empty()) return "weight " + fault;
    return value.second.empty() ? "prefix must not be empty" : "";
  }

  std::string prefix_;
  const KeySet& unreadable_;
  std::vector<Finding>& findings_;
};

void check_heads(Rules& rules, const ModelSettings& c) {
  rules.rule({"model.num_heads", "model.hidden_size", "model.head_dim"}, [&] {
    return unless(c.head_dim != 0 || c.hidden_size % c.num_heads == 0, "model.hidden_size (", c.hidden_size,
                  ") is not a multiple of model.num_heads (", c.num_heads,
                  "); change one or give model.head_dim");
  });
  rules.rule({"model.num_kv_heads", "model.num_heads"}, [&] {
    return unless(c.num_kv_heads == 0 || c.num_heads % c.num_kv_heads == 0, "model.num_heads (", c.num_heads,
                  ") is not a multiple of model.num_kv_heads (", c.num_kv_heads, ")");
  });
}

void check_offload(Rules& rules, const Config& config) {
  const OffloadConfig& c = config.offload;
  const auto to_memory = [&](std::string_view key, OffloadTo to) {
    rules.rule({key},
               [&] { return unless(to != OffloadTo::nvme, key, ": nvme is for offload.optimizer alone"); });
  };
  to_memory("offload.gradients", c.gradients);
  to_memory("offload.parameters", c.parameters);
  to_memory("offload.activations", c.activations);
  rules.rule({"offload.gradients", "parallel.zero_stage"}, [&] {
    return unless(c.gradients == OffloadTo::none || config.parallel.zero_stage >= 2,
                  "offload.gradients takes this rank's share of them to host memory, which there is from "
                  "parallel.zero_stage 2 on, not with ",
                  config.parallel.zero_stage);
  });
  rules.rule({"offload.parameters", "parallel.zero_stage"}, [&] {
    return unless(c.parameters == OffloadTo::none || config.parallel.zero_stage == 3,
                  "offload.parameters brings weights to the device layer by layer, as parallel.zero_stage 3 "
                  "does, which is ",
                  config.parallel.zero_stage, " here");
  });
  rules.rule({"offload.parameters", "optimizer.split_main_weights"}, [&] {
    return unless(c.parameters == OffloadTo::none || !config.optimizer.split_main_weights,
                  "optimizer.split_main_weights makes main weights of the weights and their low 16 bits, and "
                  "offload.parameters takes those away: give one of the two");
  });
  rules.rule({"offload.activations", "training.recompute"}, [&] {
    return unless(c.activations == OffloadTo::none || config.training.recompute == Recompute::full,
                  "offload.activations is of the inputs of recomputed layers: it needs training.recompute "
                  "full, which is ",
                  name_of(config.training.recompute), " here");
  });
  rules.rule({"offload.ratio", "offload.optimizer", "offload.gradients", "offload.parameters"}, [&] {
    return unless(c.ratio == 1.0 || c.optimizer != OffloadTo::none || c.gradients != OffloadTo::none ||
                      c.parameters != OffloadTo::none,
                  "offload.ratio (", c.ratio,
                  ") is of the optimizer's state, gradients and parameters, and none of them is offloaded");
  });
  rules.rule({"offload.optimizer", "offload.path"}, [&] {
    return unless(
        c.optimizer != OffloadTo::nvme || c.path,
        "offload.optimizer: nvme needs offload.path, a folder on the disk that is to hold the state");
  });
  rules.rule({"offload.optimizer", "offload.path"}, [&] {
    return unless(c.optimizer == OffloadTo::nvme || !c.path,
                  "offload.path is for offload.optimizer: nvme, which is ", name_of(c.optimizer), " here");
  });
  rules.rule({"offload.tile"}, [&] {
    return unless(c.tile % 1024 == 0, "offload.tile (", c.tile, ") must be a multiple of 1024");
  });
}

void check_padding(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.padding_id", "model.vocab_size"}, [&] {
    return unless(c.padding_id.value_or(0) < c.vocab_size, "model.padding_id (", c.padding_id.value_or(0),
                  ") is not below model.vocab_size (", c.vocab_size, ")");
  });
}

void check_start(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.reinitialize", "model.init_from"}, [&] {
    return unless(!c.reinitialize || c.init_from,
                  "model.reinitialize is about the weights that model.init_from names, and there are none");
  });
}

void check_rotary(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.head_dim", "model.num_heads", "model.hidden_size", "model.rope_fraction",
              "model.position_embedding", "model.family"},
             [&] {
               if (c.position_embedding != PositionKind::rotary) return std::string();
               const double rotated = static_cast<double>(c.head_dim) * c.rope_fraction;
               return unless(rotated >= 2 && std::fmod(rotated, 2.0) == 0.0,
                             "rotary positions need an even number of features per head, not ", rotated,
                             " (model.head_dim ", c.head_dim, ", model.rope_fraction ", c.rope_fraction, ")");
             });
}

void check_size(Rules& rules, const ModelConfig& c) {
  rules.rule({"model.hidden_size", "model.num_layers", "model.ffn_hidden_size", "model.vocab_size",
              "model.num_heads", "model.num_kv_heads", "model.head_dim", "model.max_positions",
              "model.num_experts", "model.moe_ffn_hidden_size"},
             [&] {
               const double count = count_parameters<double>(c);
               return unless(count < kMostElements, "a model of ", count,
                             " parameters is beyond any machine");
             });
}

void check_model(Rules& rules, const ModelSettings& given, const ModelConfig& c) {
  check_heads(rules, given);
  check_rotary(rules, c);
  check_attention(rules, c);
  check_padding(rules, c);
  check_start(rules, c);
  check_size(rules, c);
}

void check_optimizer(Rules& rules, const Config& config) {
  const OptimizerConfig& c = config.optimizer;
  check_offload(rules, config);
  rules.rule({"optimizer.betas"}, [&] {
    return unless(c.betas.size() == 2, "optimizer.betas must be two numbers, not ", c.betas.size());
  });
  rules.rule({"optimizer.split_main_weights", "training.precision"}, [&] {
    return unless(
        !c.split_main_weights || config.training.precision == Precision::bf16,
        "optimizer.split_main_weights needs training.precision bf16, not ",
        name_of(config.training.precision),
        ": only a bf16 weight is the upper half of its fp32 main weight; leave it out or train in bf16");
  });
}

void check_schedule(Rules& rules, const Settings& c) {
  const LrScheduleConfig& s = c.lr_schedule;
  const std::int64_t end = s.decay_steps > 0 ? s.decay_steps : c.training.steps;
  const char* end_name =
      s.decay_steps > 0 ? "lr_schedule.decay_steps" : "training.steps, as decay_steps is 0,";
  rules.rule({"lr_schedule.warmup_steps", "lr_schedule.decay_steps", "training.steps"}, [&] {
    return unless(s.warmup_steps <= end, "lr_schedule.warmup_steps (", s.warmup_steps, ") is more than ",
                  end_name, " (", end, ")");
  });
  rules.rule({"lr_schedule.min_lr", "optimizer.lr"}, [&] {
    return unless(s.min_lr <= c.optimizer.lr, "lr_schedule.min_lr (", s.min_lr, ") is above optimizer.lr (",
                  c.optimizer.lr, ")");
  });
  rules.rule({"lr_schedule.init_lr", "optimizer.lr"}, [&] {
    return unless(s.init_lr <= c.optimizer.lr, "lr_schedule.init_lr (", s.init_lr,
                  ") is above optimizer.lr (", c.optimizer.lr, ")");
  });
  rules.rule(
      {"lr_schedule.end_weight_decay", "lr_schedule.weight_decay_style", "optimizer.weight_decay"}, [&] {
        const double end_decay = s.end_weight_decay.value_or(c.optimizer.weight_decay);
        return unless(
            s.weight_decay_style != WeightDecayStyle::constant || end_decay == c.optimizer.weight_decay,
            "lr_schedule.end_weight_decay (", end_decay, ") is not optimizer.weight_decay (",
            c.optimizer.weight_decay,
            "), but weight_decay_style is constant; choose linear or cosine, or null");
      });
  rules.rule({"lr_schedule.wsd_decay_steps", "lr_schedule.style", "lr_schedule.warmup_steps",
              "lr_schedule.decay_steps", "training.steps"},
             [&] {
               if (s.style != LrStyle::wsd || s.warmup_steps > end) return std::string();
               return unless(s.wsd_decay_steps >= 1 && s.wsd_decay_steps <= end - s.warmup_steps,
                             "lr_schedule.wsd_decay_steps must be from 1 to ", end - s.warmup_steps, " (",
                             end_name, " minus warmup_steps) for style wsd, not ", s.wsd_decay_steps);
             });
}

void check_loss_scale(Rules& rules, const TrainingConfig& c) {
  rules.rule({"training.loss_scale", "training.precision"}, [&] {
    return unless(!c.loss_scale || c.precision == Precision::fp16, "training.loss_scale is ", *c.loss_scale,
                  ", but training.precision is ", name_of(c.precision),
                  ": only fp16 scales the loss; leave it null");
  });
  rules.rule({"training.min_loss_scale", "training.initial_loss_scale"}, [&] {
    return unless(c.min_loss_scale <= c.initial_loss_scale, "training.min_loss_scale (", c.min_loss_scale,
                  ") is above training.initial_loss_scale (", c.initial_loss_scale, ")");
  });
}

void check_batches(Rules& rules, const Config& c) {
  const TrainingConfig& t = c.training;
  const bool learned = c.model.position_embedding == PositionKind::learned;
  rules.rule({"training.global_batch_size", "training.micro_batch_size"}, [&] {
    return unless(t.global_batch_size % t.micro_batch_size == 0, "training.global_batch_size (",
                  t.global_batch_size, ") is not a multiple of training.micro_batch_size (",
                  t.micro_batch_size, ")");
  });
  rules.rule({"training.seq_length", "model.max_positions", "model.position_embedding", "model.family"}, [&] {
    return unless(!learned || t.seq_length <= c.model.max_positions, "training.seq_length (", t.seq_length,
                  ") is more than model.max_positions (", c.model.max_positions, ")");
  });
  rules.rule(
      {"training.decoder_seq_length", "model.max_positions", "model.position_embedding", "model.family"},
      [&] {
        return unless(!learned || t.decoder_seq_length.value_or(0) <= c.model.max_positions,
                      "training.decoder_seq_length (", t.decoder_seq_length.value_or(0),
                      ") is more than model.max_positions (", c.model.max_positions, ")");
      });
  rules.rule({"training.micro_batch_size", "training.seq_length", "model.hidden_size",
              "model.ffn_hidden_size", "model.vocab_size", "model.num_heads", "model.head_dim",
              "model.num_experts", "model.router_topk", "model.moe_ffn_hidden_size"},
             [&] {
               const ModelConfig& m = c.model;
               const double widest = std::max(
                   {static_cast<double>(m.hidden_size), 2.0 * static_cast<double>(m.ffn_hidden_size),
                    m.num_experts ? 2.0 * static_cast<double>(m.router_topk * expert_width(m)) : 0.0,
                    static_cast<double>(m.vocab_size), 3.0 * static_cast<double>(m.num_heads * m.head_dim)});
               const double elements =
                   static_cast<double>(t.micro_batch_size) * static_cast<double>(t.seq_length) * widest;
               return unless(elements < kMostElements, "a micro-batch of ", elements,
                             " activations is beyond any machine; lower training.micro_batch_size");
             });
  rules.rule({"training.steps", "training.global_batch_size", "training.seq_length"}, [&] {
    const double tokens = static_cast<double>(t.steps) * static_cast<double>(t.global_batch_size) *
                          static_cast<double>(t.seq_length);
    return unless(tokens < kMostElements, "training.steps * global_batch_size * seq_length = ", tokens,
                  " tokens cannot be counted; lower training.steps");
  });
}

void check_encoder(Rules& rules, const Config& c) {
  const auto encodes = [&] { return spec_of(c.model.family).encoder_decoder; };
  rules.rule({"model.family", "model.encoder_layers", "model.num_layers"}, [&] {
    if (!encodes()) return std::string();
    return unless(c.model.num_layers >= 2 && *c.model.encoder_layers < c.model.num_layers,
                  "model.encoder_layers (", *c.model.encoder_layers, ") of model.num_layers (",
                  c.model.num_layers,
                  "), which counts the encoder's and the decoder's: each has at least one layer");
  });
  rules.rule({"model.family", "model.relative_buckets", "model.relative_max_distance"}, [&] {
    const ModelConfig& m = c.model;
    if (!m.relative_buckets || !m.relative_max_distance) return std::string();
    return unless(*m.relative_max_distance > *m.relative_buckets / 2, "model.relative_max_distance (",
                  *m.relative_max_distance, ") is not above half of model.relative_buckets (",
                  *m.relative_buckets, "), up to which each distance has a bucket of its own");
  });
}

void check_profile(Rules& rules, const Config& c) {
  const std::vector<std::int64_t>& window = c.logging.profile;
  rules.rule({"logging.profile"}, [&]() -> std::string {
    if (window.empty()) return {};
    if (window.size() != 2)
      return detail::concat("logging.profile must be two steps, [START, STOP], not ", window.size());
    return unless(window[0] < window[1], "logging.profile [", window[0], ", ", window[1],
                  "] holds no step: steps START to STOP - 1 are recorded");
  });
  rules.rule({"logging.profile", "training.steps"}, [&]() -> std::string {
    if (window.size() != 2) return {};
    return unless(window[1] - 1 <= c.training.steps, "logging.profile ends with step ", window[1] - 1,
                  ", but training.steps is ", c.training.steps);
  });
}

void check_texts(Rules& rules, const Config& c) {
  rules.rule({"data.split"}, [&] {
    try {
      split_shares(c.data.split);
      return std::string();
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
  });
  static constexpr std::string_view kTrackers[] = {"jsonl",   "tensorboard", "wandb",   "mlflow",  "comet_ml",
                                                   "trackio", "aim",         "clearml", "dvclive", "swanlab"};
  for (const std::string& tracker : c.logging.trackers) {
    rules.rule({"logging.trackers"}, [&]() -> std::string {
      if (tracker == "jsonl") return {};
      const Suggestion known = nearest_name(tracker, kTrackers);
      if (known.distance == 0) {
        return "logging.trackers: '" + tracker +
               "' is not in this build yet; metrics.jsonl is always written, use []";
      }
      return "logging.trackers: " + in_quotes(tracker) + " is no tracker" + suggest(tracker, kTrackers);
    });
  }
}

void add_keys(KeySet& keys, const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) keys.insert(finding.keys.begin(), finding.keys.end());
}

double parse_share(std::string_view text, const std::string& split) {
  double share = -1.0;
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  const auto result = std::from_chars(text.data(), text.data() + text.size(), share);
  const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size();
  if (!whole || !std::isfinite(share) || share < 0.0) {
    throw ConfigError("data.split must be up to three shares such as \"98,1,1\", not " + in_quotes(split));
  }
  return share;
}

}  // namespace

void throw_findings(const std::vector<Finding>& findings) {
  if (findings.empty()) return;
  std::string text;
  for (const Finding& finding : findings) text += (text.empty() ? "" : "\n") + finding.message;
  throw ConfigError(text);
}

std::vector<Finding> check(const Settings& settings, KeySet unreadable) {
  std::vector<Finding> findings;
  RangeCheck ranges("", unreadable, findings);
  describe(ranges, settings);
  add_keys(unreadable, findings);
  Rules rules(std::move(unreadable), findings);
  const Config config = settings;
  check_model(rules, settings.model, config.model);
  check_optimizer(rules, config);
  check_schedule(rules, settings);
  check_loss_scale(rules, config.training);
  check_batches(rules, config);
  check_layout(rules, settings.model, config);
  check_encoder(rules, config);
  check_samples(rules, config);
  check_profile(rules, config);
  check_texts(rules, config);
  return findings;
}

std::vector<Finding> check(const ModelSettings& settings) {
  std::vector<Finding> findings;
  const KeySet unreadable;
  RangeCheck ranges("model.", unreadable, findings);
  describe(ranges, settings);
  KeySet unsound;
  add_keys(unsound, findings);
  Rules rules(std::move(unsound), findings);
  check_model(rules, settings, settings);
  return findings;
}

void validate(const Settings& settings) { throw_findings(check(settings)); }
void validate(const ModelSettings& settings) { throw_findings(check(settings)); }

std::array<double, 3> split_shares(const std::string& split) {
  std::array<double, 3> shares{};
  std::size_t count = 0;
  for (std::size_t begin = 0; begin <= split.size();) {
    const std::size_t comma = std::min(split.find(',', begin), split.size());
    const double share = parse_share(std::string_view(split).substr(begin, comma - begin), split);
    if (count == shares.size())
      throw ConfigError("data.split has more than three shares: " + in_quotes(split));
    shares[count++] = share;
    begin = comma + 1;
  }
  const double sum = shares[0] + shares[1] + shares[2];
  if (!(shares[0] > 0.0) || !std::isfinite(sum)) {
    throw ConfigError("data.split leaves nothing to training: " + in_quotes(split));
  }
  for (double& share : shares) share /= sum;
  return shares;
}

}  // namespace tessera
