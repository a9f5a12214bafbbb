#include <algorithm>

#include "checkpoint/megatron_parts.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {
namespace {

std::vector<std::byte> local(const StoredTensor& from, std::size_t rank) {
  const auto& [file, each] = from.ranks[rank];
  std::vector<std::byte> bytes(static_cast<std::size_t>(each.numel()) * size_of(each.dtype));
  file->read(each, bytes);
  return bytes;
}

void read_same(const StoredTensor& from, std::span<std::byte> out) {
  from.ranks[0].first->read(from.ranks[0].second, out);
  for (std::size_t rank = 1; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> other = local(from, rank);
    if (!std::equal(other.begin(), other.end(), out.begin(), out.end()))
      bad_file(from.ranks[rank].first->path(), "a tensor that all ranks have",
               "differs from that of tensor rank 0",
               "The files are of different runs, or the run had gone astray.");
  }
}

void read_vocabulary(const StoredTensor& from, std::span<std::byte> out) {
  const std::size_t row = out.size() / static_cast<std::size_t>(from.shape[0]);
  std::vector<std::byte> copy;
  for (std::size_t rank = 0; rank < from.ranks.size() && !out.empty(); ++rank) {
    const auto& [file, each] = from.ranks[rank];
    const std::int64_t rows = std::min(each.shape[0], static_cast<std::int64_t>(out.size() / row));
    const std::span<std::byte> part = out.first(static_cast<std::size_t>(rows) * row);
    file->read_rows(each, 0, rows, part);
    if (from.copy) {
      copy.resize(part.size());
      const auto& [copy_file, copied] = from.copy->ranks[rank];
      if (copied.shape != each.shape || copied.dtype != each.dtype)
        bad_file(copy_file->path(), "the head", "is no copy of the embedding, as that of a tied model is",
                 kWholeMegatron);
      copy_file->read_rows(copied, 0, rows, copy);
      if (!std::equal(copy.begin(), copy.end(), part.begin()))
        bad_file(copy_file->path(), "the head", "differs from the embedding, although the model is tied",
                 kWholeMegatron);
    }
    out = out.subspan(part.size());
  }
  TESSERA_CHECK(out.empty(), "the vocabulary has more rows than the checkpoint");
}

void read_columns(const StoredTensor& from, std::span<std::byte> out) {
  const std::size_t whole = static_cast<std::size_t>(from.shape[1]) * size_of(from.ranks[0].second.dtype);
  const std::size_t part = whole / from.ranks.size();
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> own = local(from, rank);
    for (std::size_t row = 0; row * part < own.size(); ++row)
      std::copy_n(own.data() + row * part, part, out.data() + row * whole + rank * part);
  }
}

/// Rows one rank after the other, in each of `halves` parts.
void read_rows(const StoredTensor& from, std::int64_t halves, std::span<std::byte> out) {
  const std::size_t parts = static_cast<std::size_t>(halves),
                    block = out.size() / (from.ranks.size() * parts);
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> own = local(from, rank);
    for (std::size_t half = 0; half < parts; ++half)
      std::copy_n(own.data() + half * block, block, out.data() + (half * from.ranks.size() + rank) * block);
  }
}

/// To all queries, all keys, all values, from what each version has: 0 these three by rank, 1 by head and
/// feature, 2 and 3 by head (by group of heads with its key and value).
void read_query_key_value(const StoredTensor& from, const StoredOrder& order, std::span<std::byte> out) {
  const ModelConfig& m = *order.model;
  const auto ranks = static_cast<std::int64_t>(from.ranks.size());
  const std::int64_t rows = from.shape[0], heads = rows / m.head_dim, own = heads / ranks, per_kind = own / 3;
  const std::size_t row = out.size() / static_cast<std::size_t>(rows);
  const HfPart grouped{"", Shape{rows}, false, m.num_kv_heads, m.head_dim};
  std::vector<std::vector<std::byte>> parts;
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) parts.push_back(local(from, rank));
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t stored_head = stored_row(grouped, head * m.head_dim) / m.head_dim;  // over all ranks
    const auto rank = static_cast<std::size_t>(stored_head / own);
    const std::int64_t place = stored_head % own;  // of [heads of this rank, 3] where there are no groups
    for (std::int64_t feature = 0; feature < m.head_dim; ++feature) {
      std::int64_t at = place * m.head_dim + feature;
      if (order.version == 0) at = (place % 3 * per_kind + place / 3) * m.head_dim + feature;
      if (order.version == 1) at = (place / 3 * m.head_dim + feature) * 3 + place % 3;
      std::copy_n(parts[rank].data() + static_cast<std::size_t>(at) * row, row,
                  out.data() + static_cast<std::size_t>(head * m.head_dim + feature) * row);
    }
  }
}

}  // namespace

void read_stored(const StoredTensor& from, const std::string& name, const StoredOrder& order,
                 std::span<std::byte> out) {
  switch (tensor_split(name)) {
    case TensorSplit::none:
      return read_same(from, out);
    case TensorSplit::vocabulary:
      return read_vocabulary(from, out);
    case TensorSplit::columns:
      return read_columns(from, out);
    case TensorSplit::gate_up:
      return read_rows(from, order.model->activation == MlpActivation::swiglu ? 2 : 1, out);
    case TensorSplit::query_key_value:
      return read_query_key_value(from, order, out);
  }
}

}  // namespace tessera::checkpoint_detail
