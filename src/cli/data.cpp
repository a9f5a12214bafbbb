#include <algorithm>
#include <iostream>
#include <memory>
#include <random>

#include "cli/model_command.hpp"
#include "tessera/data/dataset_tools.hpp"
#include "tessera/data/id_check.hpp"

namespace tessera::cli {
namespace {

struct DataArguments {
  std::vector<std::string> prefixes;
  DatasetTarget target;
  std::string split, tokenizer;
  std::int64_t parts = 0, count = 5, seed = 1234, max_tokens = 200;
  std::vector<std::int64_t> documents;
  bool check_ids = false;
};

void print_info(const DataArguments& a) {
  for (const std::string& prefix : datasets_in(a.prefixes)) {
    const DatasetInfo i = describe_dataset(prefix);
    std::cout << prefix << "\n  format " << (i.format == IndexFormat::tntidx ? "TNTIDX" : "MMIDIDX")
              << ", tokens as " << i.dtype << (i.has_modes ? ", with modes" : "") << "\n  " << i.documents
              << " documents, " << i.sequences << " sequences, " << i.tokens << " tokens\n  .idx "
              << i.index_bytes << " bytes, .bin " << i.token_bytes
              << " bytes\n  tokens of a document: " << i.shortest << " to " << i.longest << ", median "
              << i.median << "; " << i.empty_documents << " empty\n";
    if (i.record) {
      std::cout << "  tokenizer " << to_text(i.record->tokenizer)
                << (i.record->append_eod ? "; documents end with their token" : "")
                << (i.record->split_sentences ? "; sequences are sentences" : "") << "\n";
    } else {
      std::cout << "  no record of its tokenizer (PREFIX.tessera.json)\n";
    }
    if (a.check_ids) std::cout << "  largest id " << check_ids(IndexedDataset(prefix)) << "\n";
    std::cout << std::flush;
  }
}

/// What decodes: `given`, else what the dataset says of itself, where its files are still there.
std::unique_ptr<Tokenizer> decoder_of(const std::string& prefix, const std::string& given,
                                      const Program& program) {
  TokenizerOptions options;
  if (!given.empty()) {
    options = tokenizer_named(given);
  } else {
    const auto record = read_dataset_record(prefix);
    std::error_code error;
    const bool there =
        record && (record->tokenizer.file.empty() || std::filesystem::exists(record->tokenizer.file, error));
    if (!there) return nullptr;
    options = options_of(record->tokenizer);
  }
  options.python = program.environment.python.value_or("python3");
  return make_tokenizer(options);
}

/// Documents in the order in which they are drawn: `count` of them, no one twice.
std::vector<std::int64_t> drawn(std::int64_t documents, std::int64_t count, std::int64_t seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  std::vector<std::int64_t> out;
  for (count = std::min(count, documents); static_cast<std::int64_t>(out.size()) < count;) {
    const auto pick = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(documents));
    if (std::ranges::find(out, pick) == out.end()) out.push_back(pick);
  }
  return out;
}

void print_sample(const DataArguments& a, const Program& program) {
  const IndexedDataset data(a.prefixes.front());
  for (const std::int64_t d : a.documents) {
    TESSERA_ENSURE(ConfigError, d >= 0 && d < data.documents(), "--documents ", d, ": ", data.prefix(),
                   " has ", data.documents());
  }
  const auto decoder = decoder_of(data.prefix(), a.tokenizer, program);
  const auto chosen = a.documents.empty() ? drawn(data.documents(), a.count, a.seed) : a.documents;
  for (const std::int64_t d : chosen) {
    std::vector<std::int32_t> ids = data.document(d);
    const auto all = static_cast<std::int64_t>(ids.size());
    ids.resize(static_cast<std::size_t>(std::min(all, a.max_tokens)));
    std::cout << "document " << d << ", " << all << " tokens";
    if (static_cast<std::int64_t>(ids.size()) < all) std::cout << ", the first " << ids.size();
    std::cout << "\n ";
    for (const std::int32_t id : ids) std::cout << " " << id;
    std::cout << "\n";
    if (decoder != nullptr) std::cout << decoder->decode(ids) << "\n";
  }
  std::cout << std::flush;
}

void run_split(const DataArguments& a) {
  TESSERA_ENSURE(ConfigError, a.split.empty() != (a.parts == 0), "give --split SHARES or --parts N");
  const IndexedDataset data(a.prefixes.front());
  const auto parts = a.parts > 0 ? parts_of_count(data, a.parts) : parts_of_split(data, a.split);
  const auto written = split_dataset(data, parts, a.target);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::cout << written[i] << ".{idx,bin}: " << parts[i].documents.end - parts[i].documents.begin
              << " documents" << std::endl;
  }
}

