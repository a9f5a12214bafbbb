#include "data/index_check.hpp"

#include <limits>

#include "tessera/base/error.hpp"
#include "tessera/base/hash.hpp"

namespace tessera {
namespace {

template <typename T>
std::span<const T> as(std::span<const std::byte> piece) {
  return {reinterpret_cast<const T*>(piece.data()), piece.size() / sizeof(T)};
}

/// Whether all values are in [low, high); without a branch in the loop, so that it keeps up with the memory.
template <typename T>
bool in_range(std::span<const T> values, std::int64_t low, std::int64_t high) {
  bool bad = false;
  for (const T value : values) {
    bad |= static_cast<std::int64_t>(value) < low || static_cast<std::int64_t>(value) >= high;
  }
  return !bad;
}

bool in_range(std::span<const std::byte> piece, DType dtype, std::int64_t low, std::int64_t high) {
  switch (dtype) {
    case DType::i32:
      return in_range(as<std::int32_t>(piece), low, high);
    case DType::u32:
      return in_range(as<std::uint32_t>(piece), low, high);
    default:
      return in_range(as<std::int64_t>(piece), low, high);
  }
}

struct Row {
  std::int64_t document = 0;
  std::int64_t offset = -1;
};

/// Whether rows follow `last`, which becomes the last of them.
template <typename T>
bool rise(std::span<const T> values, Row& last, std::int64_t documents, std::int64_t seq_length) {
  bool good = true;
  for (std::size_t i = 0; i + 1 < values.size(); i += 2) {
    const Row row{values[i], values[i + 1]};
    // Wraps where an offset is none, so that a step too large or backwards is one test.
    const std::uint64_t step =
        static_cast<std::uint64_t>(row.offset) - static_cast<std::uint64_t>(last.offset) - 1;
    good &= row.document >= last.document && row.document < documents && row.offset >= 0 &&
            row.offset < std::numeric_limits<std::int32_t>::max() &&
            (row.document > last.document || step < static_cast<std::uint64_t>(seq_length));
    last = row;
  }
  return good;
}

std::uint64_t check_values(const IntArray& array, std::int64_t low, std::int64_t high,
                           const std::string& path) {
  ContentHash hash;
  array.for_each_piece([&](std::span<const std::byte> piece) {
    hash.add(piece);
    TESSERA_ENSURE(DataError, in_range(piece, array.dtype(), low, high), path, ": has a value outside [", low,
                   ", ", high, ")");
  });
  return hash.value();
}

}  // namespace

std::uint64_t check_document_index(const IntArray& array, const GptIndexRequest& request,
                                   const std::string& path) {
  return check_values(array, request.begin, request.end, path);
}

std::uint64_t check_sample_index(const IntArray& array, const GptIndexRequest& request,
                                 std::int64_t documents, const std::string& path) {
  ContentHash hash;
  Row last;
  array.for_each_piece([&](std::span<const std::byte> piece) {
    hash.add(piece);
    const bool good = array.dtype() == DType::i32
                          ? rise(as<std::int32_t>(piece), last, documents, request.seq_length)
                          : rise(as<std::int64_t>(piece), last, documents, request.seq_length);
    TESSERA_ENSURE(DataError, good, path, ": its rows do not rise through the ", documents,
                   " documents, at most ", request.seq_length, " tokens at a time");
  });
  return hash.value();
}

std::uint64_t check_shuffle_index(const IntArray& array, std::int64_t samples, const std::string& path) {
  return check_values(array, 0, samples, path);
}

}  // namespace tessera
