#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

/// [batch, length] to [length, batch].
Tensor position_major(const ExecCtx& ctx, const std::vector<std::int32_t>& values, std::int64_t batch,
                      std::int64_t length) {
  std::vector<std::int32_t> rows(values.size());
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t s = 0; s < length; ++s)
      rows[static_cast<std::size_t>(s * batch + b)] = values[static_cast<std::size_t>(b * length + s)];
  }
  return Tensor::from(ctx, rows, {length, batch});
}
Tensor position_major(const ExecCtx& ctx, const std::vector<std::int32_t>& values, const Batch& batch) {
  return position_major(ctx, values, batch.batch, batch.seq_length);
}

/// What an encoder beside a decoder reads of the samples.
std::shared_ptr<const MicroBatch> encoder_side(const ExecCtx& ctx, const Batch& batch) {
  if (batch.encoder_seq_length == 0) return nullptr;
  auto m = std::make_shared<MicroBatch>();
  m->batch = batch.batch;
  m->seq_length = batch.encoder_seq_length;
  m->sample0 = batch.sample0;
  m->tokens = position_major(ctx, batch.encoder_tokens, batch.batch, batch.encoder_seq_length);
  std::vector<std::int32_t> positions(batch.encoder_tokens.size());
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(batch.encoder_seq_length));
  m->positions = position_major(ctx, positions, batch.batch, batch.encoder_seq_length)
                     .view({batch.batch * batch.encoder_seq_length});
  if (!batch.encoder_key_begin.empty())
    m->key_begin = Tensor::from(ctx, batch.encoder_key_begin, {batch.batch});
  if (!batch.encoder_key_end.empty()) m->key_end = Tensor::from(ctx, batch.encoder_key_end, {batch.batch});
  return m;
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
  m.encoder = encoder_side(ctx, batch);
  return m;
}

}  // namespace tessera
