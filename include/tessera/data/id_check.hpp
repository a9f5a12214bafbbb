#pragma once
/// Whether a dataset fits a vocabulary, asked before a run instead of when a sample is drawn.

#include <functional>

#include "tessera/data/indexed_dataset.hpp"

namespace tessera {

/// Looks for ids at or above data.vocab_size(): everywhere in up to 2^27 tokens; in larger data in pieces
/// spread evenly over it and at ends of documents, where the largest id often is. Returns the largest it
/// read, -1 if there are none. `on_progress` is called after each piece. Errors: DataError.
std::int32_t check_ids(const IndexedDataset& data, const std::function<void()>& on_progress = {});

}  // namespace tessera
