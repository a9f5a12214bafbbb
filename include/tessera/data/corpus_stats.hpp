#pragma once
/// What a corpus gives away without a network: baselines a trained model has to beat.

#include <cstdint>

#include "tessera/data/indexed_dataset.hpp"
#include "tessera/data/split.hpp"

namespace tessera {

struct CorpusBaselines {
  double unigram = 0;  ///< nats per token (per byte, with the byte tokenizer) under token frequencies
  double bigram = 0;   ///< under frequencies of a token after the one before it
  std::int64_t train_tokens = 0;
  std::int64_t valid_tokens = 0;
};

/// Cross-entropy of the validation sequences under counts of the training sequences, one added to every
/// count. Each range is read as one stream; its first token has no predecessor and is left out of the bigram
/// figure. Errors: InvalidArgument for a vocabulary above 8192 (the table is vocabulary squared), DataError
/// for a range without two tokens.
CorpusBaselines corpus_baselines(const IndexedDataset& data, ElementRange train, ElementRange valid,
                                 std::int64_t vocab_size);

}  // namespace tessera
