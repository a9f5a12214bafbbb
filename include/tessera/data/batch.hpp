#pragma once
/// One step's samples on the host: the struct that goes through loader, engine, pipeline and Python.

#include <cstdint>
#include <vector>

#include "tessera/base/labels.hpp"

namespace tessera {

/// Arrays of [batch * seq_length] are sample-major: the positions of a sample lie together. A sample of an
/// encoder with a decoder has two sequences: the fields that begin with encoder_ are of the one that the
/// encoder reads, all others of the decoder's.
struct Batch {
  std::int64_t batch = 0;
  std::int64_t seq_length = 0;
  std::vector<std::int32_t> tokens{};  ///< [b*s]
  std::vector<std::int32_t> labels{};  ///< [b*s], already shifted: labels[i] is to follow tokens[i]; -100 =
                                       ///< ignored; empty = no targets
  std::vector<std::int32_t> position_ids{};  ///< [b*s]; empty = 0..s-1
  std::vector<std::int32_t>
      key_begin{};                      ///< [b] keys [key_begin, key_end) may be attended to; empty = from 0
  std::vector<std::int32_t> key_end{};  ///< [b]; empty = to s
  std::vector<std::int32_t> document_ids{};  ///< [b*s] attention stays within equal ids; empty = one document
  std::vector<std::int32_t> token_types{};   ///< [b*s] such as BERT's segments; empty = all 0
  std::vector<std::int32_t> sample_labels{};  ///< [b] what a head for whole samples learns; -100 = ignored
  std::int64_t encoder_seq_length = 0;        ///< positions e of the encoder's sequence; 0 = there is none
  std::vector<std::int32_t>
      encoder_tokens{};  ///< [b*e]; what the encoder and, by its result, the decoder read
  std::vector<std::int32_t> encoder_key_begin{};  ///< [b] real tokens are [begin, end): others are seen by
                                                  ///< neither encoder nor decoder; empty = from 0
  std::vector<std::int32_t> encoder_key_end{};    ///< [b]; empty = to e
  std::int64_t sample0 = 0;                       ///< number of sample 0 in the global batch
  std::int64_t sample_block = 0;   ///< samples come in runs of so many, 0 = one run (all are consecutive) ...
  std::int64_t sample_stride = 0;  ///< ... and run k begins at number sample0 + k * sample_stride
  static constexpr std::int64_t kUnknown = -1;  ///< until ranks have told each other (engine/agreement.hpp)
  /// Samples of all data ranks together; 0 = as if all had as many as this one, until ranks have told each
  /// other; kUnknown = neither it nor sample0.
  std::int64_t global_batch = 0;
  std::int64_t most_samples = 0;             ///< of any data rank, where it is known; 0 = as many as here
  std::int64_t global_targets = kUnknown;    ///< labels of all data ranks together that count
  std::int64_t global_positions = kUnknown;  ///< positions of all data ranks together
  std::int64_t global_sample_targets = kUnknown;  ///< sample_labels of all data ranks that count
};

/// Number of local sample i in the global batch.
inline std::int64_t global_sample(const Batch& batch, std::int64_t i) {
  if (batch.sample_block <= 0) return batch.sample0 + i;
  return batch.sample0 + i / batch.sample_block * batch.sample_stride + i % batch.sample_block;
}

/// Positions whose label counts.
std::int64_t count_targets(const Batch& batch);

/// Samples whose label counts.
std::int64_t count_sample_targets(const Batch& batch);

/// Samples [first, first + count), as a batch of its own with the right sample numbers. Errors:
/// InvalidArgument out of range, or when the piece covers parts of several runs of samples.
Batch slice(const Batch& batch, std::int64_t first, std::int64_t count);

/// One more than the largest position of the batch, in either sequence; 0 without samples.
std::int64_t position_count(const Batch& batch);

/// Errors: InvalidArgument for array sizes that do not fit together, DataError for a token, label, position
/// or key range out of bounds, naming sample and position. vocab_size 0 leaves ids unchecked above, and
/// `positions` 0 position ids.
void validate(const Batch& batch, std::int64_t vocab_size, std::int64_t positions = 0);

/// What only some models read: `token_types` types of tokens and `sample_classes` classes of samples, 0 =
/// none; `encodes`: an encoder's sequence, which these models must have. Errors: as validate; InvalidArgument
/// for what the model does not read.
void validate_extras(const Batch& batch, std::int64_t token_types, std::int64_t sample_classes,
                     bool encodes = false);

}  // namespace tessera
