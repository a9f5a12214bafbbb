#pragma once
/// NumPy's .npy files of integers, version 1.0, C order, little-endian.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/int_array.hpp"

namespace tessera::npy {

struct Layout {
  DType dtype;  ///< i32, u32 or i64
  std::vector<std::int64_t> shape;
  std::int64_t numel() const;
};

/// Writes under a temporary name, then renames; not synced, so the reader must be able to tell. Errors:
/// IoError.
void save(const std::string& path, const IntArray& array, const Layout& layout);
/// A file that must have exactly this layout and size; a large one is not kept in memory. Errors: DataError.
IntArray load(const std::string& path, const Layout& layout);
/// The same of a file that is open. Errors: DataError.
IntArray load(std::shared_ptr<const files::InputFile> file, const Layout& layout);

}  // namespace tessera::npy
