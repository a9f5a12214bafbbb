#include <algorithm>

#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_parts.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {
namespace {

/// Rows [first, first + count) of a whole tensor.
struct Rows {
  std::int64_t first, count;
};

std::vector<std::byte> local(const StoredTensor& from, std::size_t rank, Rows rows) {
  const auto& [file, each] = from.ranks[rank];
  TorchTensor part = each;
  part.shape[0] = rows.count;
  std::vector<std::byte> bytes(static_cast<std::size_t>(part.numel()) * size_of(each.dtype));
  file->read_rows(each, rows.first, rows.count, bytes);
  return bytes;
}

void compare_copy(const StoredTensor& from, const std::string& name, std::size_t rank, Rows own,
                  std::span<const std::byte> part) {
  const auto& [file, copied] = from.copy->ranks[rank];
  const TorchTensor& each = from.ranks[rank].second;
  const bool tied = name == kEmbedding;
  const std::string where = tied ? "the head" : "the second tensor that is '" + name + "'";
  if (copied.shape != each.shape || copied.dtype != each.dtype)
    bad_file(file->path(), where,
             tied ? "is no copy of the embedding, as that of a tied model is" : "has another shape or type",
             kWholeMegatron);
  const std::vector<std::byte> copy = local(*from.copy, rank, own);
  if (!std::equal(copy.begin(), copy.end(), part.begin(), part.end()))
    bad_file(file->path(), where,
             tied ? "differs from the embedding, although the model is tied" : "differs from the first",
             kWholeMegatron);
}

void read_same(const StoredTensor& from, const std::string& name, Rows rows, std::span<std::byte> out) {
  from.ranks[0].first->read_rows(from.ranks[0].second, rows.first, rows.count, out);
  for (std::size_t rank = 0; from.copy && rank < from.ranks.size(); ++rank)
    compare_copy(from, name, rank, rows, out);
  for (std::size_t rank = 1; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> other = local(from, rank, rows);
    if (!std::equal(other.begin(), other.end(), out.begin(), out.end()))
      bad_file(from.ranks[rank].first->path(), "a tensor that all ranks have",
               "differs from that of tensor rank 0",
               "The files are of different runs, or the run had gone astray.");
  }
}

void read_vocabulary(const StoredTensor& from, const std::string& name, Rows rows, std::span<std::byte> out) {
  const std::size_t row = out.size() / static_cast<std::size_t>(rows.count);
  std::int64_t begin = 0;  // of the rank's rows
  for (std::size_t rank = 0; rank < from.ranks.size() && rows.count > 0; ++rank) {
    const auto& [file, each] = from.ranks[rank];
    const Rows own{rows.first - begin, std::min(begin + each.shape[0] - rows.first, rows.count)};
    begin += each.shape[0];
    if (own.count <= 0) continue;
    const std::span<std::byte> part = out.first(static_cast<std::size_t>(own.count) * row);
    file->read_rows(each, own.first, own.count, part);
    if (from.copy) compare_copy(from, name, rank, own, part);
    out = out.subspan(part.size());
    rows = {rows.first + own.count, rows.count - own.count};
  }
  TESSERA_CHECK(out.empty(), "the vocabulary has more rows than the checkpoint");
}

void read_columns(const StoredTensor& from, Rows rows, std::span<std::byte> out) {
  const std::size_t whole = out.size() / static_cast<std::size_t>(rows.count),
                    part = whole / from.ranks.size();
  if (from.ranks.size() == 1)
    return from.ranks[0].first->read_rows(from.ranks[0].second, rows.first, rows.count, out);
  for (std::size_t rank = 0; rank < from.ranks.size(); ++rank) {
    const std::vector<std::byte> own = local(from, rank, rows);
    for (std::size_t row = 0; row * part < own.size(); ++row)
      std::copy_n(own.data() + row * part, part, out.data() + row * whole + rank * part);
  }
}

/// Rows one rank after the other, in each of `halves` parts.
void read_halves(const StoredTensor& from, std::int64_t halves, Rows rows, std::span<std::byte> out) {
  const auto ranks = static_cast<std::int64_t>(from.ranks.size());
  const std::int64_t block = from.shape[0] / (ranks * halves);  // of a rank in a half
  const std::size_t row = out.size() / static_cast<std::size_t>(rows.count);
  for (std::int64_t at = rows.first, end = rows.first + rows.count; at < end;) {
    const std::int64_t half = at / (block * ranks), rank = at / block % ranks, within = at % block;
    const std::int64_t count = std::min(end - at, block - within);
    const auto& [file, each] = from.ranks[static_cast<std::size_t>(rank)];
    const std::size_t bytes = static_cast<std::size_t>(count) * row;
    file->read_rows(each, half * block + within, count, out.first(bytes));
    out = out.subspan(bytes);
    at += count;
  }
}

/// To all queries, all keys, all values (`kinds`: how many of the three), from what each version has: 0 these
/// by rank, 1 by head and feature, 2 and 3 by head (by group of heads with its key and value).
void read_heads(const StoredTensor& from, const StoredOrder& order, std::int64_t kinds, Rows rows,
                std::span<std::byte> out) {
  const ModelConfig& m = *order.model;
  const auto ranks = static_cast<std::int64_t>(from.ranks.size());
  const std::int64_t width = m.head_dim, own = from.shape[0] / width / ranks, per_kind = own / kinds;
  const std::size_t row = out.size() / static_cast<std::size_t>(rows.count);
  const HfPart grouped{"", Shape{from.shape[0]}, false, m.num_kv_heads, width};
  for (std::int64_t at = rows.first, end = rows.first + rows.count; at < end;) {
    const std::int64_t head = at / width, feature = at % width, count = std::min(end - at, width - feature);
    const std::int64_t stored_head = stored_row(grouped, head * width) / width;  // over all ranks
    const auto rank = static_cast<std::size_t>(stored_head / own);
    const std::int64_t place = stored_head % own;  // of [heads of this rank, kinds] where there are no groups
    const std::span<std::byte> part = out.first(static_cast<std::size_t>(count) * row);
    const auto& [file, each] = from.ranks[rank];
    if (order.version == 1) {
      const std::vector<std::byte> all = local(
          from, rank, {(place / kinds * width + feature) * kinds, kinds * count});  // all kinds of a feature
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
        std::copy_n(all.data() +
                        (i * static_cast<std::size_t>(kinds) + static_cast<std::size_t>(place % kinds)) * row,
                    row, part.data() + i * row);
    } else {
      const std::int64_t stored = order.version == 0 ? place % kinds * per_kind + place / kinds : place;
      file->read_rows(each, stored * width + feature, count, part);
    }
    out = out.subspan(part.size());
    at += count;
  }
}

}  // namespace

void read_stored_rows(const StoredTensor& from, const std::string& name, const StoredOrder& order,
                      std::int64_t first, std::int64_t count, std::span<std::byte> out) {
  if (count == 0) return;
  const Rows rows{first, count};
  switch (tensor_split(name)) {
    case TensorSplit::none:
      return read_same(from, name, rows, out);
    case TensorSplit::vocabulary:
      return read_vocabulary(from, name, rows, out);
    case TensorSplit::columns:
      return read_columns(from, rows, out);
    case TensorSplit::gate_up:
      return read_halves(from, order.model->activation == MlpActivation::swiglu ? 2 : 1, rows, out);
    case TensorSplit::rows:
      return read_halves(from, 1, rows, out);
    case TensorSplit::query_key_value:
      return read_heads(from, order, 3, rows, out);
    case TensorSplit::key_value:
      return read_heads(from, order, 2, rows, out);
  }
}

void read_stored(const StoredTensor& from, const std::string& name, const StoredOrder& order,
                 std::span<std::byte> out) {
  read_stored_rows(from, name, order, 0, from.shape[0], out);
}

}  // namespace tessera::checkpoint_detail
