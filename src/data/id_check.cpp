#include "tessera/data/id_check.hpp"

#include <algorithm>
#include <vector>

namespace tessera {

std::int32_t check_ids(const IndexedDataset& data, const std::function<void()>& on_progress) {
  constexpr std::int64_t kWhole = std::int64_t{1} << 27, kPiece = 1 << 16, kPieces = 512, kEnds = 1024;
  std::vector<std::int32_t> ids(kPiece);
  std::int32_t largest = -1;
  const auto read = [&](std::int64_t sequence, std::int64_t begin, std::int64_t count) {
    const auto piece = std::span(ids).first(static_cast<std::size_t>(count));
    data.read(sequence, begin, piece);
    for (const std::int32_t id : piece) largest = std::max(largest, id);
    if (on_progress) on_progress();
  };
  const std::int64_t sequences = data.sequences();
  const bool all = data.tokens() <= kWhole;
  const std::int64_t step = all ? 1 : std::max<std::int64_t>(1, sequences / kEnds);
  for (std::int64_t i = 0; i < sequences; i += step) {
    const std::int64_t length = data.length(i);
    if (!all && length > 0) read(i, length - 1, 1);
    const std::int64_t pieces = (length + kPiece - 1) / kPiece;
    // Few long sequences have as many pieces read as many short ones.
    const std::int64_t stride =
        all ? 1 : std::max<std::int64_t>(1, pieces * std::min(sequences, kEnds) / kPieces);
    for (std::int64_t piece = 0; piece < pieces; piece += stride)
      read(i, piece * kPiece, std::min(kPiece, length - piece * kPiece));
  }
  return largest;
}

}  // namespace tessera
