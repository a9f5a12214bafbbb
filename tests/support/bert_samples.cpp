// What tests/python/test_bert_data.py compares: the first COUNT training samples of a configuration, one JSON
// object a line, and before them the sample map. Usage: bert_samples CONFIG.yaml COUNT [section.key=value
// ...]

#include <iostream>
#include <nlohmann/json.hpp>

#include "engine/run_data.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/data/bert_dataset.hpp"

using namespace tessera;

namespace {

using Ids = std::vector<std::int32_t>;

nlohmann::json sample_of(const Dataset& data, std::int64_t index) {
  const auto s = static_cast<std::size_t>(data.seq_length());
  const SampleFields fields = data.fields();
  Ids tokens(s), labels(s), types(fields.token_types ? s : 0), end(1), label(fields.sample_label ? 1 : 0);
  data.fetch(
      index,
      {.tokens = tokens, .labels = labels, .token_types = types, .key_end = end, .sample_label = label});
  return {{"tokens", tokens}, {"labels", labels}, {"types", types}, {"end", end}, {"label", label}};
}

nlohmann::json map_of(const BertDataset& data) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(3 * data.size()));
  data.map().rows.read(0, rows);
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Config config = load_config(argv[1], {argv + 3, argv + argc});
    const DatasetSplits data = open_run_data(config, tokenizer_of_run(config, Logger::silent()), {});
    std::cout << map_of(dynamic_cast<const BertDataset&>(*data.train)) << "\n";
    for (std::int64_t i = 0; i < std::stoll(argv[2]); ++i) std::cout << sample_of(*data.train, i) << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
