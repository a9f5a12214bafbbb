#pragma once
/// The file that keeps the algorithms of products between runs: text, one line a product, with a checksum of
/// all lines at the end. It is a memo: a file that is damaged or not ours counts as empty. Header only and
/// free of CUDA, so that it is tested in every build.

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {

/// An algorithm as cuBLASLt lets it be stored and restored by the same version.
using AlgorithmWords = std::array<std::uint64_t, 8>;
struct KeptAlgorithm {
  AlgorithmWords words{};
  bool timed = false;  ///< the fastest of several; else cuBLASLt's first choice
  /// Words of 0: no algorithm. What could be fused into the product is faster as a pass of its own.
  bool separate() const { return words == AlgorithmWords{}; }
  bool operator==(const KeptAlgorithm&) const = default;
};
/// Algorithm by `gemm_cache_key`.
using GemmCache = std::map<std::string, KeptAlgorithm>;

/// Key of one product (ProductKey::text) on GPUs of one name with one version of cuBLASLt.
inline std::string gemm_cache_key(std::string gpu, std::size_t version, const std::string& product) {
  for (char& c : gpu)
    if (c == '\t' || c == '\n') c = ' ';
  return gpu + '\t' + std::to_string(version) + '\t' + product;
}

namespace detail {

constexpr std::string_view kCacheTitle = "tessera gemm cache 2\n";
constexpr std::string_view kTimed = "timed ", kFirst = "first ";
constexpr std::size_t kCacheBytes = std::size_t{16} << 20;  // a hundred thousand products
constexpr std::size_t kCacheKeyBytes = 1024;

inline std::uint64_t checksum(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

inline std::string hexadecimal(std::uint64_t word) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; word >>= 4) text[i] = digits[word & 15u];
  return text;
}

inline std::optional<std::uint64_t> parse_hexadecimal(std::string_view text) {
  std::uint64_t word = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), word, 16);
  if (text.size() != 16 || error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return word;
}

/// "KEY<tab>timed|first 8 words of 16 digits, separated by blanks"
inline bool parse_entry(std::string_view line, GemmCache& cache) {
  constexpr std::size_t kWords = kTimed.size() + 8 * 17 - 1;
  if (line.size() < kWords + 2 || line.size() > kWords + 1 + kCacheKeyBytes) return false;
  const std::size_t split = line.size() - kWords - 1;
  if (line[split] != '\t') return false;
  KeptAlgorithm kept;
  const std::string_view kind = line.substr(split + 1, kTimed.size());
  if (kind != kTimed && kind != kFirst) return false;
  kept.timed = kind == kTimed;
  for (std::size_t i = 0; i < kept.words.size(); ++i) {
    const std::size_t begin = split + 1 + kTimed.size() + 17 * i;
    if (i > 0 && line[begin - 1] != ' ') return false;
    const auto word = parse_hexadecimal(line.substr(begin, 16));
    if (!word) return false;
    kept.words[i] = *word;
  }
  return cache.emplace(line.substr(0, split), kept).second;
}

}  // namespace detail

inline std::string print_gemm_cache(const GemmCache& cache) {
  std::string text(detail::kCacheTitle);
  for (const auto& [key, kept] : cache) {
    text += key + '\t';
    text += kept.timed ? detail::kTimed : detail::kFirst;
    for (std::size_t i = 0; i < kept.words.size(); ++i) {
      if (i > 0) text += ' ';
      text += detail::hexadecimal(kept.words[i]);
    }
    text += '\n';
  }
  return text + "end " + detail::hexadecimal(detail::checksum(text)) + '\n';
}

/// Nothing unless all of `text` is what print_gemm_cache writes.
inline std::optional<GemmCache> parse_gemm_cache(std::string_view text) {
  constexpr std::size_t kEnd = 4 + 16 + 1;
  if (text.size() < detail::kCacheTitle.size() + kEnd || !text.starts_with(detail::kCacheTitle))
    return std::nullopt;
  const std::string_view body = text.substr(0, text.size() - kEnd), end = text.substr(body.size());
  if (!end.starts_with("end ") || end.back() != '\n') return std::nullopt;
  if (detail::parse_hexadecimal(end.substr(4, 16)) != detail::checksum(body)) return std::nullopt;
  GemmCache cache;
  std::string_view rest = body.substr(detail::kCacheTitle.size());
  while (!rest.empty()) {
    const std::size_t length = rest.find('\n');
    if (length == std::string_view::npos || !detail::parse_entry(rest.substr(0, length), cache))
      return std::nullopt;
    rest.remove_prefix(length + 1);
  }
  return cache;
}

