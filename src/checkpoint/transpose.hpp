#pragma once
/// Transposing a matrix of any element size while it streams from or to a file, a few megabytes at a time.

#include <cstdint>
#include <functional>
#include <span>

#include "tessera/base/shape.hpp"

namespace tessera::checkpoint_detail {

/// Calls work(first_row, rows, block) for blocks of rows of a matrix of this shape; `block` has room for the
/// rows.
void for_row_blocks(const Shape& shape, std::size_t element_bytes,
                    const std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>& work);

/// Rows [row, row + rows) of a matrix of `shape`, given as `block`, become columns of `transposed` [shape[1],
/// shape[0]].
void put_rows_as_columns(std::span<const std::byte> block, std::span<std::byte> transposed,
                         const Shape& shape, std::int64_t row, std::int64_t rows, std::size_t element_bytes);

/// The way back: fills `block` with rows [row, row + rows) of the matrix of `shape` that `transposed` is the
/// transpose of.
void take_rows_from_columns(std::span<const std::byte> transposed, std::span<std::byte> block,
                            const Shape& shape, std::int64_t row, std::int64_t rows,
                            std::size_t element_bytes);

}  // namespace tessera::checkpoint_detail
