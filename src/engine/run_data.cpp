#include "engine/run_data.hpp"

#include <cmath>
#include <filesystem>

#include "tessera/data/dataset_record.hpp"
#include "tessera/data/gpt_indices.hpp"
#include "tessera/data/id_check.hpp"
#include "tessera/data/split.hpp"

namespace tessera {
namespace {

std::optional<DatasetRecord> record_of(const Config& config) {
  std::vector<std::string> prefixes;
  for (const auto& [weight, prefix] : config.data.path) prefixes.push_back(prefix);
  return shared_record(prefixes);
}

std::int32_t end_of_document(const Config& config) {
  const DataConfig& data = config.data;
  if (const auto record = record_of(config)) return record->tokenizer.end_of_document;
  if (data.tokenizer == "bytes") return TokenizerRecord{}.end_of_document;
  if (!data.reset_position_ids && !data.reset_attention_mask && !data.eod_mask_loss) return -1;
  const std::int32_t id = describe_tokenizer({.model = data.tokenizer}).end_of_document;
  TESSERA_ENSURE(ConfigError, id >= 0,
                 "data.reset_position_ids, data.reset_attention_mask and data.eod_mask_loss ",
                 "need the end of a document, and data.tokenizer ", data.tokenizer,
                 " names none: put tokenizer_config.json with its eos_token beside it");
  return id;
}

/// What data.tokenizer calls the tokenizer of a record.
std::string name_of(const TokenizerRecord& tokenizer) {
  if (tokenizer.merge_file.empty()) return tokenizer.file;
  const std::filesystem::path vocab = tokenizer.file, folder = vocab.parent_path();
  TESSERA_ENSURE(ConfigError,
                 vocab.filename() == "vocab.json" && folder / "merges.txt" == tokenizer.merge_file,
                 "the data were made with ", tokenizer.file, " and ", tokenizer.merge_file,
                 ": put them into one folder as vocab.json and merges.txt, and name it in data.tokenizer");
  return folder.string();
}

}  // namespace

Config with_tokenizer_of_data(Config config, const Logger& log) {
  const auto record = record_of(config);
  if (!record) return config;
  const TokenizerRecord& made = record->tokenizer;
  TESSERA_ENSURE(ConfigError, made.vocab_size <= config.model.vocab_size, "model.vocab_size is ",
                 config.model.vocab_size, ", but data.path was made with ", to_text(made),
                 ": set it to at least ", made.vocab_size);
  std::string& tokenizer = config.data.tokenizer;
  if (tokenizer == "bytes" && made.type != "bytes") {
    tokenizer = name_of(made);
    log.info("data.tokenizer: ", tokenizer, ", which the data were made with");
    return config;
  }
  const TokenizerRecord given =
      tokenizer == "bytes" ? TokenizerRecord{} : describe_tokenizer({.model = tokenizer});
  TESSERA_ENSURE(ConfigError, same_ids(given, made), "data.tokenizer is ", to_text(given),
                 ", but data.path was made with ", to_text(made),
                 ": leave data.tokenizer out, or make the data again (tessera preprocess)");
  if (tokenizer != "bytes") tokenizer = name_of(given);  // the run is used from other folders too
  return config;
}

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
  options.dataset.end_of_document = end_of_document(config);
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
