#include "engine/run_data.hpp"
#include "tessera/base/config.hpp"
#include "tessera/data/bert_dataset.hpp"
#include "tessera/data/t5_dataset.hpp"

namespace tessera {

ModelSpec::Samples samples_of(const Config& config) { return spec_of(config.model.family).samples; }

namespace {

std::vector<BlendMember> members_of(const std::vector<std::pair<double, std::string>>& paths) {
  std::vector<BlendMember> members;
  for (const auto& [weight, prefix] : paths) {
    const bool weighted = paths.size() > 1 && weight != kWeightBySize;
    members.push_back({weighted ? std::optional(weight) : std::nullopt, prefix});
  }
  return members;
}

/// What every kind of samples has.
SplitsOptions splits_of(const Config& config, const std::function<void()>& on_progress) {
  const TrainingConfig& t = config.training;
  SplitsOptions options;
  options.members = members_of(config.data.path);
  options.split_members = {members_of(config.data.train_path), members_of(config.data.valid_path),
                           members_of(config.data.test_path)};
  options.files.loading = config.data.loader;
  const std::int64_t evaluations = t.eval_interval > 0 ? 1 : 0;
  options.split = config.data.split;
  options.num_samples = {t.steps * t.global_batch_size, evaluations * t.eval_iters * t.global_batch_size, 0};
  options.files.vocab_size = config.model.vocab_size;
  options.files.on_progress = on_progress;
  return options;
}

MaskingOptions masking_of(const DataConfig& d, const MaskingOptions& usual) {
  return {.mask_prob = d.mask_prob,
          .max_ngram = d.masking_max_ngram.value_or(usual.max_ngram),
          .whole_words = d.masking_do_full_word,
          .longer_ngrams = d.masking_use_longer_ngrams,
          .geometric = d.masking_use_geometric_distribution.value_or(usual.geometric)};
}

DatasetSplits open_bert(const Config& config, const RunTokenizer& tokenizer,
                        const std::function<void()>& on_progress) {
  const DataConfig& d = config.data;
  return build_bert_data({splits_of(config, on_progress),
                          {.seq_length = config.training.seq_length,
                           .seed = static_cast<std::uint32_t>(config.training.seed),
                           .binary_head = config.model.binary_head.value_or(false),
                           .short_seq_prob = d.short_seq_prob,
                           .masking = masking_of(d, BertDatasetOptions{}.masking),
                           .special = tokenizer.special,
                           .vocab_size = tokenizer.ids,
                           .cache_folder = d.cache_dir.value_or(""),
                           .on_progress = on_progress}});
}

DatasetSplits open_t5(const Config& config, const RunTokenizer& tokenizer,
                      const std::function<void()>& on_progress) {
  const DataConfig& d = config.data;
  const SampleLengths lengths = sample_lengths(config);
  return build_t5_data({splits_of(config, on_progress),
                        {.encoder_length = lengths.encoder,
                         .decoder_length = lengths.tokens,
                         .seed = static_cast<std::uint32_t>(config.training.seed),
                         .short_seq_prob = d.short_seq_prob,
                         .masking = masking_of(d, T5DatasetOptions{}.masking),
                         .special = tokenizer.special,
                         .vocab_size = tokenizer.ids,
                         .cache_folder = d.cache_dir.value_or(""),
                         .on_progress = on_progress}});
}

}  // namespace

DatasetSplits open_run_data(const Config& config, const RunTokenizer& tokenizer,
                            const std::function<void()>& on_progress) {
  if (samples_of(config) == ModelSpec::Samples::masked_sentences)
    return open_bert(config, tokenizer, on_progress);
  if (samples_of(config) == ModelSpec::Samples::corrupted_spans)
    return open_t5(config, tokenizer, on_progress);
  GptDataOptions options{splits_of(config, on_progress), {}};
  options.dataset.seq_length = config.training.seq_length;
  options.dataset.seed = static_cast<std::uint32_t>(config.training.seed);
  // Data that nothing is known of are taken for bytes; check_run_data() saw whether they can be.
  options.dataset.end_of_document = tokenizer.record.value_or(TokenizerRecord{}).end_of_document;
  options.dataset.reset_position_ids = config.data.reset_position_ids;
  options.dataset.reset_attention_mask = config.data.reset_attention_mask;
  options.dataset.eod_mask_loss = config.data.eod_mask_loss;
  options.dataset.cache_folder = config.data.cache_dir.value_or("");
  options.dataset.on_progress = on_progress;
  return build_gpt_data(options);
}

}  // namespace tessera
