#pragma once
/// What `tessera data` does with indexed datasets: look at them, join them, cut them, bring old ones up to
/// date.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/dataset_record.hpp"
#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

struct DatasetInfo {
  IndexFormat format = IndexFormat::mmididx;
  DType dtype = DType::u16;
  std::int64_t documents = 0;
  std::int64_t empty_documents = 0;
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
  std::int64_t index_bytes = 0, token_bytes = 0;
  bool has_modes = false;
  /// Tokens of a document: the least, the middle one of all in order, the most.
  std::int64_t shortest = 0, median = 0, longest = 0;
  std::optional<DatasetRecord> record{};
};
/// From the .idx and the record alone. Errors: DataError.
DatasetInfo describe_dataset(const std::string& prefix);

struct DatasetTarget {
  std::string prefix{};
  bool overwrite = false;  ///< replace what is there
};

/// Writes a dataset of the older layout (TNTIDX) as today's. Errors: ConfigError if it is one already or the
/// target is there; DataError; IoError.
void upgrade_dataset(const std::string& from, const DatasetTarget& target);

/// Datasets named one by one, or all of a folder in the order of names. Errors: DataError for a folder
/// without.
std::vector<std::string> datasets_in(std::span<const std::string> names);
/// Joins datasets in the order given, with the record that they share. Errors: ConfigError if their element
/// types, tokenizers or kinds of sequences differ or the target is there; DataError; IoError.
void merge_datasets(std::span<const std::string> parts, const DatasetTarget& target);

/// Documents of a dataset that become one of their own.
struct DatasetPart {
  std::string suffix{};  ///< of the target's prefix: "_train"
  ElementRange documents{};
};
/// Shares of documents, as data.split has them: "_train", "_valid", "_test"; none of a share of 0.
std::vector<DatasetPart> parts_of_split(const IndexedDataset& data, const std::string& split);
/// `count` parts of about as many tokens: "_0", "_1", ... Errors: ConfigError for less than 1, or more than
/// documents.
std::vector<DatasetPart> parts_of_count(const IndexedDataset& data, std::int64_t count);
/// Writes each part, with the record of the whole; returns their prefixes. Errors: ConfigError if one of the
/// targets is there; DataError; IoError.
std::vector<std::string> split_dataset(const IndexedDataset& data, std::span<const DatasetPart> parts,
                                       const DatasetTarget& target);

}  // namespace tessera
