#pragma once
/// A read-only array of integers whose width is chosen at run time: built in memory or mapped from a cache
/// file.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"

namespace tessera {

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
  /// A view of `size` elements at `data`, aligned for `dtype`, kept alive by `owner`.
  IntArray(std::shared_ptr<const void> owner, const void* data, std::int64_t size, DType dtype)
      : owner_(std::move(owner)), data_(data), size_(size), dtype_(dtype) {}

  std::int64_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  /// Element i; not bounds-checked.
  std::int64_t operator[](std::int64_t i) const {
    switch (dtype_) {
      case DType::i32:
        return static_cast<const std::int32_t*>(data_)[i];
      case DType::u32:
        return static_cast<const std::uint32_t*>(data_)[i];
      default:
        return static_cast<const std::int64_t*>(data_)[i];
    }
  }
  /// The raw little-endian bytes.
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(data_), static_cast<std::size_t>(size_) * size_of(dtype_)};
  }

 private:
  std::shared_ptr<const void> owner_;
  const void* data_ = nullptr;
  std::int64_t size_ = 0;
  DType dtype_ = DType::i32;
};

}  // namespace tessera
