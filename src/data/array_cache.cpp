#include "data/array_cache.hpp"

#include <filesystem>
#include <system_error>

#include "data/file.hpp"
#include "data/json_depth.hpp"
#include "tessera/base/hash.hpp"

namespace tessera {
namespace {

/// File names need not be UTF-8.
std::string dump(const CacheJson& json) {
  return json.dump(4, ' ', false, CacheJson::error_handler_t::replace);
}

std::uint64_t checksum(const IntArray& array) {
  ContentHash hash;
  array.for_each_piece([&](std::span<const std::byte> piece) { hash.add(piece); });
  return hash.value();
}

std::string read_description(const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  TESSERA_ENSURE(DataError, file.size() < (1 << 20), path, ": too long");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, path);
  return text;
}

/// The entry's layout, with as many rows as the cache says it has, where only it knows.
npy::Layout layout_of(const CachedEntry& entry, const CacheJson& stored, const std::string& path) {
  constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
  npy::Layout layout = entry.layout;
  if (layout.shape[0] != CachedEntry::kAnyRows) return layout;
  const CacheJson rows = stored.value("rows", CacheJson()).value(entry.name, CacheJson());
  TESSERA_ENSURE(DataError, rows.is_number_unsigned() && rows.get<std::uint64_t>() <= kMostRows, path,
                 ": does not say how many rows ", entry.name, " has");
  layout.shape[0] = rows.get<std::int64_t>();
  return layout;
}

std::vector<IntArray> load(const std::string& base, const ArrayCache& cache,
                           std::span<const CachedEntry> entries) {
  const std::string path = base + "description.txt";
  const CacheJson stored = CacheJson::parse(read_description(path), nullptr, false);
  TESSERA_ENSURE(DataError,
                 stored.is_object() && stored.value("description", CacheJson()) == cache.description, path,
                 ": describes other indices");
  const CacheJson sums = stored.value("checksums", CacheJson());
  TESSERA_ENSURE(DataError, sums.is_object(), path, ": has no checksums");
  TESSERA_ENSURE(DataError, !stored.contains("rows") || stored["rows"].is_object(), path,
                 ": does not say how many rows it has");
  std::vector<IntArray> arrays;
  for (const CachedEntry& entry : entries)
    arrays.push_back(npy::load(base + entry.name + ".npy", layout_of(entry, stored, path)));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string file = base + entries[i].name + ".npy";
    TESSERA_ENSURE(
        DataError,
        sums.value(entries[i].name, CacheJson()) == CacheJson(files::hex(entries[i].check(arrays[i], file))),
        file, ": its checksum does not match");
    if (cache.on_progress) cache.on_progress();
  }
  return arrays;
}

void save(const std::string& base, const ArrayCache& cache, std::span<const CachedEntry> entries,
          const std::vector<IntArray>& arrays) {
  std::error_code error;
  std::filesystem::create_directories(cache.folder, error);
  TESSERA_ENSURE(IoError, !error, cache.folder, ": cannot be created: ", error.message());
  CacheJson stored;
  stored["description"] = cache.description;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    npy::Layout layout = entries[i].layout;
    if (layout.shape[0] == CachedEntry::kAnyRows) {
      layout.shape[0] = 1;
      layout.shape[0] = arrays[i].size() / layout.numel();
      stored["rows"][entries[i].name] = layout.shape[0];
    }
    npy::save(base + entries[i].name + ".npy", arrays[i], layout);
    stored["checksums"][entries[i].name] = files::hex(checksum(arrays[i]));
    if (cache.on_progress) cache.on_progress();
  }
  files::OutputFile file(base + "description.txt");
  file.write(dump(stored));
  file.publish(false);  // checksums find what a power cut leaves half written
}

}  // namespace

CachedArrays cached_arrays(const ArrayCache& cache, std::span<const CachedEntry> entries,
                           const std::function<std::vector<IntArray>()>& build) {
  CachedArrays result;
  if (cache.folder.empty()) {
    result.arrays = build();
    return result;
  }
  const std::string text = dump(cache.description);
  const auto bytes = std::as_bytes(std::span(text));
  const std::string hash = files::hex(content_hash(bytes, 1)) + files::hex(content_hash(bytes, 2));
  const std::string base = cache.folder + "/" + hash + "-" + cache.kind + "-" + cache.split + "-";
  std::error_code unreadable;
  if (std::filesystem::exists(base + "description.txt", unreadable)) {
    try {
      result.arrays = load(base, cache, entries);
      result.cache = CacheUse::loaded;
      return result;
    } catch (const Error& error) {
      result.note = detail::concat(error.what(), ". The cached indices are not used; they are built anew");
    }
  }
  result.arrays = build();
  try {
    save(base, cache, entries, result.arrays);
    result.cache = CacheUse::saved;
  } catch (const IoError& error) {
    result.note = error.what();
    result.cache = CacheUse::unsaved;
  }
  return result;
}

}  // namespace tessera
