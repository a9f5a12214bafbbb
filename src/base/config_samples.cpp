// Rules of what training samples are made of.
#include <algorithm>
#include <cmath>

#include "base/config_rules.hpp"
#include "tessera/base/families.hpp"

namespace tessera {
namespace {

/// Tokens of a sample that are masked at most, of so many without special ones.
double masked_tokens(const Config& c, std::int64_t tokens) {
  return c.data.mask_prob * static_cast<double>(tokens);
}

void check_sentences(Rules& rules, const Config& c, std::int64_t specials, const char* what) {
  const std::int64_t length = c.training.seq_length, tokens = length - specials;
  // Samples that a script brings are as long as they are.
  const bool drawn = c.data.names_data();
  rules.rule({"model.family", "training.seq_length"}, [&] {
    return unless(!drawn || tokens >= 2, "training.seq_length (", length, ") is too short for model.family ",
                  c.model.family.name, ": a sample has ", what, " and at least two tokens");
  });
  rules.rule({"model.family", "training.seq_length", "data.mask_prob"}, [&] {
    return unless(!drawn || tokens < 2 || masked_tokens(c, tokens) >= 1, "data.mask_prob (", c.data.mask_prob,
                  ") of the ", tokens,
                  " tokens of a sample is less than one token, so that nothing would be masked: raise it, or "
                  "training.seq_length (",
                  length, ")");
  });
}

/// Of an encoder and a decoder.
void check_spans(Rules& rules, const Config& c) {
  const DataConfig& d = c.data;
  check_sentences(rules, c, 2, "room for a start and an end");
  rules.rule({"model.family", "training.seq_length", "training.decoder_seq_length", "data.mask_prob"}, [&] {
    const SampleLengths lengths = sample_lengths(c);
    const double masked = std::floor(masked_tokens(c, lengths.encoder - 2));
    return unless(!d.names_data() || masked + 2 <= static_cast<double>(lengths.tokens),
                  "training.decoder_seq_length (", lengths.tokens, ") has no room for the ", masked,
                  " tokens that data.mask_prob (", d.mask_prob,
                  ") leaves out of a full sample, a sentinel and the start");
  });
  rules.rule({"data.sentinel_ids", "data.vocab_extra_ids", "model.vocab_size"}, [&]() -> std::string {
    if (d.sentinel_ids.empty()) return {};
    if (d.sentinel_ids.size() != 2)
      return detail::concat("data.sentinel_ids must be two ids, [FIRST, LAST], not ", d.sentinel_ids.size());
    if (d.vocab_extra_ids > 0)
      return "data.sentinel_ids and data.vocab_extra_ids both say which sentinels there are: give one";
    const std::int64_t highest = std::max(d.sentinel_ids[0], d.sentinel_ids[1]);
    return unless(highest < c.model.vocab_size, "data.sentinel_ids (", highest,
                  ") is not below model.vocab_size (", c.model.vocab_size, ")");
  });
}

/// Data are named in one way.
void check_paths(Rules& rules, const DataConfig& d) {
  rules.rule({"data.path", "data.train_path", "data.valid_path", "data.test_path", "data.args_path",
              "data.per_split_args_path"},
             [&]() -> std::string {
               const int ways = static_cast<int>(!d.path.empty()) + static_cast<int>(d.names_splits()) +
                                static_cast<int>(d.args_path.has_value()) +
                                static_cast<int>(d.per_split_args_path.has_value());
               if (ways > 1)
                 return "data.path, data.train_path (with valid_path and test_path), data.args_path and "
                        "data.per_split_args_path each say which data are read: give one of them";
               return unless(!d.names_splits() || !d.train_path.empty(),
                             "data.valid_path and data.test_path go with data.train_path: give it too");
             });
}

}  // namespace

void check_samples(Rules& rules, const Config& c) {
  const DataConfig& d = c.data;
  check_paths(rules, d);
  using Samples = ModelSpec::Samples;
  const auto kind = [&] { return spec_of(c.model.family).samples; };
  rules.rule({"model.family", "data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss"},
             [&] {
               const bool any = d.reset_position_ids || d.reset_attention_mask || d.eod_mask_loss;
               return unless(!any || kind() == Samples::tokens,
                             "data.reset_position_ids, reset_attention_mask and eod_mask_loss are about ends "
                             "of documents within a sample; a sample of model.family ",
                             c.model.family.name, " is of one document");
             });
  rules.rule({"model.family", "training.decoder_seq_length"}, [&] {
    return unless(!c.training.decoder_seq_length || kind() == Samples::corrupted_spans,
                  "training.decoder_seq_length is for models with an encoder and a decoder; model.family ",
                  c.model.family.name, " has one of them: set training.seq_length");
  });
  if (kind() == Samples::masked_sentences) check_sentences(rules, c, 3, "[CLS], two [SEP]");
  if (kind() == Samples::corrupted_spans) check_spans(rules, c);
  const std::pair<const char*, const std::optional<std::int64_t>*> ids[] = {
      {"data.cls_id", &d.cls_id}, {"data.sep_id", &d.sep_id}, {"data.mask_id", &d.mask_id},
      {"data.pad_id", &d.pad_id}, {"data.bos_id", &d.bos_id}, {"data.eos_id", &d.eos_id}};
  for (const auto& each : ids) {
    const char* const key = each.first;
    const std::optional<std::int64_t>* const id = each.second;
    rules.rule({key, "model.vocab_size", "model.family"}, [&] {
      return unless(kind() == Samples::tokens || id->value_or(0) < c.model.vocab_size, key, " (",
                    id->value_or(0), ") is not below model.vocab_size (", c.model.vocab_size, ")");
    });
  }
}

}  // namespace tessera
