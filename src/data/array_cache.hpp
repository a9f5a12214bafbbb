#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/npy.hpp"
#include "tessera/data/gpt_indices.hpp"

namespace tessera {

using CacheJson = nlohmann::ordered_json;

/// One array of a cache.
struct CachedEntry {
  static constexpr std::int64_t kAnyRows = -1;  ///< as first dimension: as many as the description says
  const char* name;
  npy::Layout layout;  ///< what a cache file must have to be ours
  /// Looks at every value and returns the checksum of all bytes. Errors: DataError naming the path.
  std::function<std::uint64_t(const IntArray&, const std::string& path)> check;
};

struct ArrayCache {
  std::string folder;       ///< "" = nothing is kept
  std::string kind, split;  ///< of the files' names
  CacheJson description;    ///< everything that the arrays depend on
  std::function<void()> on_progress;
};

struct CachedArrays {
  std::vector<IntArray> arrays;
  CacheUse cache = CacheUse::off;
  std::string note;  ///< why a cache that is there was not used, or why it was not saved
};

/// The arrays of `entries`, from <folder>/<hash of the description>-<kind>-<split>-<name>.npy where these are
/// there and sound, else made by `build` and saved. A folder that cannot be written costs only the saving.
/// Errors: those of `build`.
CachedArrays cached_arrays(const ArrayCache& cache, std::span<const CachedEntry> entries,
                           const std::function<std::vector<IntArray>()>& build);

}  // namespace tessera