/// What `path` holds; empty where there is no such file. Nothing if it is not a whole file of ours.
inline std::optional<GemmCache> load_gemm_cache(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) return GemmCache();
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error || bytes > detail::kCacheBytes) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes))) return std::nullopt;
  return parse_gemm_cache(text);
}

/// Adds what `into` lacks; what was timed replaces what was not.
inline void merge_gemm_cache(GemmCache& into, const GemmCache& other) {
  for (const auto& [key, kept] : other) {
    const auto [slot, fresh] = into.emplace(key, kept);
    if (!fresh && kept.timed && !slot->second.timed) slot->second = kept;
  }
}

/// Merges `own` into the file, which other processes may do at the same time: readers see the old file or the
/// new one. Of two that write at once one may lose what it added, until it writes again. Errors: IoError
/// naming the file.
inline void save_gemm_cache(const std::string& path, const GemmCache& own) {
  GemmCache all = own;
  merge_gemm_cache(all, load_gemm_cache(path).value_or(GemmCache()));
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  // Machines that share a folder have processes of the same number.
  const std::string fresh = tessera::detail::concat(path, '.', ::getpid(), '.', std::random_device()());
  bool written = false;
  {
    std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
    written = static_cast<bool>((file << print_gemm_cache(all)).flush());
  }
  if (written) std::filesystem::rename(fresh, path, error);
  if (written && !error) return;
  std::error_code ignored;
  std::filesystem::remove(fresh, ignored);
  throw IoError(tessera::detail::concat(
      "cannot write the file of matrix product algorithms ", path,
      ": give a path in a folder that can be written, or none to choose anew in every run"));
}

/// The algorithms a process knows, and the file that keeps them.
class GemmMemo {
 public:
  /// Takes over what `path` holds (empty: nothing is read or written). What is worth telling once: a file
  /// that counts as empty, or one that can only be read. Errors: IoError if it cannot be written but
  /// `must_write`.
  std::string open(const std::string& path, bool must_write) {
    path_ = path;
    known_.clear();
    fresh_ = 0;
    if (path.empty()) return "";
    std::string note;
    if (auto found = load_gemm_cache(path)) {
      known_ = std::move(*found);
    } else {
      note = tessera::detail::concat("device.gemm_cache: ", path,
                                     " is damaged or of another version of Tessera: it counts as empty");
    }
    try {
      save_gemm_cache(path, known_);
    } catch (const IoError&) {
      if (must_write) throw;
      path_.clear();
      note += tessera::detail::concat(note.empty() ? "" : "\n", "device.gemm_cache: ", path,
                                      " cannot be written: what this run finds out is not kept");
    }
    return note;
  }

  /// Reads files that are never written; of two with the same key the first counts. Those that are not there
  /// are no fault. What is worth telling, as of open().
  std::string read_tables(const std::vector<std::string>& paths) {
    tables_.clear();
    std::string note;
    for (const std::string& path : paths) {
      if (const auto found = load_gemm_cache(path)) {
        merge_gemm_cache(tables_, *found);
      } else {
        note +=
            tessera::detail::concat(note.empty() ? "" : "\n", "the table of matrix product algorithms ", path,
                                    " is damaged or of another version of Tessera: it counts as empty");
      }
    }
    return note;
  }

  /// Null if there is none, or none that was timed. The file's own come before those of the tables.
  const KeptAlgorithm* find(const std::string& key, bool timed) const {
    const KeptAlgorithm* const own = find_in(known_, key, timed);
    return own != nullptr ? own : find_in(tables_, key, timed);
  }
  /// Of the file alone, timed.
  const KeptAlgorithm* find_own(const std::string& key) const { return find_in(known_, key, true); }

  /// Remembers, and writes what was timed at once. First choices are cheap to make again: they are written
  /// when enough of them are new, and only so many are kept, as texts of every length make ever new products.
  void put(const std::string& key, const KeptAlgorithm& kept) {
    if (!kept.timed && known_.size() >= kMostKept) return;
    known_[key] = kept;
    ++fresh_;
    if (path_.empty() || (!kept.timed && 8 * fresh_ < known_.size())) return;
    try {
      save_gemm_cache(path_, known_);
      fresh_ = 0;
    } catch (const IoError&) {
      // The place was writable before. A memo that can no longer be kept is no reason to end training.
      path_.clear();
    }
  }

  static constexpr std::size_t kMostKept = 4096;

 private:
  static const KeptAlgorithm* find_in(const GemmCache& cache, const std::string& key, bool timed) {
    const auto found = cache.find(key);
    return found == cache.end() || (timed && !found->second.timed) ? nullptr : &found->second;
  }

  std::string path_;
  GemmCache known_, tables_;
  std::size_t fresh_ = 0;  ///< since the file was written
};

}  // namespace tessera::kernels::cuda
