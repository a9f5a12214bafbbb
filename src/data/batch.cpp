#include "tessera/data/batch.hpp"

#include <algorithm>
#include <limits>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

std::vector<std::int32_t> piece(const std::vector<std::int32_t>& all, std::int64_t begin, std::int64_t end) {
  if (all.empty()) return {};
  return {all.begin() + begin, all.begin() + end};
}

void check_size(const std::vector<std::int32_t>& array, std::int64_t expected, const char* name,
                bool optional) {
  const auto size = static_cast<std::int64_t>(array.size());
  TESSERA_CHECK((optional && size == 0) || size == expected, "batch.", name, " has ", size, " values, not ",
                expected);
}

/// Every value in [0, limit), or equal to `also`; `length` values a sample.
void check_range(const Batch& batch, const std::vector<std::int32_t>& array, std::int64_t length,
                 std::int64_t limit, std::int64_t also, const char* name, const char* remedy) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    const std::int64_t value = array[i];
    const auto at = static_cast<std::int64_t>(i);
    TESSERA_ENSURE(DataError, (value >= 0 && value < limit) || value == also, "batch: sample ",
                   global_sample(batch, at / length), ", position ", at % length, ": ", name, " ", value,
                   " is not in [0, ", limit, "). ", remedy);
  }
}

/// Each sample's range of real tokens lies in its `length` positions.
void check_keys(const Batch& batch, const std::vector<std::int32_t>& begins,
                const std::vector<std::int32_t>& ends, std::int64_t length, const char* name) {
  for (std::int64_t i = 0; i < batch.batch; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t begin = begins.empty() ? 0 : begins[at];
    const std::int64_t end = ends.empty() ? length : ends[at];
    TESSERA_ENSURE(DataError, begin >= 0 && begin <= end && end <= length, "batch: sample ",
                   global_sample(batch, i), ": ", name, " [", begin, ", ", end, ") of ", length);
  }
}

void check_encoder_sizes(const Batch& batch) {
  const std::int64_t length = batch.encoder_seq_length;
  TESSERA_CHECK(length >= 0 && batch.batch <= std::numeric_limits<std::int64_t>::max() /
                                                  std::max<std::int64_t>(length, 1),
                "batch of ", batch.batch, " x ", length, " positions of the encoder");
  check_size(batch.encoder_tokens, batch.batch * length, "encoder_tokens", false);
  check_size(batch.encoder_key_begin, length > 0 ? batch.batch : 0, "encoder_key_begin", true);
  check_size(batch.encoder_key_end, length > 0 ? batch.batch : 0, "encoder_key_end", true);
}

}  // namespace

std::int64_t count_targets(const Batch& batch) {
  return static_cast<std::int64_t>(batch.labels.size()) -
         std::count(batch.labels.begin(), batch.labels.end(), kIgnoredLabel);
}

std::int64_t count_sample_targets(const Batch& batch) {
  return static_cast<std::int64_t>(batch.sample_labels.size()) -
         std::count(batch.sample_labels.begin(), batch.sample_labels.end(), kIgnoredLabel);
}

std::int64_t position_count(const Batch& batch) {
  if (batch.batch == 0) return 0;
  if (batch.position_ids.empty()) return std::max(batch.seq_length, batch.encoder_seq_length);
  return std::int64_t{1} + *std::max_element(batch.position_ids.begin(), batch.position_ids.end());
}

Batch slice(const Batch& batch, std::int64_t first, std::int64_t count) {
  TESSERA_CHECK(first >= 0 && count >= 0 && count <= batch.batch && first <= batch.batch - count, "samples [",
                first, ", ", first + count, ") of a batch of ", batch.batch);
  const std::int64_t run =
      batch.sample_block > 0 ? batch.sample_block : std::max<std::int64_t>(batch.batch, 1);
  const bool one_run = count == 0 || first / run == (first + count - 1) / run;
  TESSERA_CHECK(one_run || first % run == 0, "samples [", first, ", ", first + count,
                ") begin inside a run of ", run, " consecutive samples and end in another");
  const std::int64_t s = batch.seq_length;
  Batch out;
  out.batch = count;
  out.seq_length = s;
  out.tokens = piece(batch.tokens, first * s, (first + count) * s);
  out.labels = piece(batch.labels, first * s, (first + count) * s);
  out.position_ids = piece(batch.position_ids, first * s, (first + count) * s);
  out.document_ids = piece(batch.document_ids, first * s, (first + count) * s);
  out.token_types = piece(batch.token_types, first * s, (first + count) * s);
  out.key_begin = piece(batch.key_begin, first, first + count);
  out.key_end = piece(batch.key_end, first, first + count);
  out.sample_labels = piece(batch.sample_labels, first, first + count);
  const std::int64_t e = batch.encoder_seq_length;
  out.encoder_seq_length = e;
  out.encoder_tokens = piece(batch.encoder_tokens, first * e, (first + count) * e);
  out.encoder_key_begin = piece(batch.encoder_key_begin, first, first + count);
  out.encoder_key_end = piece(batch.encoder_key_end, first, first + count);
  out.sample0 = global_sample(batch, first);
  if (!one_run) {
    out.sample_block = batch.sample_block;
    out.sample_stride = batch.sample_stride;
  }
  return out;
}

