#include "engine/run_data.hpp"

#include <cmath>

#include "tessera/data/gpt_indices.hpp"
#include "tessera/data/id_check.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

GptData open_run_data(const Config& config) {
  const TrainingConfig& t = config.training;
  GptDataOptions options;
  for (const auto& [weight, prefix] : config.data.path) {
    options.members.push_back({config.data.path.size() > 1 ? std::optional(weight) : std::nullopt, prefix});
  }
  const std::int64_t evaluations = t.eval_interval > 0 ? 1 : 0;
  options.split = config.data.split;
  options.num_samples = {t.steps * t.global_batch_size, evaluations * t.eval_iters * t.global_batch_size, 0};
  options.dataset.seq_length = t.seq_length;
  options.dataset.seed = static_cast<std::uint32_t>(t.seed);
  options.dataset.end_of_document = config.data.tokenizer == "bytes" ? 256 : -1;
  options.dataset.reset_position_ids = config.data.reset_position_ids;
  options.dataset.reset_attention_mask = config.data.reset_attention_mask;
  options.dataset.eod_mask_loss = config.data.eod_mask_loss;
  options.dataset.cache_folder = config.data.cache_dir.value_or("");
  options.files.vocab_size = config.model.vocab_size;
  return build_gpt_data(options);
}

void check_run_data(const Config& config, const Logger& log) {
  const TrainingConfig& t = config.training;
  const SplitBounds bounds = parse_split(config.data.split);
  double weights = 0;
  for (const auto& [weight, prefix] : config.data.path) weights += weight;
  for (const auto& [weight, prefix] : config.data.path) {
    const IndexedDataset data(prefix, {.vocab_size = config.model.vocab_size});
    check_ids(data);
    if (!bounds.front() || weight <= 0) continue;
    const ElementRange range = *split_ranges(bounds, data.sequences()).front();
    const auto tokens = static_cast<double>(count_tokens(data.lengths(), range.begin, range.end));
    const double read = static_cast<double>(t.steps * t.global_batch_size * t.seq_length) * weight / weights;
    if (tokens == 0 || read <= 2 * tokens) continue;
    log.info(prefix, ": its ", static_cast<std::int64_t>(tokens), " training tokens are read ",
             std::llround(read / tokens), " times in training.steps ", t.steps,
             ". Watch eval_loss: it rises where a model learns its text by heart");
  }
}

}  // namespace tessera