void tell_written(const std::string& prefix) {
  const DatasetInfo info = describe_dataset(prefix);
  std::cout << prefix << ".{idx,bin}: " << info.documents << " documents, " << info.tokens << " tokens"
            << std::endl;
}

using Arguments = std::shared_ptr<DataArguments>;

CLI::App* add_one(CLI::App& data, const Arguments& a, const char* name, const char* meaning, bool several) {
  auto* command = data.add_subcommand(name, meaning);
  command
      ->add_option("prefix", a->prefixes,
                   several ? "prefixes of .idx/.bin, or folders of them" : "prefix of an .idx/.bin pair")
      ->required()
      ->expected(1, several ? 1 << 20 : 1);
  return command;
}

void add_target(CLI::App& command, const Arguments& a) {
  command.add_option("--output-prefix,--output_prefix", a->target.prefix, "where to write")->required();
  command.add_flag("--overwrite", a->target.overwrite, "replace datasets that are there");
}

void add_split(CLI::App& data, const Arguments& a) {
  auto* split = add_one(data, a, "split", "Cut a dataset by documents", false);
  split->add_option("--split", a->split,
                    "shares such as 98,1,1: writes PREFIX_train, PREFIX_valid and PREFIX_test");
  split->add_option("--parts", a->parts, "as many parts of about as many tokens: PREFIX_0, PREFIX_1, ...");
  add_target(*split, a);
  split->callback([a] { run_split(*a); });
}

void add_sample(CLI::App& data, const Arguments& a, Program& program) {
  auto* sample = add_one(data, a, "sample", "Print documents, as text where their tokenizer is known", false);
  sample->add_option("--documents", a->documents, "which documents; else some are drawn");
  sample->add_option("--count", a->count, "how many to draw")->capture_default_str();
  sample->add_option("--seed", a->seed, "of the draw")->capture_default_str();
  sample->add_option("--max-tokens,--max_tokens", a->max_tokens, "of each document")->capture_default_str();
  sample->add_option("--tokenizer", a->tokenizer,
                     "bytes, or a tokenizer.json or vocab.txt; else what the dataset's record names");
  sample->callback([a, &program] { print_sample(*a, program); });
}

}  // namespace

void add_data(CLI::App& app, Program& program) {
  auto* data = app.add_subcommand("data", "Look at, join, cut and upgrade indexed datasets");
  data->require_subcommand(1);
  const auto a = std::make_shared<DataArguments>();
  auto* info = add_one(*data, a, "info", "Say what datasets hold", true);
  info->add_flag("--check-ids,--check_ids", a->check_ids,
                 "also read tokens (all of up to 2^27, of more a part), and say the largest");
  info->callback([a] { print_info(*a); });
  add_sample(*data, a, program);
  auto* merge = add_one(*data, a, "merge", "Join datasets in the order given", true);
  add_target(*merge, a);
  merge->callback([a] {
    merge_datasets(datasets_in(a->prefixes), a->target);
    tell_written(a->target.prefix);
  });
  add_split(*data, a);
  auto* upgrade =
      add_one(*data, a, "upgrade", "Write a dataset of the older layout (TNTIDX) as today's", false);
  add_target(*upgrade, a);
  upgrade->callback([a] {
    upgrade_dataset(a->prefixes.front(), a->target);
    tell_written(a->target.prefix);
  });
}

}  // namespace tessera::cli
