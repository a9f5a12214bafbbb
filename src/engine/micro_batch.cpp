#include <algorithm>
#include <numeric>
#include <optional>

#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

/// [batch, length] to [length, batch].
std::vector<std::int32_t> transposed(const std::vector<std::int32_t>& values, std::int64_t batch,
                                     std::int64_t length) {
  std::vector<std::int32_t> rows(values.size());
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t s = 0; s < length; ++s)
      rows[static_cast<std::size_t>(s * batch + b)] = values[static_cast<std::size_t>(b * length + s)];
  }
  return rows;
}
Tensor position_major(const ExecCtx& ctx, const std::vector<std::int32_t>& values, std::int64_t batch,
                      std::int64_t length) {
  return Tensor::from(ctx, transposed(values, batch, length), {length, batch});
}
Tensor position_major(const ExecCtx& ctx, const std::vector<std::int32_t>& values, const Batch& batch) {
  return position_major(ctx, values, batch.batch, batch.seq_length);
}
/// Each sample's positions, from 0.
std::vector<std::int32_t> numbered(std::int64_t batch, std::int64_t length) {
  std::vector<std::int32_t> positions(static_cast<std::size_t>(batch * length));
  for (auto sample = positions.begin(); sample != positions.end(); sample += length)
    std::iota(sample, sample + length, 0);
  return positions;
}

/// The labels that count, where a quarter of the rows can be left out. Their number is rounded up by rows
/// that do not count, so that steps have few different shapes. On the CPU alone: elsewhere a step is
/// recorded, and its shapes must not change.
LabelledRows labelled_rows(const ExecCtx& ctx, const std::vector<std::int32_t>& labels) {
  if (!ctx.device().is_cpu()) return {};
  const auto all = static_cast<std::int64_t>(labels.size());
  const std::int64_t counted = all - std::count(labels.begin(), labels.end(), kIgnoredLabel);
  const std::int64_t step = std::max<std::int64_t>(32, all / 16);
  const std::int64_t wanted = std::max<std::int64_t>(1, (counted + step - 1) / step) * step;
  if (4 * wanted > 3 * all) return {};
  std::vector<std::int32_t> rows, chosen, places(labels.size(), -1);
  std::int64_t spare = wanted - counted;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] == kIgnoredLabel && spare-- <= 0) continue;
    places[i] = static_cast<std::int32_t>(rows.size());
    rows.push_back(static_cast<std::int32_t>(i));
    chosen.push_back(labels[i]);
  }
  const auto n = static_cast<std::int64_t>(rows.size());
  return {Tensor::from(ctx, rows, {n}), Tensor::from(ctx, chosen, {n}), Tensor::from(ctx, places, {all})};
}

/// Which rows of the positions held are real tokens; undefined where no sample has padding.
Tensor counted_rows(const ExecCtx& ctx, const Batch& batch, const SequencePart& part) {
  if (batch.key_begin.empty() && batch.key_end.empty()) return {};
  std::vector<std::int32_t> rows;
  const std::vector<SequencePart::Run> runs =
      part.ranks > 1 ? part.runs() : std::vector<SequencePart::Run>{{0, 0, batch.seq_length}};
  for (const SequencePart::Run& run : runs) {
    for (std::int64_t s = run.whole; s < run.whole + run.count; ++s) {
      for (std::size_t b = 0; b < static_cast<std::size_t>(batch.batch); ++b) {
        const bool begun = batch.key_begin.empty() || s >= batch.key_begin[b];
        rows.push_back(begun && (batch.key_end.empty() || s < batch.key_end[b]) ? 1 : 0);
      }
    }
  }
  return Tensor::from(ctx, rows, {static_cast<std::int64_t>(rows.size())});
}

/// What an encoder beside a decoder reads of the samples.
std::shared_ptr<const MicroBatch> encoder_side(const ExecCtx& ctx, const Batch& batch) {
  if (batch.encoder_seq_length == 0) return nullptr;
  auto m = std::make_shared<MicroBatch>();
  m->batch = batch.batch;
  m->seq_length = batch.encoder_seq_length;
  m->sample0 = batch.sample0;
  m->tokens = position_major(ctx, batch.encoder_tokens, batch.batch, batch.encoder_seq_length);
  m->positions = position_major(ctx, numbered(batch.batch, batch.encoder_seq_length), batch.batch,
                                batch.encoder_seq_length)
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

/// The positions that a rank holds, with their numbers; masks stay those of whole samples.
Batch own_positions(const Batch& batch, const SequencePart& part) {
  Batch own = batch;
  if (own.position_ids.empty()) own.position_ids = numbered(batch.batch, batch.seq_length);
  own.seq_length = part.held();
  const auto cut = [&](std::vector<std::int32_t>& values) {
    if (values.empty()) return;
    std::vector<std::int32_t> held;
    for (std::int64_t b = 0; b < batch.batch; ++b) {
      for (const auto& run : part.runs()) {
        const auto first = values.begin() + b * part.length + run.whole;
        held.insert(held.end(), first, first + run.count);
      }
    }
    values = std::move(held);
  };
  for (auto* values : {&own.tokens, &own.labels, &own.position_ids, &own.token_types}) cut(*values);
  return own;
}

}  // namespace

MicroBatch to_micro_batch(const ExecCtx& ctx, const Batch& whole, const SequencePart& part, bool counts) {
  std::optional<Batch> own;
  if (part.ranks > 1) own = own_positions(whole, part);
  const Batch& batch = own ? *own : whole;
  MicroBatch m;
  m.batch = batch.batch;
  m.seq_length = batch.seq_length;
  m.part = part;
  m.sample0 = batch.sample0;
  const std::int64_t rows = batch.batch * batch.seq_length;
  m.tokens = position_major(ctx, batch.tokens, batch);
  if (!batch.labels.empty()) {
    const std::vector<std::int32_t> labels = transposed(batch.labels, batch.batch, batch.seq_length);
    m.labels = Tensor::from(ctx, labels, {rows});
    m.labelled = labelled_rows(ctx, labels);
  }
  m.positions =
      position_major(
          ctx, batch.position_ids.empty() ? numbered(batch.batch, batch.seq_length) : batch.position_ids,
          batch)
          .view({rows});
  if (!batch.token_types.empty()) m.token_types = position_major(ctx, batch.token_types, batch);
  if (!batch.sample_labels.empty()) m.sample_labels = Tensor::from(ctx, batch.sample_labels, {batch.batch});
  if (!batch.key_begin.empty()) m.key_begin = Tensor::from(ctx, batch.key_begin, {batch.batch});
  if (!batch.key_end.empty()) m.key_end = Tensor::from(ctx, batch.key_end, {batch.batch});
  if (counts) m.counted = counted_rows(ctx, batch, part);
  if (!batch.document_ids.empty()) {
    m.document = Tensor::from(ctx, number_documents(whole), {whole.batch, whole.seq_length});
  }
  m.encoder = encoder_side(ctx, batch);
  return m;
}

}  // namespace tessera
