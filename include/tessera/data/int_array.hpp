#pragma once
/// A read-only array of integers whose width is chosen at run time: in memory, or in a cache file that is too
/// large to be kept there.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"

namespace tessera {

namespace files {
class InputFile;
}

class IntArray {
 public:
  IntArray() = default;
  /// Takes over `values` (int32, uint32 or int64).
  template <typename T>
  explicit IntArray(std::vector<T> values) : dtype_(dtype_of<T>::value) {
    auto owned = std::make_shared<const std::vector<T>>(std::move(values));
    data_ = owned->data();
    size_ = static_cast<std::int64_t>(owned->size());
    owner_ = std::move(owned);
  }
  /// `size` elements from byte `begin` of a file on, a multiple of their width. Errors: DataError if they lie
  /// beyond its end.
  IntArray(std::shared_ptr<const files::InputFile> file, std::int64_t begin, std::int64_t size, DType dtype);

  std::int64_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  /// Element i; not bounds-checked. Errors: DataError if the file it lies in has shrunk.
  std::int64_t operator[](std::int64_t i) const {
    if (data_ == nullptr) {
      std::int64_t value = 0;
      read(i, {&value, 1});
      return value;
    }
    switch (dtype_) {
      case DType::i32:
        return static_cast<const std::int32_t*>(data_)[i];
      case DType::u32:
        return static_cast<const std::uint32_t*>(data_)[i];
      default:
        return static_cast<const std::int64_t*>(data_)[i];
    }
  }
  /// Elements [first, first + out.size()). Errors: InvalidArgument out of range, and as above.
  void read(std::int64_t first, std::span<std::int64_t> out) const;
  /// The raw little-endian bytes of an array in memory.
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(data_), static_cast<std::size_t>(size_) * size_of(dtype_)};
  }
  /// Calls `take` with the raw little-endian bytes, a piece at a time: 1 MiB, the last one less. Errors: as
  /// above, and those of `take`.
  void for_each_piece(const std::function<void(std::span<const std::byte>)>& take) const;

 private:
  std::shared_ptr<const void> owner_;
  const void* data_ = nullptr;  ///< null: the elements are in the file
  std::shared_ptr<const files::InputFile> file_;
  std::int64_t size_ = 0;
  DType dtype_ = DType::i32;
  std::int64_t begin_ = 0;  ///< where in the file
};

}  // namespace tessera
