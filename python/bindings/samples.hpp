#pragma once
/// What the files that bind samples of indexed datasets share.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.hpp"
#include "tessera/data/batch.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/dataset_record.hpp"

namespace tessera::bindings {

/// Samples of one split, and what Python sees of a batch of them. Copies share the samples.
struct IndexedSamples {
  std::shared_ptr<const Dataset> dataset;
  std::function<pybind11::dict(const Batch&)> columns;  ///< called with the interpreter lock
  std::optional<TokenizerRecord> tokenizer{};           ///< what made the ids, where their files say
};

/// Of training, validation and test; none = one epoch.
using SampleCounts = std::array<std::optional<std::int64_t>, 3>;

/// A new column of int64 in the batch that Python gets.
std::int64_t* add_column(pybind11::dict& out, const char* name, const std::vector<pybind11::ssize_t>& shape);
void add_copy(pybind11::dict& out, const char* name, const std::vector<pybind11::ssize_t>& shape,
              const std::vector<std::int32_t>& values);

/// The three splits as Python sees them, None for one without a share; tells of caches that were damaged.
/// `kind`: columns and tokenizer of all.
pybind11::tuple splits_of(const DatasetSplits& data, const IndexedSamples& kind);

/// What is known of the data. Errors: as shared_record.
std::optional<DatasetRecord> record_of(const SplitsOptions& options);
/// Data whose record names a tokenizer must fit the model's vocabulary (0: unknown); others are looked
/// through for ids beyond it. Errors: ConfigError, DataError.
void check_vocabulary(const std::optional<DatasetRecord>& record, const SplitsOptions& options);

/// Samples of sentences, as BERT and T5 are trained on them.
void bind_sentences(pybind11::module_& module);

}  // namespace tessera::bindings
