#include "checkpoint/transpose.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::checkpoint_detail {
namespace {

constexpr std::int64_t kBlockBytes = 4 << 20;
constexpr std::int64_t kTile = 32;  // a tile of either side stays in the first-level cache

template <typename Word>
void transpose(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride,
               std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i0 = 0; i0 < rows; i0 += kTile) {
    for (std::int64_t j0 = 0; j0 < columns; j0 += kTile) {
      for (std::int64_t i = i0; i < std::min(rows, i0 + kTile); ++i) {
        for (std::int64_t j = j0; j < std::min(columns, j0 + kTile); ++j) {
          std::memcpy(to + (j * to_stride + i) * static_cast<std::int64_t>(sizeof(Word)),
                      from + (i * from_stride + j) * static_cast<std::int64_t>(sizeof(Word)), sizeof(Word));
        }
      }
    }
  }
}

void transpose_any(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride,
                   std::int64_t rows, std::int64_t columns, std::size_t element_bytes) {
  TESSERA_CHECK(element_bytes == 4 || element_bytes == 2, "elements of ", element_bytes, " bytes");
  if (element_bytes == 4)
    transpose<std::uint32_t>(from, from_stride, to, to_stride, rows, columns);
  else
    transpose<std::uint16_t>(from, from_stride, to, to_stride, rows, columns);
}

}  // namespace

void for_row_blocks(const Shape& shape, std::size_t element_bytes,
                    const std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>& work) {
  const std::int64_t row_bytes =
      std::max<std::int64_t>(1, shape[1] * static_cast<std::int64_t>(element_bytes));
  const std::int64_t step = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  std::vector<std::byte> block(static_cast<std::size_t>(std::min(step, shape[0]) * row_bytes));
  for (std::int64_t row = 0; row < shape[0]; row += step) {
    const std::int64_t rows = std::min(step, shape[0] - row);
    work(row, rows, std::span(block).first(static_cast<std::size_t>(rows * row_bytes)));
  }
}

void put_rows_as_columns(std::span<const std::byte> block, std::span<std::byte> transposed,
                         const Shape& shape, std::int64_t row, std::int64_t rows, std::size_t element_bytes) {
  transpose_any(block.data(), shape[1], transposed.data() + static_cast<std::size_t>(row) * element_bytes,
                shape[0], rows, shape[1], element_bytes);
}

void take_rows_from_columns(std::span<const std::byte> transposed, std::span<std::byte> block,
                            const Shape& shape, std::int64_t row, std::int64_t rows,
                            std::size_t element_bytes) {
  transpose_any(transposed.data() + static_cast<std::size_t>(row) * element_bytes, shape[0], block.data(),
                shape[1], shape[1], rows, element_bytes);
}

}  // namespace tessera::checkpoint_detail
