#include "tessera/data/int_array.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "data/file.hpp"

namespace tessera {
namespace {

template <typename T>
void widen(const std::byte* from, std::span<std::int64_t> to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = value;
  }
}

}  // namespace

IntArray::IntArray(std::shared_ptr<const files::InputFile> file, std::int64_t begin, std::int64_t size,
                   DType dtype)
    : size_(size), dtype_(dtype), begin_(begin) {
  const auto bytes = size * static_cast<std::int64_t>(size_of(dtype));
  TESSERA_ENSURE(DataError, begin >= 0 && begin <= file->size() && bytes <= file->size() - begin,
                 file->path(), ": has ", file->size(), " bytes, not ", begin + bytes);
  if (file->data() != nullptr) {
    data_ = file->data() + begin;
    owner_ = std::move(file);
  } else {
    file_ = std::move(file);
  }
}

void IntArray::read(std::int64_t first, std::span<std::int64_t> out) const {
  TESSERA_CHECK(first >= 0 && first <= size_ && static_cast<std::int64_t>(out.size()) <= size_ - first,
                "elements ", first, " to ", first + static_cast<std::int64_t>(out.size()), " of ", size_);
  const std::size_t width = size_of(dtype_);
  std::array<std::byte, 4096> piece;
  while (!out.empty()) {
    const std::size_t count = std::min(piece.size() / width, out.size());
    const std::int64_t at = first * static_cast<std::int64_t>(width);
    const std::byte* from = piece.data();
    if (data_ != nullptr) {
      from = static_cast<const std::byte*>(data_) + at;
    } else {
      file_->read(begin_ + at, std::span(piece).first(count * width));
    }
    const auto to = out.first(count);
    dtype_ == DType::i32   ? widen<std::int32_t>(from, to)
    : dtype_ == DType::u32 ? widen<std::uint32_t>(from, to)
                           : widen<std::int64_t>(from, to);
    first += static_cast<std::int64_t>(count);
    out = out.subspan(count);
  }
}

void IntArray::for_each_piece(const std::function<void(std::span<const std::byte>)>& take) const {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const std::size_t bytes = static_cast<std::size_t>(size_) * size_of(dtype_);
  std::vector<std::byte> piece(data_ == nullptr ? std::min(kPiece, bytes) : 0);
  for (std::size_t done = 0; done < bytes; done += kPiece) {
    const std::size_t count = std::min(kPiece, bytes - done);
    if (data_ != nullptr) {
      take({static_cast<const std::byte*>(data_) + done, count});
    } else {
      const auto part = std::span(piece).first(count);
      file_->read(begin_ + static_cast<std::int64_t>(done), part);
      take(part);
    }
  }
}

}  // namespace tessera