void validate(const Batch& batch, std::int64_t vocab_size, std::int64_t positions) {
  TESSERA_CHECK(batch.batch > 0 && batch.seq_length > 0, "batch of ", batch.batch, " x ", batch.seq_length);
  TESSERA_CHECK(vocab_size >= 0, "vocab_size = ", vocab_size);
  TESSERA_CHECK(batch.batch <= std::numeric_limits<std::int64_t>::max() / batch.seq_length, "batch of ",
                batch.batch, " x ", batch.seq_length);
  const std::int64_t n = batch.batch * batch.seq_length;
  check_size(batch.tokens, n, "tokens", false);
  check_size(batch.labels, n, "labels", true);
  check_size(batch.position_ids, n, "position_ids", true);
  check_size(batch.document_ids, n, "document_ids", true);
  check_size(batch.token_types, n, "token_types", true);
  check_size(batch.sample_labels, batch.batch, "sample_labels", true);
  check_size(batch.key_begin, batch.batch, "key_begin", true);
  check_size(batch.key_end, batch.batch, "key_end", true);
  check_encoder_sizes(batch);
  constexpr const char* kVocabulary = "Data and model must use the same vocabulary";
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const std::int64_t limit = vocab_size > 0 ? vocab_size : kAny;
  const std::int64_t s = batch.seq_length;
  check_range(batch, batch.tokens, s, limit, 0, "token", kVocabulary);
  check_range(batch, batch.labels, s, limit, kIgnoredLabel, "label", kVocabulary);
  check_range(batch, batch.position_ids, s, positions > 0 ? positions : kAny, 0, "position",
              "These are the positions the model has");
  check_keys(batch, batch.key_begin, batch.key_end, s, "keys");
  if (batch.encoder_seq_length == 0) return;
  check_range(batch, batch.encoder_tokens, batch.encoder_seq_length, limit, 0, "token of the encoder",
              kVocabulary);
  check_keys(batch, batch.encoder_key_begin, batch.encoder_key_end, batch.encoder_seq_length,
             "keys of the encoder");
}

void validate_extras(const Batch& batch, std::int64_t token_types, std::int64_t sample_classes,
                     bool encodes) {
  TESSERA_CHECK(encodes || batch.encoder_seq_length == 0,
                "this batch has encoder_tokens, and the model has no encoder beside a decoder");
  TESSERA_CHECK(!encodes || batch.encoder_seq_length > 0,
                "this batch has no encoder_tokens, which the model's encoder reads");
  TESSERA_CHECK(!encodes || batch.position_ids.empty(),
                "this batch has position_ids, and the model knows positions by their distances alone");
  TESSERA_CHECK(!encodes || batch.document_ids.empty(),
                "this batch has document_ids: several documents in a sample are not told apart by a decoder "
                "that reads an encoder's result. Give each document a sample of its own");
  TESSERA_CHECK(batch.token_types.empty() || token_types > 0,
                "this batch has token_types, and the model reads none");
  TESSERA_CHECK(batch.sample_labels.empty() || sample_classes > 0,
                "this batch has sample_labels, and the model has no head for whole samples");
  check_range(batch, batch.token_types, batch.seq_length, token_types, 0, "token type",
              "These are the types the model has");
  for (std::size_t i = 0; i < batch.sample_labels.size(); ++i) {
    const std::int64_t label = batch.sample_labels[i];
    TESSERA_ENSURE(DataError, (label >= 0 && label < sample_classes) || label == kIgnoredLabel,
                   "batch: sample ", global_sample(batch, static_cast<std::int64_t>(i)), ": its label ",
                   label, " is not in [0, ", sample_classes, "). These are the classes the model has");
  }
}

}  // namespace tessera
