#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

/// [batch, seq] to [seq, batch].
Tensor position_major(const ExecCtx& ctx, const std::vector<std::int32_t>& values, const Batch& batch) {
  std::vector<std::int32_t> rows(values.size());
  for (std::int64_t b = 0; b < batch.batch; ++b) {
    for (std::int64_t s = 0; s < batch.seq_length; ++s) {
      rows[static_cast<std::size_t>(s * batch.batch + b)] =
          values[static_cast<std::size_t>(b * batch.seq_length + s)];
    }
  }
  return Tensor::from(ctx, rows, {batch.seq_length, batch.batch});
}

/// Numbers documents 0, 1, 2, ... along each sample, so that they never decrease whatever ids the caller
/// uses.
std::vector<std::int32_t> number_documents(const Batch& batch) {
  std::vector<std::int32_t> numbers(batch.document_ids.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const bool first = i % static_cast<std::size_t>(batch.seq_length) == 0;
    numbers[i] = first ? 0 : numbers[i - 1] + (batch.document_ids[i] != batch.document_ids[i - 1] ? 1 : 0);
  }
  return numbers;
}

}  // namespace

MicroBatch to_micro_batch(const ExecCtx& ctx, const Batch& batch) {
  MicroBatch m;
  m.batch = batch.batch;
  m.seq_length = batch.seq_length;
  m.sample0 = batch.sample0;
  const std::int64_t rows = batch.batch * batch.seq_length;
  m.tokens = position_major(ctx, batch.tokens, batch);
  if (!batch.labels.empty()) m.labels = position_major(ctx, batch.labels, batch).view({rows});
  std::vector<std::int32_t> positions = batch.position_ids;
  if (positions.empty()) {
    for (std::int64_t i = 0; i < rows; ++i)
      positions.push_back(static_cast<std::int32_t>(i % batch.seq_length));
  }
  m.positions = position_major(ctx, positions, batch).view({rows});
  if (!batch.token_types.empty()) m.token_types = position_major(ctx, batch.token_types, batch);
  if (!batch.sample_labels.empty()) m.sample_labels = Tensor::from(ctx, batch.sample_labels, {batch.batch});
  if (!batch.key_begin.empty()) m.key_begin = Tensor::from(ctx, batch.key_begin, {batch.batch});
  if (!batch.key_end.empty()) m.key_end = Tensor::from(ctx, batch.key_end, {batch.batch});
  if (!batch.document_ids.empty()) {
    m.document = Tensor::from(ctx, number_documents(batch), {batch.batch, batch.seq_length});
  }
  return m;
}

}  // namespace tessera
