#pragma once
/// Whether the indices of a cache file can be used: every value is looked at before any is used, in the pass
/// that takes the file's checksum.

#include <cstdint>
#include <string>

#include "tessera/data/gpt_indices.hpp"

namespace tessera {

/// Each gives the content hash of its array. Errors: DataError with `path` for a value that cannot be.
/// Sequence numbers in [request.begin, request.end).
std::uint64_t check_document_index(const IntArray& array, const GptIndexRequest& request,
                                   const std::string& path);
/// Rows rise, by at most seq_length tokens inside a document, and end before `documents`.
std::uint64_t check_sample_index(const IntArray& array, const GptIndexRequest& request,
                                 std::int64_t documents, const std::string& path);
/// Numbers below `samples`.
std::uint64_t check_shuffle_index(const IntArray& array, std::int64_t samples, const std::string& path);

}  // namespace tessera
